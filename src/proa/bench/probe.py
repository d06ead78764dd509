"""How fast memory can be read right now. Owns the buffer and the clock; needs neither a compiler nor a package."""

from __future__ import annotations

import ctypes
import mmap
import time
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from types import TracebackType

GIB = 1 << 30
SETTLE_SECONDS = 0.05
"""Pool threads of the engine that has just answered spin for some milliseconds before they sleep."""


class Probe:
    """Calls read `nbytes` with `threads` threads and give the median GB/s. A context manager that holds the buffer.

    The C library's memchr is a vectorised read loop that ctypes runs without Python's lock.
    """

    def __init__(self, threads: int, nbytes: int = GIB, repeats: int = 5) -> None:
        self._nbytes, self._repeats = nbytes, repeats
        self._memory = mmap.mmap(-1, nbytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._view = (ctypes.c_char * nbytes).from_buffer(self._memory)
        ctypes.memset(self._view, 1, nbytes)  # pages that were never written are all the same page
        part = nbytes // threads
        start = ctypes.addressof(self._view)
        self._parts = [(start + index * part, part) for index in range(threads)]
        self._pool = ThreadPoolExecutor(threads)
        self._memchr = ctypes.CDLL(None).memchr
        self._memchr.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
        self._memchr.restype = ctypes.c_void_p

    def __call__(self) -> float:
        time.sleep(SETTLE_SECONDS)
        return self._nbytes / median(self._seconds() for _ in range(self._repeats)) / 1e9

    def _seconds(self) -> float:
        start = time.perf_counter()
        found = list(self._pool.map(lambda part: self._memchr(part[0], 2, part[1]), self._parts))
        seconds = time.perf_counter() - start
        if any(found):
            raise RuntimeError("the probe's buffer was overwritten")
        return seconds

    def __enter__(self) -> Probe:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown()
        del self._view
        self._memory.close()
