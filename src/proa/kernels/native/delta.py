"""Native linear attention: kernels/delta.py's ops on the compiled library. Owns the calls, no arithmetic.

One routine, row by row, for every phase: results depend on nothing but the request's own rows, so all of it is exact,
and a prefill's states are to be had after any row.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import Structure, c_float, c_int64, c_void_p

import numpy as np
import torch

from proa.arch.delta_blocks import Decay, DeltaSpec, OutputGate
from proa.kernels.delta import DeltaRows, DeltaState, DeltaWeights, StateSlots
from proa.kernels.native.abi import COp, Kind
from proa.kernels.native.sink import Sink
from proa.kernels.seam import Segment

VECTOR, MAX_KEY, MAX_TAPS = 16, 256, 8  # of csrc/delta.h
_ALIGNMENT = 64


class CDelta(Structure):
    """struct Delta of csrc/delta.h."""

    _fields_ = (
        ("key_heads", c_int64),
        ("value_heads", c_int64),
        ("key_dim", c_int64),
        ("value_dim", c_int64),
        ("taps", c_int64),
        ("per_channel", c_int64),
        ("sigmoid_gate", c_int64),
        ("mixed_width", c_int64),
        ("decay_width", c_int64),
        ("gate_width", c_int64),
        ("eps", c_float),
        ("conv", c_void_p),
        ("rate", c_void_p),
        ("bias", c_void_p),
        ("norm", c_void_p),
        ("conv_state", c_void_p),
        ("states", c_void_p),
        ("kept", c_void_p),
        ("is_replay", c_int64),
    )


class NativeDelta:
    """DeltaOps on the compiled library. `sink` says whether ops run or are recorded."""

    name = "native"

    def __init__(self, sink: Sink) -> None:
        self.sink = sink

    def delta(
        self,
        rows: DeltaRows,
        weights: DeltaWeights,
        spec: DeltaSpec,
        state: DeltaState,
        segment: Segment,
        slots: StateSlots,
    ) -> torch.Tensor:
        dtype = rows.mixed.dtype
        if state.kept is None and slots.kept.max() >= 0:
            raise ValueError("inputs are to be kept, but the state has no rows for them")
        call = _call(spec, weights, state, [_width(part, dtype) for part in (rows.mixed, rows.decay, rows.gate)])
        out = self.sink.empty((len(rows.mixed), spec.values), dtype)
        scratch = self.sink.empty((len(rows.mixed), spec.kept_width), torch.float32)
        op = COp(
            kind=Kind.DELTA,
            a=rows.mixed.data_ptr(),
            b=ctypes.addressof(call),
            c=rows.decay.data_ptr(),
            d=rows.gate.data_ptr(),
            out=out.data_ptr(),
            scratch=scratch.data_ptr(),
        )
        requests = state_rows(segment.rows[:, 1], slots)
        self.sink.emit(dtype, op, len(rows.mixed), (call, weights, state), states=requests)
        return out

    def replay(
        self, weights: DeltaWeights, spec: DeltaSpec, state: DeltaState, counts: np.ndarray, slots: StateSlots
    ) -> None:
        if state.kept is None:
            raise ValueError("there are no kept inputs to apply again")
        width, dtype, total = spec.kept_width, state.kept.dtype, int(counts.sum())
        call = _call(spec, weights, state, [width, width, 0])
        call.is_replay = True
        scratch = self.sink.empty((total, spec.kept_width), torch.float32)
        op = COp(
            kind=Kind.DELTA,
            a=state.kept.data_ptr(),
            b=ctypes.addressof(call),
            c=state.kept.data_ptr() + (spec.channels + spec.value_heads) * dtype.itemsize,
            scratch=scratch.data_ptr(),
        )
        self.sink.emit(dtype, op, total, (call, weights, state), states=state_rows(counts, slots))


def batch_states(segments: Sequence[Segment], states: Sequence[StateSlots]) -> np.ndarray:
    """As `state_rows`, for every request of a batch: first rows count from the batch's."""
    parts = []
    for segment, slots in zip(segments, states, strict=True):
        rows = state_rows(segment.rows[:, 1], slots)
        if segment.first:
            rows = rows.copy()
            rows[:, 0] += segment.first
        parts.append(rows)
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def state_rows(counts: np.ndarray, slots: StateSlots) -> np.ndarray:
    """Struct StateRows of csrc/delta.h for every request, int64 [B, 5]: first row, rows, source, and the addresses of
    its targets and kept rows, which `slots` holds."""
    if NativeDelta in slots.memo:
        return slots.memo[NativeDelta]
    rows = slots.memo[NativeDelta] = np.empty((len(counts), 5), dtype=np.int64)
    rows[:, 0] = np.cumsum(counts) - counts
    rows[:, 1], rows[:, 2] = counts, slots.source
    for column, values in ((3, slots.targets), (4, slots.kept)):
        rows[:, column] = values.ctypes.data + rows[:, 0] * values.itemsize
    return rows


def _width(rows: torch.Tensor, dtype: torch.dtype) -> int:
    if rows.dtype != dtype or rows.stride(1) != 1:
        raise TypeError(f"delta rows are {rows.dtype} with strides {rows.stride()} beside {dtype} rows")
    return rows.stride(0)


def _call(spec: DeltaSpec, weights: DeltaWeights, state: DeltaState, widths: list[int]) -> CDelta:
    if state.delta.data_ptr() % _ALIGNMENT or not state.delta.is_contiguous() or not state.conv.is_contiguous():
        raise ValueError(f"delta states must be contiguous and lie at multiples of {_ALIGNMENT} bytes")
    if spec.key_dim % VECTOR or spec.value_dim % VECTOR or spec.key_dim > MAX_KEY or spec.taps > MAX_TAPS:
        raise ValueError(f"native heads are whole vectors of {VECTOR}, keys at most {MAX_KEY}, taps at most {MAX_TAPS}")
    return CDelta(
        spec.key_heads,
        spec.value_heads,
        spec.key_dim,
        spec.value_dim,
        spec.taps,
        spec.decay is Decay.CHANNEL,
        spec.gate is OutputGate.SIGMOID,
        *widths,
        spec.norm.eps,
        *(part.data_ptr() for part in (weights.conv, weights.rate, weights.bias, weights.norm)),
        state.conv.data_ptr(),
        state.delta.data_ptr(),
        None if state.kept is None else state.kept.data_ptr(),
    )
