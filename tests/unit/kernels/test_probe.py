"""Verdicts: obtained once, remembered, never fatal; and what the plan makes of them, with and without a compiler."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from proa.errors import KernelUnavailable
from proa.kernels.caps import DeviceCaps, read_caps
from proa.kernels.native import abi
from proa.kernels.native.abi import Kind
from proa.kernels.native.build import library_path
from proa.kernels.onednn import OnednnDense
from proa.kernels.probing import probe as module
from proa.kernels.probing.apart import judge_apart
from proa.kernels.probing.probe import probe, retest, self_test_device, self_test_onednn
from proa.kernels.verdicts import (
    PARTS,
    PASSED,
    device_backends,
    device_file,
    onednn_file,
    read_verdict,
    verdict_file,
    with_verdicts,
    write_verdict,
)
from proa.units import Numerics
from tests.factories.compilers import ILLEGAL, WRONG, StandIn, copying, failing, faulty, real_compiler
from tests.factories.headers import planned, write_tiny_headers
from tests.factories.native import probed
from tests.plan.hybrid_headers import WIDE, gpu_host, write_hybrid_headers

ISA = ("avx2", "fma", "f16c")


def silent(line: str) -> None:
    """Notes are not looked at."""


def host(compiler: StandIn | None) -> DeviceCaps:
    """A host with such vectors and that compiler."""
    return replace(read_caps("cpu"), device="cpu", isa=ISA, compiler=None if compiler is None else str(compiler.path))


@pytest.fixture(scope="module")
def library() -> Path:
    """A library that passes, made by this host's real compiler."""
    found = probed()
    if found.library is None:
        pytest.skip("no C++ compiler here")
    return found.library


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write_tiny_headers(tmp_path / "llama", "llama")


# without a compiler


def test_without_a_compiler_onednn_is_tested_and_nothing_else_is_known(tmp_path: Path) -> None:
    found = probe(host(None), tmp_path, silent)
    assert found.library is None
    assert dict(found.caps.kernels) == {"onednn": PASSED}


def test_without_a_compiler_matmul_runs_on_onednn_and_attention_on_reference(tmp_path: Path, llama: Path) -> None:
    caps = probe(host(None), tmp_path, silent).caps
    plan = planned(llama, caps=caps).target.plan
    assert (plan.matmul_kernel.value, plan.attention.decode.value) == ("onednn", "reference")
    assert plan.matmul_kernel.reason == "no C++ compiler was found"
    assert plan.numerics.value is Numerics.FAST
    with pytest.raises(KernelUnavailable, match="no C\\+\\+ compiler was found"):
        planned(llama, caps=caps, matmul_kernel="native")


def test_a_cpu_without_a_variant_compiles_nothing(tmp_path: Path) -> None:
    compiler = StandIn(tmp_path / "bin", "echo library > $out")
    found = probe(replace(host(compiler), isa=("asimd",)), tmp_path, silent)
    assert (found.library, compiler.compilations) == (None, 0)
    assert "native" not in found.caps.kernels


# with one that is of no use


def test_a_compiler_that_fails_becomes_a_verdict_that_is_remembered_and_noted(tmp_path: Path, llama: Path) -> None:
    notes: list[str] = []
    compiler = failing(tmp_path / "bin", "no such header")
    for _ in range(2):
        found = probe(host(compiler), tmp_path, notes.append)
        assert found.library is None
        assert found.caps.kernels["native"].startswith("failed: ") and "[kernels/build]" in found.caps.kernels["native"]
    assert compiler.compilations == 1
    assert with_verdicts(host(compiler), tmp_path).kernels == found.caps.kernels
    assert sum("native kernels are passed over" in note and "proa doctor --build" in note for note in notes) == 2
    assert planned(llama, caps=found.caps).target.plan.matmul_kernel.value == "onednn"


def test_build_again_tries_what_failed_before(tmp_path: Path, library: Path) -> None:
    compiler = failing(tmp_path / "bin", "disk full")
    probe(host(compiler), tmp_path / "cache", silent)
    compiler.path.write_text(compiler.path.read_text().replace("echo 'disk full' >&2; exit 1", f"cp {library} $out"))
    assert probe(host(compiler), tmp_path / "cache", silent).library is None
    found = probe(host(compiler), tmp_path / "cache", silent, again=True)
    assert found.library is not None and found.caps.kernels["native"] == PASSED


def wrong_compiler(folder: Path, library: Path) -> StandIn:
    """Its library has every function, and none of them does anything."""
    names = sorted(set(re.findall(r"proa_\w+", Path(abi.__file__).read_text())))
    (folder / "bin").mkdir(parents=True)
    source = folder / "bin" / "nothing.cpp"
    source.write_text("\n".join(f'extern "C" long {name}() {{ return 0; }}' for name in names))
    return StandIn(folder / "bin", f"{real_compiler()} -shared -fPIC -o $out {source}")


