"""Self-test of linear attention: two backends' results on small random values, for probe.py and device.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from proa.arch.blocks import NormSpec
from proa.arch.delta_blocks import BLOCK, Decay, DeltaSpec, OutputGate
from proa.kernels.delta import NONE, DeltaOps, DeltaRows, DeltaState, DeltaWeights, StateSlots
from proa.kernels.native.abi import load_library
from proa.kernels.native.delta import NativeDelta
from proa.kernels.native.sink import Direct
from proa.kernels.reference.delta import ReferenceDelta
from proa.kernels.seam import Segment
from proa.units import Phase

_WHAT = ("results", "states", "rows before")
PROMPT, ROWS = 9, 3
DEVICE_PROMPT, DEVICE_HEAD = 2 * BLOCK + 9, 128  # whole blocks and rows after them; the only heads that FlashInfer has


def delta_results(library: Path, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """(op, native, reference): a prompt, a verify that keeps its inputs, and two of them applied again."""
    native = NativeDelta(Direct(load_library(library)))
    for name, spec in (("gdn", _spec(Decay.HEAD, 32, 80)), ("kda", _spec(Decay.CHANNEL, 32, 80))):
        made = [_run(ops, spec, dtype, PROMPT) for ops in (native, ReferenceDelta())]
        for what, ours, expected in zip(_WHAT, *made, strict=True):
            yield f"{name} {what}", ours, expected


def device_results(
    ops: DeltaOps, decays: Sequence[Decay], state: torch.dtype, device: str
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """As `delta_results`, of a device's kernels in bfloat16 with states of type `state`."""
    for decay in decays:
        spec = _spec(decay, DEVICE_HEAD, DEVICE_HEAD)
        ours = _run(ops, spec, torch.bfloat16, DEVICE_PROMPT, state, device)
        expected = _run(ReferenceDelta(), spec, torch.bfloat16, DEVICE_PROMPT)
        for what, one, other in zip(_WHAT, ours, expected, strict=True):
            yield f"decay by {decay.value}: {what}", one, other


def _spec(decay: Decay, key_dim: int, value_dim: int) -> DeltaSpec:
    return DeltaSpec(
        key_heads=2 if decay is Decay.HEAD else 4,
        value_heads=4,
        key_dim=key_dim,
        value_dim=value_dim,
        taps=4,
        decay=decay,
        gate=OutputGate.SILU if decay is Decay.HEAD else OutputGate.SIGMOID,
        norm=NormSpec(eps=1e-6),
        rank=None,
    )


def _run(
    ops: DeltaOps,
    spec: DeltaSpec,
    dtype: torch.dtype,
    prompt: int,
    state_dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Everything as _WHAT says, in host memory."""
    random = torch.Generator().manual_seed(0)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random).to(device)

    weights = random_weights(spec, random, device)
    mixed = values(prompt + ROWS, spec.input_rows).to(dtype)
    state = DeltaState(
        conv=torch.zeros((3, *spec.conv_shape), dtype=dtype, device=device),
        delta=torch.zeros((3, *spec.state_shape), dtype=state_dtype, device=device),
        kept=torch.zeros((ROWS, spec.kept_width), dtype=dtype, device=device),
    )
    results = []
    for phase, at, count, slots in (
        (Phase.PREFILL, 0, prompt, StateSlots.of([NONE], [NONE] * (prompt - 1) + [0])),
        (Phase.VERIFY, prompt, ROWS, StateSlots.of([0], [NONE] * (ROWS - 1) + [1], list(range(ROWS)))),
    ):
        rows = DeltaRows.merged(mixed[at : at + count], spec)
        results.append(ops.delta(rows, weights, spec, state, one_request(phase, count, at), slots))
    ops.replay(weights, spec, state, np.array([2]), StateSlots.of([0], [NONE, 2], [0, 1]))
    return torch.cat(results).cpu(), state.delta.cpu(), state.conv.cpu()


def random_weights(spec: DeltaSpec, random: torch.Generator, device: str = "cpu") -> DeltaWeights:
    def values(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random).to(device)

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
