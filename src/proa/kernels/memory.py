"""Host memory for what a step reads in full: weights, caches, states. Owns how it is asked for, not what lies in it.

With pages of 4 KiB the processor looks up a quarter of a million of them to read a gigabyte, in a virtual machine at
two levels each, and its prefetchers stop at the end of each; with 2 MiB it is five hundred. One thread was measured to
read 1.6 times as fast. Linux gives such pages where it is asked to (`madvise`), for whole ones at a multiple of their
size.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from math import prod

import torch

HUGE_PAGE = 2 << 20
"""Bytes, on x86-64 and on ARM with pages of 4 KiB."""
CHUNK = 32 * HUGE_PAGE
LINE = 64


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    """As torch.empty. A tensor of a huge page or more in host memory has memory of its own, which goes when it goes."""
    nbytes = prod(shape) * dtype.itemsize
    if device != "cpu" or nbytes < HUGE_PAGE:
        return torch.empty(shape, dtype=dtype, device=device)
    return _Chunk(nbytes).take(shape, dtype)


class Room:
    """Hands out uninitialised tensors one behind the other, since one weight is often smaller than a huge page. Memory
    goes, 64 MiB or more at once, when all tensors in it are gone. What is never written takes none."""

    def __init__(self) -> None:
        self._chunk: _Chunk | None = None

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """As torch.empty, in host memory."""
        nbytes = prod(shape) * dtype.itemsize
        if nbytes == 0:
            return torch.empty(shape, dtype=dtype)
        if self._chunk is None or nbytes > self._chunk.left:
            self._chunk = _Chunk(max(nbytes, CHUNK))
        return self._chunk.take(shape, dtype)


class _Chunk:
    """So many bytes, from a multiple of HUGE_PAGE on."""

    def __init__(self, nbytes: int) -> None:
        # A private mapping: shared ones do not get huge pages.
        self._memory = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError, AttributeError):  # a system without huge pages
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._next = -torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr() % HUGE_PAGE
        self.left = nbytes

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The next bytes, from a whole cache line on. The tensor holds the mapping, and is its own storage."""
        made = torch.frombuffer(self._memory, dtype=dtype, count=prod(shape), offset=self._next).view(shape)
        taken = -(-made.nbytes // LINE) * LINE
        self._next += taken
        self.left -= taken
        return made
