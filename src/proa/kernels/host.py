"""Reads the facts of this host: CPU flags, usable cores, memory limit, compiler, library versions, GPUs. No torch.

Every reader takes the root under which /proc and /sys lie, so that tests show it other machines. A file that is not
there means "no limit" or "unknown", never an error: the facts are advice to the plan, and `doctor` prints them.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from proa.kernels import nvml

# What a kernel of Proa may ask for; other flags of the CPU are noise in a report.
ISA_FLAGS = (
    "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16", "avx512_fp16",
    "avx512vbmi",
    "amx_tile", "amx_int8", "amx_bf16", "asimd", "asimddp", "bf16", "i8mm", "sve", "sve2",
)  # fmt: skip
CUDA_RUNTIMES = ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12")  # as torch's wheels require them
LIBRARIES = (
    "torch", "numpy", "safetensors", "tokenizers", "minijinja", "transformers", "triton", "fla-core",
    "flashinfer-python", *CUDA_RUNTIMES,
)  # fmt: skip
COMPILERS = ("c++", "g++", "clang++")


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes. `available` None: unknown."""

    total: int
    available: int | None


def platform_name() -> str:
    return f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"


def isa_flags(root: Path) -> tuple[str, ...]:
    """Instruction-set flags that kernels may ask for, in the order of ISA_FLAGS; without any, the machine's name."""
    present: set[str] = set()
    for line in _text(root / "proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            present = set(value.split())
            break
    return tuple(flag for flag in ISA_FLAGS if flag in present) or (platform.machine().lower(),)


def usable_cores(root: Path) -> int:
    """Cores that this process may run on: its affinity mask, cut by the CPU quota of its control groups."""
    allowed, quota = affinity_cores(), cpu_quota(root)
    return allowed if quota is None else max(1, min(allowed, int(quota)))


def affinity_cores() -> int:
    """Cores in this process's affinity mask; all where the system has none."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def memory(root: Path) -> Memory:
    """Memory of the host, or of the control group where that is less."""
    table = dict(_colon_pairs(_text(root / "proc/meminfo")))
    total, available = table.get("MemTotal"), table.get("MemAvailable")
    if total is None:
        return Memory(total=_physical_memory(), available=None)
    limit, used = _memory_limit(root)
    if limit is None or limit >= total:
        return Memory(total=total, available=available)
    left = max(0, limit - used)
    return Memory(total=limit, available=left if available is None else min(left, available))


def compiler() -> str | None:
    """Path of a C++ compiler, which the native kernels need."""
    return next((found for found in map(shutil.which, COMPILERS) if found), None)


def library_versions() -> dict[str, str]:
    """Installed versions, from package metadata; nothing is imported."""
    versions: dict[str, str] = {}
    for name in LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def cuda_devices() -> tuple[nvml.Gpu, ...]:
    return nvml.gpus()


def why_no_cuda(gpus: tuple[nvml.Gpu, ...], torch_version: str | None) -> str | None:
    """None when CUDA can be used: a driver with a device, and a torch that was built for it."""
    if not gpus:
        return "no CUDA device or driver"
    if torch_version is None:
        return "torch is not installed"
    if torch_version.endswith("+cpu"):
        return f"torch {torch_version} is the CPU build"
    return None


def cuda_version(libraries: Mapping[str, str]) -> str | None:
    """The CUDA that torch was built for: 13.0 of `2.13.0+cu130`, else that of the runtime installed beside it."""
    tagged = re.fullmatch(r".*\+cu(\d+)(\d)", libraries.get("torch", ""))
    if tagged:
        return f"{tagged[1]}.{tagged[2]}"
    runtimes = (re.match(r"\d+\.\d+", libraries.get(name, "")) for name in CUDA_RUNTIMES)
    return next((found[0] for found in runtimes if found), None)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _colon_pairs(text: str) -> Iterator[tuple[str, int]]:
    """`MemTotal:  16384 kB` -> (MemTotal, bytes)."""
    for line in text.splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if words and words[0].isdecimal():
            yield name, int(words[0]) * (1024 if words[1:] == ["kB"] else 1)


def _groups(root: Path) -> Iterator[tuple[str, Path]]:
    """(controller, folder) of every control group that holds this process, innermost first; "" is version 2."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        for controller in controllers.split(","):
            base = root / "sys/fs/cgroup" / controller
            inner = base / path.lstrip("/")
            yield from ((controller, folder) for folder in (inner, *inner.parents) if folder.is_relative_to(base))


def cpu_quota(root: Path) -> float | None:
    """Cores' worth of CPU time allowed; the tightest of all enclosing groups."""
    quotas: list[float] = []
    for controller, folder in _groups(root):
        if controller == "":
            words = _text(folder / "cpu.max").split()
        elif controller == "cpu":
            words = [_text(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
        else:
            continue
        if len(words) == 2 and all(word.isdecimal() for word in words) and int(words[1]):
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def _memory_limit(root: Path) -> tuple[int | None, int]:
    """(limit, bytes used that cannot be reclaimed) of the tightest enclosing group."""
    names: Mapping[str, tuple[str, str, str]] = {
        "": ("memory.max", "memory.current", "inactive_file"),
        "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    }
    best: tuple[int | None, int] = (None, 0)
    for controller, folder in _groups(root):
        if controller not in names:
            continue
        limit_file, used_file, cache_key = names[controller]
        limit = _text(folder / limit_file).strip()
        if limit.isdecimal() and (best[0] is None or int(limit) < best[0]):
            used = _text(folder / used_file).strip()
            cache = next((line.split()[1] for line in _text(folder / "memory.stat").splitlines()
                          if line.startswith(f"{cache_key} ")), "0")  # fmt: skip
            best = (int(limit), max(0, int(used or 0) - int(cache)))
    return best


def _physical_memory() -> int:
    """Total memory where there is no /proc (macOS, BSD)."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 8 * 2**30  # unknown: a small machine is the safe guess