def test_a_library_that_computes_wrongly_is_passed_over_and_refused_by_name(
    tmp_path: Path, library: Path, llama: Path
) -> None:
    found = probe(host(wrong_compiler(tmp_path, library)), tmp_path, silent)
    verdict = found.caps.kernels["native"]
    assert verdict.startswith("failed: ") and "differs from the reference" in verdict
    plan = planned(llama, caps=found.caps).target.plan
    assert plan.matmul_kernel.value == "onednn" and verdict in plan.matmul_kernel.reason
    with pytest.raises(KernelUnavailable) as caught:
        planned(llama, caps=found.caps, flags={"--attention.decode": "native"})
    assert "attention.decode = native was asked for" in str(caught.value) and verdict in str(caught.value)


def test_a_library_without_our_functions_is_a_verdict_too(tmp_path: Path) -> None:
    empty = tmp_path / "empty.cpp"
    empty.write_text("")
    if real_compiler() is None:
        pytest.skip("no C++ compiler here")
    compiler = StandIn(tmp_path / "bin", f"{real_compiler()} -shared -fPIC -o $out {empty}")
    assert "undefined symbol" in probe(host(compiler), tmp_path, silent).caps.kernels["native"]


def test_a_compiler_that_cannot_be_started_is_not_fatal(tmp_path: Path) -> None:
    caps = replace(host(None), compiler=str(tmp_path / "nowhere"))
    assert with_verdicts(caps, tmp_path).kernels == {}
    found = probe(caps, tmp_path, silent)
    assert found.library is None and "nowhere" in found.caps.kernels["native"]


# the cache


