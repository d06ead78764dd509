"""Compiles the CPU kernels for this machine, once, into a directory that it is given. Owns no choice of kernels.

The library is a plain C interface without torch or Python headers, so a compiler alone makes it. Its file name holds a
digest of sources, compiler and flags: another source, compiler or processor never meets a stale file.
"""

from __future__ import annotations

import fcntl
import hashlib
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from proa.errors import KernelUnavailable

SOURCES = Path(__file__).parent / "csrc"
# Contraction of a * b + c to one rounding is allowed: it is the same in every tile, so rows stay reproducible.
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-fPIC", "-ffp-contract=fast", "-w")
PARTS = (("float32", ()), ("bfloat16", ("-DPROA_BF16",)))  # of proa.cpp, compiled side by side


def flags_for(isa: tuple[str, ...]) -> tuple[str, ...]:
    """For the processor that `isa` describes: this one, or what would be left of it without AVX-512."""
    return FLAGS if "avx512f" in isa else (*FLAGS, "-mno-avx512f")


def library_path(cache: Path, compiler: str, isa: tuple[str, ...]) -> Path:
    """Where the library for these sources, this compiler and this processor lies, or would."""
    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    digest.update("\0".join((compiler, _version(compiler), *flags_for(isa), *isa)).encode())
    return cache / "kernels" / f"proa-{digest.hexdigest()[:16]}.so"


def build(cache: Path, compiler: str, isa: tuple[str, ...], note: Callable[[str], None]) -> Path:
    """The compiled library; compiled now if it is not there yet, while other processes wait.

    Raises KernelUnavailable `kernels/build` with the compiler's first lines.
    """
    path = library_path(cache, compiler, isa)
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with _lock(path.with_suffix(".lock")):
        if not path.exists():
            note(f"compiling CPU kernels with {compiler} (once for this machine)")
            _compile(compiler, flags_for(isa), path)
    return path


def _compile(compiler: str, flags: tuple[str, ...], path: Path) -> None:
    with TemporaryDirectory(dir=path.parent) as folder:
        made, source = Path(folder) / path.name, str(SOURCES / "proa.cpp")
        objects = [str(made.with_name(f"{name}.o")) for name, _ in PARTS]
        parts = zip(PARTS, objects, strict=True)
        _run(compiler, [[*flags, *defines, "-c", source, "-o", to] for (_, defines), to in parts])
        _run(compiler, [[*flags, "-shared", *objects, "-o", str(made)]])
        made.chmod(0o755)
        made.replace(path)


def _run(compiler: str, commands: Sequence[Sequence[str]]) -> None:
    """All at once. Raises KernelUnavailable with the first lines of one that failed, when none runs any more."""
    none, pipe = subprocess.DEVNULL, subprocess.PIPE
    started = [
        subprocess.Popen([compiler, *words], stdin=none, stdout=none, stderr=pipe, text=True) for words in commands
    ]
    errors = [process.communicate()[1] for process in started]
    for process, said in zip(started, errors, strict=True):
        if process.returncode != 0:
            lines = tuple(said.splitlines()[:5])
            raise KernelUnavailable("kernels/build", f"{compiler} could not compile the CPU kernels", facts=lines)


def _version(compiler: str) -> str:
    result = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    return result.stdout.splitlines()[0] if result.stdout else "unknown"


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Held by one process at a time; the operating system frees it when the holder dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
