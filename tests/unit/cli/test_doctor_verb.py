"""`proa doctor` as typed: the host, and every kernel with what stands against it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from proa.cli.doctor import kernel_verdicts, losses, lost_formats
from proa.cli.main import main
from proa.env import OPENMP_NAMES
from proa.kernels import host
from proa.kernels.caps import caps_from_json, read_caps
from proa.kernels.verdicts import onednn_file, write_verdict
from tests.factories.compilers import copying, failing
from tests.factories.headers import GPU_HOST, LAPTOP
from tests.factories.native import probed, why_not


def test_it_prints_host_and_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for word in (
        "usable cores",
        "memory",
        "compiler",
        "libraries",
        "attention.decode",
        "can run (self-test: untested)",
    ):
        assert word in out


def test_its_json_is_a_caps_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert caps_from_json(found, where="x") == caps_from_json(found["caps"], where="x")
    assert {kernel["backend"] for kernel in found["kernels"]} == {
        "native",
        "onednn",
        "flashinfer",
        "triton",
        "torch",
        "reference",
    }


def test_every_kernel_says_everything_that_stands_against_it() -> None:
    laptop = {(k["op"], k["backend"]): k for k in kernel_verdicts(LAPTOP, ())}
    assert laptop["matmul", "reference"]["can_run"] and laptop["matmul", "reference"]["reasons"] == []
    assert len(laptop["matmul", "triton"]["reasons"]) == 2
    gpu = {(k["op"], k["backend"]): k for k in kernel_verdicts(GPU_HOST, ())}
    assert gpu["matmul", "triton"]["reasons"] == ["no triton kernels in this version of Proa"]
    assert gpu["matmul", "onednn"]["reasons"][0] == "onednn runs on the CPU, not on cuda"


def test_it_prints_threads_and_the_variables_that_govern_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in OPENMP_NAMES:
        monkeypatch.delenv(name, raising=False)
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "cores in the affinity mask" in out and "openmp     no variables set" in out
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    assert main(["doctor", "--json"]) == 0
    threads = json.loads(capsys.readouterr().out)["threads"]
    assert threads["openmp"] == {"OMP_WAIT_POLICY": "passive"} and threads["usable"] >= 1


def test_it_reads_the_verdicts_that_are_known_and_obtains_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PROA_CACHE_DIR", str(tmp_path))
    assert main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["caps"]["kernels"] == {}
    assert list(tmp_path.iterdir()) == []
    write_verdict(onednn_file(tmp_path, read_caps()), "failed: ffn differs", pytest.fail)
    assert main(["doctor"]) == 0
    assert "self-test failed: ffn differs" in capsys.readouterr().out


def test_what_is_lost_without_native_is_said_by_op() -> None:
    tested = replace(LAPTOP, isa=("avx2", "fma", "f16c"), kernels={"onednn": "passed", "native": "passed"})
    assert list(losses(kernel_verdicts(tested, ()))) == []
    text = "\n".join(losses(kernel_verdicts(replace(tested, compiler=None), ())))
    assert "matmul             onednn" in text and "attention.decode   reference" in text
    assert "numerics           fast" in text
    text = "\n".join(losses(kernel_verdicts(replace(tested, kernels={"native": "failed: x"}), ())))
    assert "matmul             reference   decoding was about 4 times slower" in text


def test_formats_that_native_does_not_compute_on_here_are_named() -> None:
    tested = replace(LAPTOP, isa=("avx2", "fma", "f16c"), kernels={"native": "passed"})
    text = "\n".join(lost_formats(tested, kernel_verdicts(tested, ())))
    assert "Q8_0 Q4_0 Q4_1 Q4_K Q6_K: dequantised to the compute type, this CPU has no avx512_vnni" in text
    assert "block FP8: dequantised to the compute type, this CPU has no avx512vbmi" in text
    whole = replace(tested, isa=(*tested.isa, "avx512f", "avx512_vnni", "avx512vbmi"))
    assert list(lost_formats(whole, kernel_verdicts(whole, ()))) == []
    without = replace(tested, compiler=None)
    assert list(lost_formats(without, kernel_verdicts(without, ()))) == []  # `losses` says more


def test_building_ahead_of_time_compiles_tests_and_prints_the_verdicts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = probed()
    if reason := why_not(found):
        pytest.skip(reason)
    assert found.library is not None
    monkeypatch.setattr(host, "COMPILERS", (str(copying(tmp_path / "bin", found.library).path),))
    monkeypatch.setenv("PROA_CACHE_DIR", str(tmp_path))
    assert main(["doctor", "--build"]) == 0
    out = capsys.readouterr()
    assert "compiling CPU kernels" in out.err and "can run (self-test: passed)" in out.out


@pytest.mark.parametrize("compilers", [(), ("failing",)])
def test_building_where_nothing_can_be_built_prints_the_host_and_exits_with_4(
    compilers: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    compiler = failing(tmp_path / "bin", "no such header")
    monkeypatch.setattr(host, "COMPILERS", tuple(str(compiler.path) for _ in compilers))
    monkeypatch.setenv("PROA_CACHE_DIR", str(tmp_path))
    assert main(["doctor", "--build"]) == 4
    out = capsys.readouterr()
    assert "what is lost without native" in out.out
    assert "kernels/not-built" in out.err
    assert ("could not compile" if compilers else "no C++ compiler was found") in out.err