def test_a_passed_library_is_neither_compiled_nor_tested_again(
    tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = copying(tmp_path / "bin", library)
    caps = host(compiler)
    first = probe(caps, tmp_path, silent)
    assert first.caps.kernels == {"onednn": PASSED, **dict.fromkeys(PARTS, PASSED)}
    for name in ("judge_apart", "self_test_onednn"):
        monkeypatch.setattr(module, name, lambda _, parts=(1,): pytest.fail("tested again") if parts else {})
    assert probe(caps, tmp_path, silent) == first
    assert compiler.compilations == 1
    assert with_verdicts(caps, tmp_path) == first.caps


@pytest.mark.parametrize("damage", [lambda data: data[:1000], lambda data: b"not a library", lambda data: b""])
def test_a_damaged_library_is_compiled_anew(tmp_path: Path, library: Path, damage: Callable[[bytes], bytes]) -> None:
    compiler = copying(tmp_path / "bin", library)
    path = probe(host(compiler), tmp_path, silent).library
    assert path is not None
    whole = path.read_bytes()
    path.unlink()
    path.write_bytes(damage(whole))
    assert with_verdicts(host(compiler), tmp_path).verdict("native") == "untested"
    again = probe(host(compiler), tmp_path, silent)
    assert again.caps.kernels["native"] == PASSED and path.read_bytes() == whole
    assert compiler.compilations == 2


@pytest.mark.parametrize("text", ["", "passed", "passed\n", "perhaps\n-\n", "passed\n0123456789abcdef\n", "\0\xff"])
def test_a_damaged_verdict_counts_for_nothing(tmp_path: Path, text: str) -> None:
    file = onednn_file(tmp_path, host(None))
    write_verdict(file, PASSED, pytest.fail)
    assert read_verdict(file) == PASSED
    verdict_file(file).write_bytes(text.encode("latin-1"))
    assert read_verdict(file) is None


def test_a_directory_that_cannot_be_made_is_not_fatal(tmp_path: Path, library: Path) -> None:
    (tmp_path / "kernels").write_text("in the way")
    notes: list[str] = []
    found = probe(host(copying(tmp_path / "bin", library)), tmp_path, notes.append)
    assert found.library is None and found.caps.kernels["native"].startswith("failed: ")
    assert found.caps.kernels["onednn"] == PASSED
    assert any("could not be kept" in note for note in notes)


def test_a_library_from_a_directory_that_is_read_only_is_used(
    tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    caps = host(copying(tmp_path / "bin", library))
    placed = library_path(tmp_path, str(caps.compiler), ISA)
    placed.parent.mkdir()
    shutil.copy(library, placed)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, os.strerror(30))

    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    notes: list[str] = []
    found = probe(caps, tmp_path, notes.append)
    assert (found.library, found.caps.kernels["native"]) == (placed, PASSED)
    assert sum("could not be kept: Read-only file system" in note for note in notes) == 1 + len(PARTS)


def test_a_fault_in_one_part_leaves_the_others_in_use(tmp_path: Path, library: Path) -> None:
    notes: list[str] = []
    caps = host(faulty(tmp_path / "bin", library, Kind.EXPERTS, WRONG))
    found = probe(caps, tmp_path, notes.append)
    verdict = found.caps.kernels["native.moe"]
    assert verdict.startswith("failed: experts of 1 rows in torch.float32 differs from the reference by ")
    assert (found.caps.kernels["native"], found.caps.kernels["native.latent"]) == (PASSED, PASSED)
    assert found.library is not None
    assert sum("native.moe kernels are passed over" in note for note in notes) == 1
    assert with_verdicts(caps, tmp_path).kernels == found.caps.kernels
    shutil.copy(library, found.library)
    write_verdict(found.library, PASSED, pytest.fail)
    write_verdict(found.library, verdict, pytest.fail, ".moe")
    assert probe(caps, tmp_path, silent).caps.kernels["native.moe"] == verdict
    assert probe(caps, tmp_path, silent, again=True).caps.kernels["native.moe"] == PASSED


# what does not come back from its self-test


def test_an_illegal_instruction_is_a_verdict_and_the_next_tier_runs(tmp_path: Path, library: Path, llama: Path) -> None:
    notes: list[str] = []
    compiler = faulty(tmp_path / "bin", library, Kind.MATMUL, ILLEGAL)
    found = probe(host(compiler), tmp_path, notes.append)
    verdict = "failed: the self-test died of SIGILL"
    assert found.caps.kernels["native"] == verdict
    assert any(f"native kernels are passed over: {verdict}" in note for note in notes)
    plan = planned(llama, caps=found.caps).target.plan
    assert (plan.matmul_kernel.value, plan.attention.decode.value) == ("onednn", "reference")
    assert f"self-test {verdict}" in plan.matmul_kernel.reason
    with pytest.raises(KernelUnavailable, match="died of SIGILL"):
        planned(llama, caps=found.caps, matmul_kernel="native")
    again = probe(host(compiler), tmp_path, silent)
    assert (again.library, again.caps.kernels["native"]) == (None, verdict)
    assert compiler.compilations == 1


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("*(volatile int*)0 = 0", "died of SIGSEGV"),
        ("abort()", "died of SIGABRT"),
        ("kill(getpid(), SIGRTMIN + 5)", "died of signal 39"),
        ("_exit(3)", "ended with exit code 3"),
    ],
)
def test_a_part_that_crashes_is_named_and_the_others_are_judged(
    tmp_path: Path, library: Path, fault: str, said: str
) -> None:
    found = probe(host(faulty(tmp_path / "bin", library, Kind.EXPERTS, fault)), tmp_path, silent)
    expected = {**dict.fromkeys(PARTS, PASSED), "native.moe": f"failed: the self-test {said}"}
    assert {name: found.caps.kernels[name] for name in PARTS if name != "native.fp8"} == {
        name: verdict
        for name, verdict in expected.items()
        if name != "native.fp8"  # which runs experts too
    }


def test_a_self_test_that_does_not_end_is_a_verdict(library: Path) -> None:
    assert judge_apart(library, [""], seconds=0.01) == {"": "failed: the self-test did not end within 0.01 s"}


