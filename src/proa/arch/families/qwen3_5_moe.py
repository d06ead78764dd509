"""Qwen3.5 and 3.6 text models with experts in every layer, alone or inside their wrapper (arch/wrappers.py)."""

from __future__ import annotations

from collections.abc import Iterator

from proa.arch import common, moe, qwen_hybrid
from proa.arch.decoder import DecoderSpec
from proa.arch.delta_blocks import Decay
from proa.arch.family import Family
from proa.arch.layout import WeightLayout
from proa.arch.weights import WeightRule
from proa.checkpoint.hf_config import HFView


def parse(c: HFView) -> DecoderSpec:
    c.get("intermediate_size", None)  # a width of MLPs that no layer has
    return qwen_hybrid.decoder(c, "qwen3_5_moe", [qwen_hybrid.experts(c)] * common.num_layers(c))


def weights(spec: DecoderSpec, layout: WeightLayout) -> Iterator[WeightRule]:
    return common.decoder_rules(spec, layout, moe.QWEN)


FAMILY = Family(
    name="qwen3_5_moe",
    architectures=("Qwen3_5MoeForCausalLM",),
    parse=parse,
    weights=weights,
    drafts=qwen_hybrid.MTP,
    linear=Decay.HEAD,
)
