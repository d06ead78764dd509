"""A family made by hand, for what no family has yet: experts listed by token, and gated MLPs with a limit.

It is GLM-4-MoE without drafts. Keys of its own: `num_hash_layers` (the first MoE layers list their experts by token),
`swiglu_limit` (of routed experts and dense MLPs), `shared_swiglu_limit` (of shared experts).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from proa.arch.blocks import ActivationSpec, FFNSpec, MoESpec, Score
from proa.arch.decoder import DecoderSpec, LayerSpec
from proa.arch.families import glm4_moe
from proa.checkpoint.hf_config import HFView
from tests.factories.checkpoints import random_tensors, tiny_config, write_checkpoint

ARCHITECTURE = "HandMadeForCausalLM"
TABLE = "model.layers.{}.mlp.gate.tid2eid"
Tensors = dict[str, torch.Tensor]


def parse(c: HFView) -> DecoderSpec:
    spec = glm4_moe.parse(c)
    first = spec.moe_layers[0].index
    hashed = range(first, first + c.int("num_hash_layers"))
    limits = (
        ActivationSpec(limit=c.float("swiglu_limit", default=None)),
        ActivationSpec(limit=c.float("shared_swiglu_limit", default=None)),
    )
    layers = tuple(_layer(layer, spec.vocab, layer.index in hashed, *limits) for layer in spec.layers)
    return replace(spec, family="hand_made", layers=layers)


def _layer(
    layer: LayerSpec, vocab: int, is_listed: bool, activation: ActivationSpec, shared: ActivationSpec
) -> LayerSpec:
    match layer.ffn:
        case FFNSpec() as ffn:
            return replace(layer, ffn=replace(ffn, activation=activation))
        case MoESpec() as moe:
            router = moe.router
            if is_listed:
                router = replace(router, score=Score.SQRT_SOFTPLUS, has_bias=False, table=vocab)
            apart = None if moe.shared is None else replace(moe.shared, activation=shared)
            return replace(layer, ffn=replace(moe, router=router, activation=activation, shared=apart))


FAMILY = replace(
    glm4_moe.FAMILY, name="hand_made", architectures=(ARCHITECTURE,), parse=parse, drafts=MappingProxyType({})
)


def write_hand_made(
    path: Path, *, hashed: int = 1, change: Callable[[Tensors], Tensors] = lambda tensors: tensors, **keys: Any
) -> Path:
    """Two MoE layers behind a dense one; `change` what is stored."""
    config = tiny_config("glm4_moe", architectures=[ARCHITECTURE], num_nextn_predict_layers=0)
    config |= {"num_hash_layers": hashed, **keys}
    tensors = random_tensors(config, 0, torch.float32)
    random = torch.Generator().manual_seed(5)
    for layer in range(1, 1 + hashed):
        del tensors[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"]
        tensors[TABLE.format(layer)] = torch.randint(8, (config["vocab_size"], 2), generator=random)
    return write_checkpoint(path, config, change(tensors))
