"""Tiny checkpoints whose bundled next-token layer is right almost always, because it is the target's own layer again.

A target of one layer with embedding rows of length 1 says what its layer makes of the last token. A next-token layer
with the same weights, which hands the embedding through, says it one token earlier. It attends to all tokens but the
first, and attention counts little here: what is said comes from the experts. A draft whose experts are out of order is
therefore wrong, though every tensor has its name and shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tests.factories.checkpoints import random_tensors, tiny_config, write_checkpoint
from tests.factories.mla_checkpoints import MLA_FAMILIES, mla_config, mla_tensors

Tensors = dict[str, torch.Tensor]
ATTENTION, EXPERTS = 0.1, 4.0  # how much of the layer's parts enters a row of length 1


def twin(family: str, seed: int = 0, *, shared: float = EXPERTS, **overrides: Any) -> tuple[dict[str, Any], Tensors]:
    """Config and tensors. The draft's layer is number 1; `shared` is the part of the shared experts."""
    keys = {"num_hidden_layers": 1, "first_k_dense_replace": 0, **overrides}
    if family in MLA_FAMILIES:
        config = mla_config(family, **keys)
        tensors = mla_tensors(config, seed, torch.float32)
    else:
        config = tiny_config(family, **keys)
        tensors = random_tensors(config, seed, torch.float32)
    embed = tensors["model.embed_tokens.weight"]
    embed /= embed.square().mean(1, keepdim=True).sqrt()
    for name in tensors:
        if name.endswith("o_proj.weight"):
            tensors[name] *= ATTENTION
        if "experts" in name and name.endswith("down_proj.weight"):
            tensors[name] *= shared if "shared" in name else EXPERTS
    hidden = config["hidden_size"]
    own = {name: tensor for name, tensor in tensors.items() if name.startswith("model.layers.0.")}
    tensors |= {name.replace("layers.0.", "layers.1."): tensor.clone() for name, tensor in own.items()}
    tensors["model.layers.1.enorm.weight"] = torch.ones(hidden)
    tensors["model.layers.1.eh_proj.weight"] = torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], 1)
    tensors["model.layers.1.shared_head.norm.weight"] = tensors["model.norm.weight"].clone()
    tensors["model.layers.1.embed_tokens.weight"] = embed.clone()
    return config, tensors


def write_twin(family: str, path: Path, seed: int = 0, **overrides: Any) -> Path:
    return write_checkpoint(path, *twin(family, seed, **overrides))


def permuted_experts(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Each of the draft's routed experts in the place of the one before it; its router knows nothing of that."""
    block = "model.layers.1.mlp.experts."
    experts = {int(name.removeprefix(block).split(".")[0]) for name in tensors if name.startswith(block)}
    moved = {
        f"{block}{expert}.{part}_proj.weight": tensors[f"{block}{(expert + 1) % len(experts)}.{part}_proj.weight"]
        for expert in experts
        for part in ("gate", "up", "down")
    }
    return {**tensors, **moved}


def zeroed_shared_experts(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """The draft's shared experts give nothing."""
    name = "model.layers.1.mlp.shared_experts.down_proj.weight"
    return {**tensors, name: torch.zeros_like(tensors[name])}


def another_layer(tensors: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> Tensors:
    """The draft's experts and attention are those of a checkpoint that has nothing to do with this target."""
    keep = ("enorm", "hnorm", "eh_proj", "shared_head", "embed_tokens")
    taken = {n: t for n, t in other.items() if n.startswith("model.layers.1.") and not any(w in n for w in keep)}
    return {**tensors, **taken}
