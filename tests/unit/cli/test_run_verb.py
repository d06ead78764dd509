"""What `proa run` does around its answers. The answers themselves are tests/e2e's."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from proa.cli.run import collector_at_rest, runner_line


@pytest.fixture(autouse=True)
def nothing_frozen() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.unfreeze()


def test_the_collector_rests_during_start_up_and_passes_over_what_start_up_made_afterwards() -> None:
    with collector_at_rest():
        assert not gc.isenabled()
        kept = [[] for _ in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= len(kept)


def test_a_start_up_that_fails_leaves_the_collector_on() -> None:
    with pytest.raises(ValueError, match="no model"), collector_at_rest():
        raise ValueError("no model")
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with collector_at_rest():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def runner(**values: object) -> dict[str, object]:
    attention = {f"attention.{phase}": "native" for phase in ("prefill", "decode", "verify")}
    plain = {"dtype": "bfloat16", "quantization": "none", "shared_experts": None, "moe_kernel": None,
             "matmul_kernel": "native", "page_size": 16}  # fmt: skip
    decisions = {knob: {"value": value, "reason": "any"} for knob, value in {**attention, **plain, **values}.items()}
    return {"family": "glm4_moe/nextn", "role": "draft", "decisions": decisions}


def test_a_runner_s_line_tells_the_decisions_that_there_were_to_take() -> None:
    assert runner_line("draft", runner()) == (
        "draft (glm4_moe/nextn): dtype bfloat16, quantization none, matmul_kernel native, attention native"
    )
    line = runner_line("draft", runner(shared_experts="fused", moe_kernel="reference"))
    assert "shared_experts fused, moe_kernel reference, " in line


def test_kernels_that_differ_by_phase_are_all_named_and_so_are_layers() -> None:
    line = runner_line(
        "target", runner(**{"attention.decode": "reference"}, shared_experts={"1..3": "fused", "4": "separate"})
    )
    assert line.startswith("target (glm4_moe/nextn)")
    assert line.endswith("attention native reference")
    assert "shared_experts 1..3: fused 4: separate" in line
