"""Self-test of linear attention: both backends' results on small random values, for probe.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from proa.arch.blocks import NormSpec
from proa.arch.delta_blocks import Decay, DeltaSpec, OutputGate
from proa.kernels.delta import NONE, DeltaOps, DeltaRows, DeltaState, DeltaWeights, StateSlots
from proa.kernels.native.abi import load_library
from proa.kernels.native.delta import NativeDelta
from proa.kernels.native.sink import Direct
from proa.kernels.reference.delta import ReferenceDelta
from proa.kernels.seam import Segment
from proa.units import Phase

PROMPT, ROWS = 9, 3


def delta_results(library: Path, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """(op, native, reference): a prompt, a verify that keeps its inputs, and two of them applied again."""
    native = NativeDelta(Direct(load_library(library)))
    for name, spec in (("gdn", _spec(Decay.HEAD, OutputGate.SILU)), ("kda", _spec(Decay.CHANNEL, OutputGate.SIGMOID))):
        made = [_run(ops, spec, dtype) for ops in (native, ReferenceDelta())]
        for what, ours, expected in zip(("results", "states", "rows before"), *made, strict=True):
            yield f"{name} {what}", ours, expected


def _spec(decay: Decay, gate: OutputGate) -> DeltaSpec:
    key_heads = 2 if decay is Decay.HEAD else 4
    return DeltaSpec(
        key_heads=key_heads,
        value_heads=4,
        key_dim=32,
        value_dim=80,
        taps=4,
        decay=decay,
        gate=gate,
        norm=NormSpec(eps=1e-6),
        rank=None,
    )


def _run(ops: DeltaOps, spec: DeltaSpec, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(0)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random)

    weights = random_weights(spec, random)
    mixed = values(PROMPT + ROWS, spec.input_rows).to(dtype)
    state = DeltaState(
        conv=torch.zeros((3, *spec.conv_shape), dtype=dtype),
        delta=torch.zeros((3, *spec.state_shape)),
        kept=torch.zeros((ROWS, spec.kept_width), dtype=dtype),
    )
    results = []
    for phase, at, count, slots in (
        (Phase.PREFILL, 0, PROMPT, StateSlots.of([NONE], [NONE] * (PROMPT - 1) + [0])),
        (Phase.VERIFY, PROMPT, ROWS, StateSlots.of([0], [NONE] * (ROWS - 1) + [1], list(range(ROWS)))),
    ):
        rows = DeltaRows.merged(mixed[at : at + count], spec)
        results.append(ops.delta(rows, weights, spec, state, one_request(phase, count, at), slots))
    ops.replay(weights, spec, state, np.array([2]), StateSlots.of([0], [NONE, 2], [0, 1]))
    return torch.cat(results), state.delta, state.conv


def random_weights(spec: DeltaSpec, random: torch.Generator) -> DeltaWeights:
    def values(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random)

    return DeltaWeights(
        conv=values(spec.taps, spec.channels) / 2,
        rate=values(spec.value_heads).abs(),
        bias=values(spec.decays),
        norm=1 + values(spec.value_dim) / 4,
    )


def one_request(phase: Phase, count: int, start: int) -> Segment:
    """A segment of rows `start` to `start + count` of one request, as far as delta ops read it."""
    return Segment(
        phase=phase,
        first=0,
        num_rows=count,
        requests=1,
        queries=count,
        rows=np.array([[0, count, start]]),
        tables=np.zeros((1, 1), dtype=np.int32),
        pad=None,
        unpad=None,
        views={},
    )
