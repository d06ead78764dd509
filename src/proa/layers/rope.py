"""Rotary position embedding: frequencies from the specs, and the rotations of each row of a forward."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from proa.arch.blocks import RopeKind, RopeSpec, YarnSpec
from proa.kernels.kernel_set import KernelSet
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
        case RopeKind.YARN:
            if spec.yarn is None:
                raise ValueError("rope of kind YARN needs its YarnSpec")
            return _yarn(base, spec, spec.yarn)
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


def _yarn(base: torch.Tensor, spec: RopeSpec, yarn: YarnSpec) -> torch.Tensor:
    """YaRN: pairs below `first` stay, those from `last` on are slowed by `factor`, and what lies between is mixed
    linearly in the pair's number."""
    first, last = (_pair_that_turns(turns, spec) for turns in (yarn.beta_fast, yarn.beta_slow))
    if yarn.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, spec.dim - 1)
    pairs = torch.arange(len(base), dtype=torch.float64, device=base.device)
    slowed = ((pairs - first) / (last - first or 0.001)).clamp(0, 1)
    return base * (1 - slowed + slowed / spec.factor)


def _pair_that_turns(turns: float, spec: RopeSpec) -> float:
    """The number of the pair, in general no whole one, that turns so often over the original context."""
    return spec.dim * math.log(spec.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(spec.base))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turning:
    """A spec as a kernel wants it, float32 [dim]: each pair's frequency, for both halves, and -1 for the first half, +1
    for the second."""

    spec: RopeSpec
    frequencies: torch.Tensor
    signs: torch.Tensor

    @property
    def magnitude(self) -> float:
        return 1.0 if self.spec.yarn is None else self.spec.yarn.magnitude


class Ropes(Layer):
    """positions [T] -> their rotation by each rope of the model, once per forward for all layers."""

    def __init__(self, ctx: BuildContext, specs: Sequence[RopeSpec]) -> None:
        super().__init__()
        self.factors = ctx.optional("factors")
        self._specs = tuple(specs)
        self._turning: tuple[_Turning, ...] = ()
        self._kernels = ctx.kernels
        self._device = torch.device(ctx.plan.device.value)

    def finish(self, kernels: KernelSet) -> None:
        self._turning = tuple(self._prepared(spec) for spec in self._specs)

    def _prepared(self, spec: RopeSpec) -> _Turning:
        frequencies = inverse_frequencies(spec, self.factors).to(torch.float32)
        half = torch.ones(spec.dim // 2, device=self._device)
        both = torch.cat((frequencies, frequencies)).to(self._device)
        return _Turning(spec=spec, frequencies=both, signs=torch.cat((-half, half)))

    def forward(self, positions: torch.Tensor) -> Mapping[RopeSpec, RopeRows]:
        return {one.spec: self._rows(positions, one) for one in self._turning}

    def _rows(self, positions: torch.Tensor, one: _Turning) -> RopeRows:
        rows = self._kernels.rotation(positions, one.frequencies, one.signs, one.magnitude)
        return replace(rows, is_interleaved=True) if one.spec.is_interleaved else rows
