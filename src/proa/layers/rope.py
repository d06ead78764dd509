"""Rotary position embedding: frequencies from the spec, and the rotation of each row of a forward."""

from __future__ import annotations

import math

import torch

from proa.arch.blocks import RopeKind, RopeSpec
from proa.kernels.bind import KernelSet
from proa.kernels.seam import RopeRows
from proa.layers.base import BuildContext, Layer


def inverse_frequencies(spec: RopeSpec, factors: torch.Tensor | None) -> torch.Tensor:
    """Radians per position of each pair, float64 [dim / 2]. `factors` [dim / 2] are read by FACTORS only."""
    device = None if factors is None else factors.device
    base = spec.base ** -(torch.arange(0, spec.dim, 2, dtype=torch.float64, device=device) / spec.dim)
    match spec.kind:
        case RopeKind.DEFAULT:
            return base
        case RopeKind.LINEAR:
            return base / spec.factor
        case RopeKind.LLAMA3:
            return _llama3(base, spec)
        case RopeKind.FACTORS:
            if factors is None:
                raise ValueError("rope of kind FACTORS needs its factors")
            return base / factors.double()


def _llama3(base: torch.Tensor, spec: RopeSpec) -> torch.Tensor:
    """Llama 3.1: pairs that turn fewer than `low` times over the original context are slowed by `factor`, those that
    turn more than `high` times stay, and what lies between is mixed linearly in the number of turns."""
    turns = spec.original_max_position * base / (2 * math.pi)
    keep = ((turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)).clamp(0, 1)
    return base * (keep + (1 - keep) / spec.factor)


class Rope(Layer):
    """positions [T] -> their rotation, once per forward for all layers."""

    frequencies: torch.Tensor  # float32 [dim]: each pair's frequency, for both halves
    signs: torch.Tensor  # float32 [dim]: -1 for the first half, +1 for the second

    def __init__(self, ctx: BuildContext, spec: RopeSpec) -> None:
        super().__init__()
        self.factors = ctx.optional("factors")
        self._spec = spec
        self._kernels = ctx.kernels
        self._device = torch.device(ctx.plan.device.value)

    def finish(self, kernels: KernelSet) -> None:
        frequencies = inverse_frequencies(self._spec, self.factors).to(torch.float32)
        self.frequencies = torch.cat((frequencies, frequencies)).to(self._device)
        half = torch.ones(self._spec.dim // 2, device=self._device)
        self.signs = torch.cat((-half, half))

    def forward(self, positions: torch.Tensor) -> RopeRows:
        return self._kernels.rotation(positions, self.frequencies, self.signs)
