"""Where native ops go: run at once, or recorded into a program that is run once per forward. Owns no op.

A step of a small model has a few hundred ops of some 20 µs. Called one by one from Python they cost as much again in
calls, views and allocations; a recorded list costs one call. The layers' own code makes the recording: run once, with
tensors of a workspace, so the program cannot differ from what the layers do.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Mapping
from math import prod
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import torch

from proa.kernels.native.abi import CBatch, COp


class Sink(Protocol):
    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor that an op will fill."""
        ...

    def logits(self, rows: int, vocab: int) -> torch.Tensor:
        """The float32 tensor that the last op fills: a caller keeps it, so it is no part of a workspace."""
        ...

    def emit(self, dtype: torch.dtype, op: COp, rows: int, keep: tuple[Any, ...], **batch: Any) -> None:
        """Take one op over `rows` rows. `batch` are the CBatch fields that it reads, as tensors or arrays; `keep` are
        objects whose addresses are in the op and that must live as long."""
        ...


class Direct:
    """Runs each op when it is emitted."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._lib = library

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def logits(self, rows: int, vocab: int) -> torch.Tensor:
        return torch.empty((rows, vocab))

    def emit(self, dtype: torch.dtype, op: COp, rows: int, keep: tuple[Any, ...], **batch: Any) -> None:
        del keep
        fields = c_batch(rows, batch)
        self._lib.proa_run(dtype == torch.bfloat16, ctypes.byref(op), 1, ctypes.byref(fields))


_COUNTS: Mapping[str, str] = MappingProxyType(
    {"logits_rows": "num_logits", "requests": "num_requests", "states": "num_states"}
)
"""Fields of a C batch that come with a count of their entries."""


def c_batch(rows: int, batch: Mapping[str, Any]) -> CBatch:
    """The C batch of these fields. What they point to must outlive its use."""
    counts = {_COUNTS[name]: value.shape[0] for name, value in batch.items() if name in _COUNTS}
    return CBatch(rows=rows, **counts, **{name: address(value) for name, value in batch.items()})


def address(value: torch.Tensor | np.ndarray) -> int:
    return value.data_ptr() if isinstance(value, torch.Tensor) else value.ctypes.data


def lend(memory: np.ndarray, rows: int, back: list[np.ndarray]) -> torch.Tensor:
    """The first `rows` rows of `memory`, which comes `back` when the tensor and everything made of it are gone."""
    lease = memory[:rows]  # held by the tensor's storage, so also by every part of it
    weakref.finalize(lease, back.append, memory)
    return torch.from_numpy(lease)


class Recorder:
    """Collects ops over a workspace of `capacity` rows. Memory that the recorded code drops (a tensor and its parts) is
    used again for a later op, as an allocator would: by then everything that reads it has been emitted before."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.ops: list[COp] = []
        self.keep: list[Any] = []
        self.is_bf16 = False
        self._selected = False
        self._free: dict[tuple[int, ...], list[np.ndarray]] = {}

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        spare = self._free.setdefault(shape + (dtype.itemsize,), [])
        memory = spare.pop() if spare else torch.empty(prod(shape) * dtype.itemsize, dtype=torch.uint8).numpy()
        self.keep.append(memory)
        return lend(memory, len(memory), spare).view(dtype).view(shape)

    def logits(self, rows: int, vocab: int) -> torch.Tensor:
        return torch.empty((rows, vocab), device="meta")

    def emit(self, dtype: torch.dtype, op: COp, rows: int, keep: tuple[Any, ...], **batch: Any) -> None:
        """`logits_rows` switches: ops after the selection are over the selected rows."""
        if rows != self.capacity:
            raise RuntimeError(f"an op over {rows} rows cannot be recorded for {self.capacity}")
        self.is_bf16 = self.is_bf16 or dtype == torch.bfloat16
        op.selected = int(self._selected)
        self._selected = self._selected or "logits_rows" in batch
        self.ops.append(op)
        self.keep += keep


class Program:
    """A recorded forward. `run` may be called with any number of rows up to the recorder's capacity."""

    def __init__(self, library: ctypes.CDLL, recorder: Recorder, calls: Mapping[tuple[str, str], int]) -> None:
        """`calls`: how often one run calls each (op, backend)."""
        self.capacity = recorder.capacity
        self.calls = dict(calls)
        self._lib = library
        self._is_bf16 = recorder.is_bf16
        self._ops = (COp * len(recorder.ops))(*recorder.ops)
        self._keep = recorder.keep

    def run(self, rows: int, batch: Mapping[str, Any]) -> None:
        """`batch`: every field of CBatch, as contiguous tensors or arrays."""
        self._lib.proa_run(self._is_bf16, self._ops, len(self._ops), ctypes.byref(c_batch(rows, batch)))
