"""Compiling the kernels: where the library goes, once per machine, and what a compiler that fails looks like."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from proa.errors import KernelUnavailable
from proa.kernels.native.abi import load_library
from proa.kernels.native.build import build, library_path
from tests.factories.compilers import StandIn, failing

SOURCES = Path(__file__).parents[3] / "src"
ISA = ("avx2", "fma", "f16c")
ONE_BUILD = """
import sys
from pathlib import Path
from proa.kernels.native.build import build
print(build(Path(sys.argv[1]), sys.argv[2], ("avx2", "fma", "f16c"), lambda line: None))
"""


def silent(line: str) -> None:
    """Notes are not looked at."""


def test_the_library_is_compiled_once_and_said_so_once(tmp_path: Path) -> None:
    notes: list[str] = []
    compiler = StandIn(tmp_path / "bin", "echo library > $out")
    paths = {build(tmp_path, str(compiler.path), ISA, notes.append) for _ in range(3)}
    assert paths == {library_path(tmp_path, str(compiler.path), ISA)}
    assert (compiler.compilations, len(notes)) == (1, 1)
    assert str(compiler.path) in notes[0]
    assert paths.pop().read_text() == "library\n"


def test_another_compiler_or_processor_gets_another_file(tmp_path: Path) -> None:
    first, second = (StandIn(tmp_path / name, "true") for name in ("a", "b"))
    second.path.write_text(second.path.read_text().replace("1.0", "2.0"))
    paths = {
        library_path(tmp_path, str(first.path), ISA),
        library_path(tmp_path, str(second.path), ISA),
        library_path(tmp_path, str(first.path), (*ISA, "avx512f")),
    }
    assert len(paths) == 3


def test_a_compiler_that_fails_is_named_with_its_first_lines_and_leaves_nothing(tmp_path: Path) -> None:
    compiler = failing(tmp_path / "bin", "proa.cpp:1: fatal error: no such header")
    with pytest.raises(KernelUnavailable, match="no such header") as caught:
        build(tmp_path / "cache", str(compiler.path), ISA, silent)
    assert caught.value.slug == "kernels/build"
    assert str(compiler.path) in str(caught.value)
    assert [path.suffix for path in (tmp_path / "cache" / "kernels").iterdir()] == [".lock"]


def test_a_source_that_does_not_compile_is_an_error_when_all_its_parts_have_ended(tmp_path: Path) -> None:
    compiler = StandIn(tmp_path / "bin", "echo library > $out")
    compiler.path.write_text(compiler.path.read_text().replace("echo object > $out; exit 0", "echo no >&2; exit 1"))
    with pytest.raises(KernelUnavailable, match="could not compile the CPU kernels"):
        build(tmp_path / "cache", str(compiler.path), ISA, silent)
    assert compiler.compilations == 0
    assert [path.suffix for path in (tmp_path / "cache" / "kernels").iterdir()] == [".lock"]


def test_two_processes_that_start_at_once_compile_once(tmp_path: Path) -> None:
    compiler = StandIn(tmp_path / "bin", "sleep 1; echo library > $out")
    command = [sys.executable, "-c", ONE_BUILD, str(tmp_path), str(compiler.path)]
    path = os.pathsep.join(filter(None, [str(SOURCES), os.environ.get("PYTHONPATH", "")]))
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path})
        for _ in range(2)
    ]
    answers = {process.communicate(timeout=60)[0].strip() for process in started}
    assert answers == {str(library_path(tmp_path, str(compiler.path), ISA))}
    assert compiler.compilations == 1


def test_native_kernels_without_a_library_are_refused() -> None:
    with pytest.raises(KernelUnavailable, match="was not built") as caught:
        load_library(None)
    assert caught.value.slug == "kernels/no-library"
