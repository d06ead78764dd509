"""`proa check` and the kernels' self-tests: what is in use must pass, what is not in use may fail."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from proa.cli.check import with_self_tests
from proa.evals.health import Health
from proa.llm import LLM

HEALTHY = Health(problems=("an old one",), notes=(), reports={})


def using(backend: str, draft: str | None = None) -> LLM:
    """Nothing of an LLM but its plan's kernels."""

    def runner(value: str | None) -> dict[str, Any] | None:
        return None if value is None else {"decisions": {"matmul_kernel": {"value": value}, "page_size": {"value": 16}}}

    runners = {"target": runner(backend), "draft": runner(draft)}
    return cast(LLM, SimpleNamespace(explain=lambda: {"runners": runners}))


@pytest.mark.parametrize(("target", "draft"), [("native", None), ("reference", "native")])
def test_a_kernel_in_use_that_fails_now_is_a_problem(target: str, draft: str | None) -> None:
    verdicts = {"native": "failed: ffn differs", "onednn": "passed"}
    found = with_self_tests(HEALTHY, using(target, draft), verdicts)
    assert found.problems == (
        "an old one",
        "native kernels are in use, and their self-test says: failed: ffn differs",
    )


def test_a_kernel_that_fails_and_is_not_in_use_is_none() -> None:
    assert with_self_tests(HEALTHY, using("reference"), {"native": "failed: ffn differs"}) == HEALTHY
    assert with_self_tests(HEALTHY, using("native"), {"native": "passed", "onednn": "failed: x"}) == HEALTHY
