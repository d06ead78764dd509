"""Requests for the delta ops: random layers and rows, and forwards over them in any cutting."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import numpy as np
import pytest
import torch

from proa.arch.blocks import NormSpec
from proa.arch.delta_blocks import Decay, DeltaSpec, OutputGate
from proa.kernels.delta import NONE, DeltaOps, DeltaRows, DeltaState, DeltaWeights, StateSlots
from proa.kernels.native.abi import load_library
from proa.kernels.native.delta import NativeDelta
from proa.kernels.native.sink import Direct
from proa.kernels.reference.delta import ReferenceDelta, TorchDelta
from proa.kernels.seam import Segment
from proa.units import Phase
from tests.factories.native import probed, why_not

T = TypeVar("T", bound=Any)
KINDS = ("gdn", "kda")
BACKENDS = ("reference", "torch", "native")


def backend(name: str) -> DeltaOps:
    if name == "reference":
        return ReferenceDelta()
    if name == "torch":
        return TorchDelta()
    found = probed()
    if why_not(found) is not None:
        pytest.skip(str(why_not(found)))
    return NativeDelta(Direct(load_library(found.library)))


def spec(kind: str, *, key_heads: int = 2, value_heads: int = 4, key_dim: int = 32, value_dim: int = 48) -> DeltaSpec:
    is_gdn = kind == "gdn"
    return DeltaSpec(
        key_heads=key_heads if is_gdn else value_heads,
        value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        taps=4,
        decay=Decay.HEAD if is_gdn else Decay.CHANNEL,
        gate=OutputGate.SILU if is_gdn else OutputGate.SIGMOID,
        norm=NormSpec(eps=1e-6),
        rank=None if is_gdn else 16,
    )


def segment(phase: Phase, counts: Sequence[int], starts: Sequence[int]) -> Segment:
    """What the delta ops read of a segment."""
    rows = np.stack((np.cumsum(counts) - counts, counts, starts), axis=1).astype(np.int64)
    return Segment(
        phase=phase,
        first=0,
        num_rows=sum(counts),
        requests=len(counts),
        queries=max(counts),
        rows=rows,
        tables=np.zeros((len(counts), 1), dtype=np.int32),
        pad=None,
        unpad=None,
        views={},
    )


@dataclass(frozen=True)
class Part:
    """Rows [start, stop) of one request in a forward. `targets` and `kept` as in StateSlots, one per row.

    The last `wrong` rows are those of the last request, as a draft's wrong tokens are.
    """

    request: int
    start: int
    stop: int
    source: int
    targets: Sequence[int]
    kept: Sequence[int] | None = None
    wrong: int = 0


def _moved(value: T, device: str) -> T:
    """Every tensor of a dataclass."""
    return type(value)(**{part.name: getattr(value, part.name).to(device) for part in fields(value)})


class Deltas:
    """A random layer, the rows of some requests, and a state whose unwritten slots hold NaN."""

    def __init__(
        self,
        spec: DeltaSpec,
        lengths: Sequence[int],
        *,
        dtype: torch.dtype = torch.float32,
        slots: int = 12,
        kept: int = 16,
        seed: int = 0,
        rate: float = 4.0,
    ) -> None:
        self.spec, self.dtype, self._slots, self._kept = spec, dtype, slots, kept
        random = torch.Generator().manual_seed(seed)

        def values(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=random)

        self.weights = DeltaWeights(
            conv=values(spec.taps, spec.channels) / 2,
            rate=torch.rand(spec.value_heads, generator=random) * rate + 0.01,
            bias=values(spec.decays),
            norm=1 + values(spec.value_dim) / 4,
        )
        self.rows = [self._request(values, n) for n in lengths]
        self.state = self.fresh_state()

    def _request(self, values: Callable[..., torch.Tensor], rows: int) -> DeltaRows:
        mixed = values(rows, self.spec.input_rows).to(self.dtype)
        if self.spec.rank is None:
            return DeltaRows.merged(mixed, self.spec)
        decay, gate = (values(rows, width).to(self.dtype) for width in (self.spec.decays, self.spec.values))
        return DeltaRows(mixed=mixed, decay=decay, gate=gate)

    def to(self, device: str) -> None:
        """Everything to another device."""
        self.weights, self.state = _moved(self.weights, device), _moved(self.state, device)
        self.rows = [_moved(rows, device) for rows in self.rows]

    def fresh_state(self) -> DeltaState:
        return DeltaState(
            conv=torch.full((self._slots, *self.spec.conv_shape), math.nan, dtype=self.dtype),
            delta=torch.full((self._slots, *self.spec.state_shape), math.nan),
            kept=torch.full((self._kept, self.spec.kept_width), math.nan, dtype=self.dtype) if self._kept else None,
        )

    def forward(self, ops: DeltaOps, phase: Phase, parts: Sequence[Part]) -> torch.Tensor:
        """One segment with these parts: its results [rows, Hv * dv]."""
        counts = [part.stop - part.start for part in parts]
        slots = StateSlots.of(
            [part.source for part in parts],
            [slot for part in parts for slot in part.targets],
            [row for part in parts for row in part.kept or [NONE] * (part.stop - part.start)],
        )
        where = segment(phase, counts, [part.start for part in parts])
        return ops.delta(self.together(parts), self.weights, self.spec, self.state, where, slots)

    def together(self, parts: Sequence[Part]) -> DeltaRows:
        """The rows of all parts; `merged` views where the projection makes them all."""
        mixed = self._taken("mixed", parts)
        if self.spec.rank is None:
            return DeltaRows.merged(mixed, self.spec)
        return DeltaRows(mixed=mixed, decay=self._taken("decay", parts), gate=self._taken("gate", parts))

    def _taken(self, name: str, parts: Sequence[Part]) -> torch.Tensor:
        taken = []
        for part in parts:
            right = part.stop - part.wrong
            taken.append(getattr(self.rows[part.request], name)[part.start : right])
            taken.append(getattr(self.rows[-1], name)[right : part.stop])
        return torch.cat(taken)

    def run(self, ops: DeltaOps, phase: Phase, request: int, slot: int, steps: Sequence[int]) -> torch.Tensor:
        """A request from its first row on, in forwards of `steps` rows each, its state in `slot`."""
        results, at = [], 0
        for count in steps:
            targets = [*[NONE] * (count - 1), slot]
            part = Part(request, at, at + count, slot if at else NONE, targets)
            results.append(self.forward(ops, phase, [part]))
            at += count
        return torch.cat(results)

    def slot(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.state.conv[index].clone(), self.state.delta[index].clone()
