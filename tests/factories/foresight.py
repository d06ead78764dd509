"""Tiny checkpoints whose bundled next-token layer is right often, not always, without any training.

A target of which every layer adds little says what its last token's embedding says; so does a layer that hands the
embedding of its token through. What the layers do add differs between the two, and that is where they disagree.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from tests.factories.checkpoints import random_tensors, tiny_config, write_checkpoint
from tests.factories.hybrid_checkpoints import HYBRID_FAMILIES, hybrid_config, hybrid_tensors
from tests.factories.mla_checkpoints import MLA_FAMILIES, mla_config, mla_tensors

SHARE = 0.1  # of what random layers add


def write_foreseeing(family: str, path: Path, seed: int = 0, *, is_right: bool = True, **overrides: object) -> Path:
    """The target is the same with a layer that is not right: one as random as the rest. `overrides`: of a hybrid."""
    if family in HYBRID_FAMILIES:
        return _write_hybrid(family, path, seed, is_right, overrides)
    is_mla = family in MLA_FAMILIES
    config = mla_config(family) if is_mla else tiny_config(family)
    tensors = (mla_tensors if is_mla else random_tensors)(config, seed, torch.float32)
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] *= SHARE
    if is_right:
        layer, hidden = f"model.layers.{config['num_hidden_layers']}", config["hidden_size"]
        tensors[f"{layer}.enorm.weight"] = torch.ones(hidden)
        tensors[f"{layer}.eh_proj.weight"][:, :hidden] = torch.eye(hidden)
        tensors[f"{layer}.eh_proj.weight"][:, hidden:] *= SHARE
        tensors[f"{layer}.shared_head.norm.weight"] = tensors["model.norm.weight"].clone()
    return write_checkpoint(path, config, tensors)


def _write_hybrid(family: str, path: Path, seed: int, is_right: bool, overrides: Mapping[str, object]) -> Path:
    """Of Qwen's hybrids, whose layer has names of its own; of others the target alone."""
    config = hybrid_config(family, **overrides)
    tensors = hybrid_tensors(config, seed, torch.float32)
    for name in tensors:
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "w2.weight", "experts.down_proj")):
            tensors[name] *= SHARE
    if is_right and "mtp.fc.weight" in tensors:
        hidden = len(tensors["mtp.fc.weight"])
        tensors["mtp.pre_fc_norm_embedding.weight"] = torch.zeros(hidden)  # a norm's weight lacks 1 here
        tensors["mtp.fc.weight"][:, :hidden] = torch.eye(hidden)
        tensors["mtp.fc.weight"][:, hidden:] *= SHARE
        body = "model.language_model" if "text_config" in config else "model"
        tensors["mtp.norm.weight"] = tensors[f"{body}.norm.weight"].clone()
    return write_checkpoint(path, config, tensors)
