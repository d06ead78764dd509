"""Self-test verdicts of this host's kernels, kept in the cache directory. Owns no test, compiles nothing, no torch.

What was judged names the file: the native library's digest (sources, compiler, processor), torch's version and the
processor, or the versions of a package and of torch and the GPU. The file repeats the library's own digest, so that it
never speaks for a damaged or another one.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from proa.kernels.caps import DeviceCaps
from proa.kernels.catalog import ONEDNN
from proa.kernels.delta_catalog import FLASHINFER, PACKAGES, limits_of
from proa.kernels.kernel_info import NATIVE
from proa.kernels.native.build import library_path

PASSED = "passed"
FAILED = "failed: "
# Ops of the native library that are judged by themselves: a fault in one leaves the others in use.
PARTS: Mapping[str, str] = MappingProxyType(
    {NATIVE: ""} | {f"{NATIVE}.{part}": f".{part}" for part in ("moe", "latent", "delta", "fp8", "sample")}
)
NO_FILE = "-"  # stands for the digest where nothing was compiled


def with_verdicts(caps: DeviceCaps, cache: Path) -> DeviceCaps:
    """`caps` with the verdicts that are known of its kernels."""
    caps = with_verdict(caps, ONEDNN, read_verdict(onednn_file(cache, caps)))
    for backend in device_backends(caps):
        caps = with_verdict(caps, backend, read_verdict(device_file(cache, caps, backend)))
    if caps.compiler is None:
        return caps
    try:
        library = library_path(cache, caps.compiler, caps.isa)
    except OSError:  # a compiler that cannot be started has judged nothing
        return caps
    for name, part in PARTS.items():
        caps = with_verdict(caps, name, read_verdict(library, part))
    return caps


def with_verdict(caps: DeviceCaps, name: str, verdict: str | None) -> DeviceCaps:
    """`caps` with that verdict of a backend or a part of one; None leaves it untested."""
    return caps if verdict is None else replace(caps, kernels=MappingProxyType({**caps.kernels, name: verdict}))


def onednn_file(cache: Path, caps: DeviceCaps) -> Path:
    """What stands for torch's oneDNN on this processor where a native kernel has its library. It is never written."""
    return _file_of(cache, ONEDNN, (caps.libraries.get("torch", "none"), *caps.isa))


def device_backends(caps: DeviceCaps) -> tuple[str, ...]:
    """Of the packages with kernels for a GPU, those that are installed and have some for this one."""
    if caps.device != "cuda":
        return ()
    return tuple(
        backend
        for backend, packages in PACKAGES.items()
        if all(name in caps.libraries and one.holds(caps.libraries[name]) for name, one in packages.items())
        and (backend != FLASHINFER or limits_of(caps.sm) is not None)
    )


def device_file(cache: Path, caps: DeviceCaps, backend: str) -> Path:
    """As `onednn_file`, for the kernels of another package on the GPU that runs."""
    versions = [f"{name} {caps.libraries.get(name, 'none')}" for name in ("torch", *PACKAGES[backend])]
    return _file_of(cache, backend, (*versions, caps.gpus[0].name, caps.gpus[0].sm))


def _file_of(cache: Path, name: str, words: Iterable[str]) -> Path:
    return cache / "kernels" / f"{name}-{hashlib.sha256(' '.join(words).encode()).hexdigest()[:16]}"


def verdict_file(judged: Path, part: str = "") -> Path:
    """Two lines: `passed` or `failed: why`; the digest of the library that was judged. `part`: of PARTS."""
    return judged.with_suffix(f"{part}.verdict")


def read_verdict(judged: Path, part: str = "") -> str | None:
    """None where nothing is known, or what is known is of another library than the one that is there now."""
    try:
        lines = verdict_file(judged, part).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return None
    if len(lines) != 2 or lines[1] != _digest(judged):
        return None
    return lines[0] if lines[0] == PASSED or lines[0].startswith(FAILED) else None


def write_verdict(judged: Path, verdict: str, note: Callable[[str], None], part: str = "") -> None:
    """Keep it for the next start. A directory that cannot be written to costs time, nothing else."""
    file = verdict_file(judged, part)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent, suffix=".tmp")
        with os.fdopen(handle, "w", encoding="utf-8") as made:
            made.write(f"{verdict}\n{_digest(judged)}\n")
        Path(name).chmod(0o644)  # a cache made ahead of time may belong to another user
        Path(name).replace(file)
    except OSError as error:
        note(f"{file}: the self-test verdict could not be kept: {error.strerror}")


def _digest(judged: Path) -> str:
    try:
        return hashlib.sha256(judged.read_bytes()).hexdigest()[:16]
    except OSError:
        return NO_FILE