def test_a_self_test_that_cannot_be_started_is_not_remembered(
    tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    caps = host(copying(tmp_path / "bin", library))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nowhere"))
    assert "nowhere" in probe(caps, tmp_path, silent).caps.kernels["native"]
    monkeypatch.undo()
    assert probe(caps, tmp_path, silent).caps.kernels["native"] == PASSED


# the self-tests


def test_the_verdict_of_onednn_belongs_to_one_torch_and_one_processor(tmp_path: Path) -> None:
    caps = host(None)
    others = (replace(caps, isa=(*ISA, "avx512f")), replace(caps, libraries={"torch": "9.9"}))
    assert len({onednn_file(tmp_path, one) for one in (caps, *others)}) == 3


def test_a_torch_whose_onednn_computes_wrongly_fails_by_op(monkeypatch: pytest.MonkeyPatch) -> None:
    right = OnednnDense.matmul
    monkeypatch.setattr(OnednnDense, "matmul", lambda ops, x, packed: right(ops, x, packed) * 1.01)
    assert self_test_onednn(ISA).startswith(
        "failed: matmul of 1 rows in torch.float32 differs from the reference by 0.01"
    )


def test_a_torch_without_the_private_ops_fails_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert "has no mkldnn::_reorder_linear_weight" in self_test_onednn(ISA)
    with pytest.raises(KernelUnavailable, match="kernels/no-op"):
        OnednnDense()


def test_retesting_looks_at_the_library_itself_and_not_at_what_is_remembered(tmp_path: Path, library: Path) -> None:
    caps = host(copying(tmp_path / "bin", library))
    assert retest(caps, tmp_path) == {"onednn": PASSED, **dict.fromkeys(PARTS, "untested")}
    path = library_path(tmp_path, str(caps.compiler), ISA)
    write_verdict(path, "failed: long ago", pytest.fail)
    shutil.copy(library, path)
    assert retest(caps, tmp_path)["native"] == PASSED
    other = host(StandIn(tmp_path / "other", ""))
    damaged = library_path(tmp_path, str(other.compiler), ISA)
    write_verdict(damaged, PASSED, pytest.fail)
    damaged.write_bytes(b"damaged")
    assert retest(other, tmp_path)["native"].startswith("failed: ")


# kernels of other packages on a GPU


GPU = replace(gpu_host("9.0"), compiler=None)


def test_the_kernels_of_a_gpu_are_judged_once_and_the_plan_takes_those_that_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    caps, asked = replace(GPU, kernels={}), []
    model = write_hybrid_headers(tmp_path / "gdn", "qwen3_next", **WIDE)
    assert linear(model, with_verdicts(caps, tmp_path)) == ("torch",) * 3
    answers = {"triton": PASSED, "flashinfer": "failed: states differ"}

    def test(backend: str, sm: str | None) -> str:
        asked.append((backend, sm))
        return answers[backend]

    monkeypatch.setattr(module, "self_test_device", test)
    notes: list[str] = []
    found = probe(caps, tmp_path, notes.append).caps
    assert {name: found.kernels[name] for name in answers} == answers
    assert notes == ["flashinfer kernels are passed over: failed: states differ (`proa doctor --build` tries again)"]
    assert linear(model, found) == ("triton",) * 3
    assert probe(caps, tmp_path, silent).caps == found == with_verdicts(caps, tmp_path)
    assert asked == [("triton", "9.0"), ("flashinfer", "9.0")]
    answers["flashinfer"] = PASSED
    found = probe(caps, tmp_path, silent, again=True).caps
    assert asked[2:] == [("flashinfer", "9.0")]
    assert linear(model, found) == ("flashinfer", "triton", "triton")
    assert {name: retest(caps, tmp_path)[name] for name in answers} == answers


def linear(model: Path, caps: DeviceCaps) -> tuple[str | None, ...]:
    plan = planned(model, caps=caps).target.plan.linear_attention
    return plan.prefill.value, plan.decode.value, plan.verify.value


@pytest.mark.parametrize(
    ("caps", "backends"),
    [
        (GPU, ("triton", "flashinfer")),
        (replace(GPU, device="cpu"), ()),
        (replace(GPU, libraries={"torch": "2.13.0+cu130"}), ()),
        (replace(GPU, libraries={**GPU.libraries, "fla-core": "0.5.0"}), ("flashinfer",)),
        (replace(GPU, libraries={**GPU.libraries, "flashinfer-python": "0.8.1"}), ("triton",)),
        (gpu_host("8.9"), ("triton",)),
    ],
)
def test_which_packages_have_something_to_judge(caps: DeviceCaps, backends: tuple[str, ...]) -> None:
    assert device_backends(caps) == backends


def test_the_verdict_on_a_package_belongs_to_its_version_torch_and_the_gpu(tmp_path: Path) -> None:
    others = [replace(GPU, libraries={**GPU.libraries, name: "9.9"}) for name in ("torch", "triton", "fla-core")]
    files = {device_file(tmp_path, one, "triton") for one in (GPU, gpu_host("10.0"), *others)}
    assert len(files) == 5 and device_file(tmp_path, GPU, "flashinfer") not in files


def test_a_package_that_cannot_be_imported_is_a_verdict(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In the process that tests, where nothing is missing here but the package."""
    monkeypatch.setattr(sys, "path", [write_package(tmp_path, "raise ImportError('no libcuda.so.1')"), *sys.path])
    assert self_test_device("triton", "9.0") == (
        "failed: the self-test ended with exit code 1: ImportError: no libcuda.so.1"
    )


def test_a_package_that_takes_its_process_with_it_is_a_verdict(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    body = "import os\nprint('compiling', flush=True)\nos.abort()"
    monkeypatch.setattr(sys, "path", [write_package(tmp_path, body), *sys.path])
    assert self_test_device("flashinfer", "10.0") == "failed: the self-test died of SIGABRT"


def write_package(root: Path, body: str) -> str:
    """What is imported in place of fla-core and flashinfer."""
    for name in ("fla", "flashinfer"):
        (root / name).mkdir()
        (root / name / "__init__.py").write_text(body)
    return str(root)
