"""Memory for packed weights, on huge pages where the system has them. Owns no weight and no arrangement.

A step of few rows reads every weight once, so it is as fast as memory is read. With pages of 4 KiB a tenth of that time
and more goes to finding pages, and the processor's prefetchers stop at the end of each. A single weight is often
smaller than one huge page, hence many share a chunk.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from math import prod

import torch

HUGE, LINE = 1 << 21, 64
CHUNK = 32 * HUGE


class WeightRoom:
    """Hands out uninitialised tensors one behind the other. A chunk lives as long as a tensor in it."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Like torch.empty, on the host. What of a chunk is never written takes no memory."""
        nbytes = prod(shape) * dtype.itemsize
        taken = -(-nbytes // LINE) * LINE
        if taken > len(self._chunk):
            self._chunk = _chunk(max(taken, CHUNK))
        memory, self._chunk = self._chunk[:nbytes], self._chunk[taken:]
        return memory.view(dtype).view(shape)


def _chunk(nbytes: int) -> torch.Tensor:
    """So many bytes, from a multiple of HUGE on where there are huge pages."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(nbytes, dtype=torch.uint8)
    memory = mmap.mmap(-1, nbytes + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared ones stay small
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE
    return whole[start : start + nbytes]
