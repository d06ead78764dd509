"""`proa doctor` as typed: the host, and every kernel with what stands against it."""

from __future__ import annotations

import json

import pytest

from proa.cli.doctor import kernel_verdicts
from proa.cli.main import main
from proa.kernels.caps import caps_from_json
from tests.factories.headers import GPU_HOST, LAPTOP


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
        "reference",
    }


def test_every_kernel_says_everything_that_stands_against_it() -> None:
    laptop = {(k["op"], k["backend"]): k for k in kernel_verdicts(LAPTOP)}
    assert laptop["matmul", "reference"]["can_run"] and laptop["matmul", "reference"]["reasons"] == []
    assert len(laptop["matmul", "triton"]["reasons"]) == 2
    gpu = {(k["op"], k["backend"]): k for k in kernel_verdicts(GPU_HOST)}
    assert gpu["matmul", "triton"]["reasons"] == ["no triton kernels in this version of Proa"]
    assert len(gpu["matmul", "onednn"]["reasons"]) == 2
