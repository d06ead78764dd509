"""NVIDIA devices as the driver lists them, through NVML and ctypes: no torch, no CUDA context, no subprocess."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

_LIBRARY = "libnvidia-ml.so.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """`sm` is the compute capability ("9.0")."""

    name: str
    memory_bytes: int
    memory_free: int
    sm: str


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def gpus() -> tuple[Gpu, ...]:
    """Every device, in the driver's order; empty without a driver."""
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError:
        return ()
    if library.nvmlInit_v2():
        return ()
    try:
        count = ctypes.c_uint()
        if library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return ()
        found = (_gpu(library, index) for index in range(count.value))
        return tuple(gpu for gpu in found if gpu is not None)
    finally:
        library.nvmlShutdown()


def _gpu(library: ctypes.CDLL, index: int) -> Gpu | None:
    handle, name, memory = ctypes.c_void_p(), ctypes.create_string_buffer(96), _Memory()
    major, minor = ctypes.c_int(), ctypes.c_int()
    failed = (
        library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle))
        or library.nvmlDeviceGetName(handle, name, ctypes.c_uint(len(name)))
        or library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
        or library.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
    )
    if failed:
        return None
    return Gpu(
        name=name.value.decode(errors="replace"),
        memory_bytes=memory.total,
        memory_free=memory.free,
        sm=f"{major.value}.{minor.value}",
    )
