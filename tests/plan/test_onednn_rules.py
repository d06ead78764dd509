"""When the plan takes onednn: matmuls on a CPU with vectors, and only where its self-test has passed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from proa.errors import KernelUnavailable
from proa.kernels.caps import DeviceCaps
from proa.plan.runner_plan import RunnerPlan
from tests.factories.headers import LAPTOP, planned, write_tiny_headers

TESTED = replace(LAPTOP, kernels={"onednn": "passed"})  # avx2 without f16c: native has no variant
SERVER = replace(TESTED, isa=("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl"))


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write_tiny_headers(tmp_path / "llama", "llama")


def plan(path: Path, caps: DeviceCaps, **asks: Any) -> RunnerPlan:
    return planned(path, caps=caps, **asks).target.plan


def test_it_comes_after_native_and_before_reference(llama: Path) -> None:
    assert plan(llama, SERVER).matmul_kernel.value == "native"
    assert plan(llama, TESTED).matmul_kernel.value == "onednn"
    assert plan(llama, replace(SERVER, compiler=None)).matmul_kernel.value == "onednn"
    asked = plan(llama, SERVER, matmul_kernel="onednn")
    assert (asked.matmul_kernel.value, asked.attention.decode.value) == ("onednn", "native")


@pytest.mark.parametrize(
    ("caps", "why"),
    [
        (LAPTOP, "no self-test on this host yet"),
        (replace(LAPTOP, kernels={"onednn": "failed: ffn differs"}), "self-test failed: ffn differs"),
        (replace(TESTED, isa=("asimd",)), "onednn is of use with avx2 or avx512f, not asimd"),
    ],
)
def test_auto_passes_over_it_and_an_ask_is_refused_with_the_reason(llama: Path, caps: DeviceCaps, why: str) -> None:
    decision = plan(llama, caps).matmul_kernel
    assert decision.value == "reference"
    assert any(why in one.reason for one in decision.rejected if one.value == "onednn")
    with pytest.raises(KernelUnavailable, match="matmul_kernel = onednn was asked for") as caught:
        plan(llama, caps, matmul_kernel="onednn")
    assert why in str(caught.value)


def test_bfloat16_needs_the_vectors_that_onednn_computes_it_with(llama: Path) -> None:
    decision = plan(llama, TESTED, dtype="bfloat16").matmul_kernel
    assert decision.value == "reference"
    assert any("avx512bw and avx512vl for bfloat16" in one.reason for one in decision.rejected)
    assert plan(llama, replace(SERVER, compiler=None), dtype="bfloat16").matmul_kernel.value == "onednn"


def test_it_has_no_attention(llama: Path) -> None:
    with pytest.raises(KernelUnavailable, match="onednn has matmuls only, no attention"):
        plan(llama, SERVER, attention="onednn")


def test_an_ask_for_exact_numerics_cannot_be_met_by_it(llama: Path) -> None:
    with pytest.raises(KernelUnavailable, match="not row-invariant"):
        plan(llama, SERVER, matmul_kernel="onednn", numerics="exact")


def test_the_second_copy_of_a_tied_head_is_counted_before_memory_is_planned(tmp_path: Path) -> None:
    tied = write_tiny_headers(tmp_path / "tied", "llama", tie_word_embeddings=True)
    copied, shared = (planned(tied, caps=TESTED, matmul_kernel=kernel) for kernel in ("onednn", "reference"))
    vocab, hidden = copied.target.spec.vocab, copied.target.spec.hidden
    weights = [one.plans.memory.weights_bytes["target"] for one in (copied, shared)]
    assert weights[0] - weights[1] == vocab * hidden * 4
    assert [note.condition for note in copied.target.plan.matmul_kernel.notes] == ["kernel.onednn.copy"]
    assert copied.plans.digest != shared.plans.digest
