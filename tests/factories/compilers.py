"""Stand-ins for a C++ compiler: scripts that answer `--version`, log each library, and write what a test wants."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

from proa.kernels.native.abi import COp, Kind

SCRIPT = """#!/bin/sh
if [ "$1" = --version ]; then echo "stand-in 1.0"; exit 0; fi
objects=
for word in "$@"; do [ "$word" = -c ] && objects=yes; done
while [ "$1" != -o ]; do shift; done
out=$2
if [ "$objects" ]; then echo object > $out; exit 0; fi
echo compiled >> {log}
{body}
"""


class StandIn:
    """`path` is the compiler; `body` is shell code in which `$out` names the file to write."""

    def __init__(self, folder: Path, body: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self._log = folder / "c++", folder / "log"
        self.path.write_text(SCRIPT.format(log=self._log, body=body))
        self.path.chmod(0o755)

    @property
    def compilations(self) -> int:
        return len(self._log.read_text().splitlines()) if self._log.exists() else 0


def copying(folder: Path, library: Path) -> StandIn:
    """A compiler whose result is a library that is there already."""
    return StandIn(folder, f"cp {library} $out")


def failing(folder: Path, message: str) -> StandIn:
    return StandIn(folder, f"echo '{message}' >&2; exit 1")


def real_compiler() -> str | None:
    return shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


# A library in front of another one: what it does not define is found there.
FAULTY = """
#include <cstdint>
#include <cstdlib>
#include <dlfcn.h>
#include <signal.h>
#include <unistd.h>
extern "C" void proa_run(int64_t is_bf16, char* ops, int64_t count, void* batch) {{
    auto real = (void (*)(int64_t, char*, int64_t, void*))dlsym(dlopen("{library}", RTLD_NOW), "proa_run");
    real(is_bf16, ops, count, batch);
    for (int64_t i = 0; i < count; i++) {{
        char* op = ops + i * {size};
        char* out = *(char**)(op + {out});
        (void)out;
        if (*(int64_t*)op == {kind}) {{ {fault}; }}
    }}
}}
"""
ILLEGAL = "__builtin_trap()"
WRONG = "*(uint32_t*)out ^= 0x40000000"  # the highest bit of a float32's exponent


def faulty(folder: Path, library: Path, kind: Kind, fault: str) -> StandIn:
    """A compiler whose result is `library`, but for what happens after each op of one kind: C++ statements, `out` is
    where the op's result lies."""
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "faulty.cpp"
    source.write_text(
        FAULTY.format(library=library, size=ctypes.sizeof(COp), out=COp.out.offset, kind=int(kind), fault=fault)
    )
    return StandIn(folder, f"{real_compiler()} -shared -fPIC -Wl,--no-as-needed -o $out {source} {library} -ldl")
