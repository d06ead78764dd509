"""Block-FP8 forms of float checkpoints, by arithmetic of their own: one scale per rectangle, the last ones cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

BLOCK = (32, 32)
PLAIN = ("gate.", "norm", "embed_tokens", "head", "eh_proj", "weights_proj", "bias", "expert_gate")


def is_linear(name: str) -> bool:
    """The tensors that releases store in 8 bits."""
    return name.endswith(".weight") and not any(word in name for word in PLAIN)


def spread(scale: torch.Tensor, shape: tuple[int, int], block: tuple[int, int]) -> torch.Tensor:
    """Each element's scale [rows, columns]."""
    rows = torch.arange(shape[0]) // block[0]
    columns = torch.arange(shape[1]) // block[1]
    return scale[rows][:, columns]


def to_fp8(weight: torch.Tensor, block: tuple[int, int] = BLOCK) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales whose largest element in each block is the format's largest number, 448."""
    rows, columns = weight.shape
    grid = torch.zeros(-(-rows // block[0]), -(-columns // block[1]))
    for i in range(grid.shape[0]):
        for j in range(grid.shape[1]):
            part = weight[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
            grid[i, j] = part.float().abs().max().clamp_min(1e-12) / 448
    codes = (weight.float() / spread(grid, (rows, columns), block)).to(torch.float8_e4m3fn)
    return codes, grid


def values_of(codes: torch.Tensor, scale: torch.Tensor, block: tuple[int, int] = BLOCK) -> torch.Tensor:
    return codes.float() * spread(scale, (codes.shape[0], codes.shape[1]), block)


def quantised(
    tensors: Mapping[str, torch.Tensor], *, which: Callable[[str], bool] = is_linear
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The checkpoint's tensors with codes and scales in the place of linear weights, and the values that they mean."""
    stored, meant = dict(tensors), dict(tensors)
    for name in (name for name in tensors if is_linear(name) and which(name)):
        codes, scale = to_fp8(tensors[name])
        stored |= {name: codes, f"{name}_scale_inv": scale}
        meant[name] = values_of(codes, scale)
    return stored, meant


def with_fp8(config: Mapping[str, Any]) -> dict[str, Any]:
    quant = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)}
    return {**config, "quantization_config": quant}
