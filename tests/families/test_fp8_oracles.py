"""Block-FP8 reference checkpoints, with a quantised and with a plain draft beside them: logits, greedy tokens, ledger.

The reference is transformers' model with weights rounded before they were stored; PROA_ORACLES names the directory.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from proa.loading.dry_run import inspect
from proa.runner.runner import Runner
from tests.factories.headers import LAPTOP, planned
from tests.factories.native import native_runner, probed, why_not
from tests.factories.oracles import Reference, assert_close, assert_greedy, greedy, read_reference
from tests.factories.runners import Rows, runner_of

pytestmark = pytest.mark.oracle

EXPERTS = ("qwen2_moe", "qwen3_moe", "minimax_m2", "deepseek_v2_lite", "deepseek_v2", "kimi_k2", "kimi_k25")
BUNDLING = ("glm4_moe", "glm4_moe_lite", "deepseek_v3", "deepseek_v32", "glm_moe_dsa")
HYBRID = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text")
NAMES = (
    *(f"fp8/{family}" for family in (*EXPERTS, *BUNDLING, *HYBRID, "kimi_linear", "mistral3_vl")),
    *(f"fp8_plain_draft/{family}" for family in (*BUNDLING, *HYBRID)),
)
FOUND = probed()
WHY_NOT = why_not(FOUND)


@pytest.fixture(scope="module", params=NAMES)
def path(request: pytest.FixtureRequest, oracle_dir: Path) -> Path:
    folder = oracle_dir / request.param
    if not folder.is_dir():
        pytest.skip(f"PROA_ORACLES has no {request.param}")
    return folder


@pytest.fixture(scope="module")
def reference(path: Path) -> Reference:
    return read_reference(path)


def runner(path: Path, backend: str) -> Runner:
    if backend == "reference":
        return runner_of(path, dtype="float32")
    if WHY_NOT is not None:
        pytest.skip(WHY_NOT)
    return native_runner(path, FOUND, num_pages=64, dtype="float32")


@pytest.mark.parametrize("backend", ["reference", "native"])
def test_a_prompt_and_its_greedy_answer(path: Path, reference: Reference, backend: str) -> None:
    rows = Rows(runner(path, backend), 1, 128)
    logits = rows.prefill(0, reference.prompt)
    assert_close(logits, reference.logits)
    assert_greedy(greedy(rows, logits[-1:], 32)[0], reference)


@pytest.mark.parametrize("asked", ["none", "nextn"])
def test_every_tensor_is_accounted_for_with_and_without_the_draft(path: Path, asked: str) -> None:
    if asked == "nextn" and path.name not in (*BUNDLING, *HYBRID):
        asked = "none"
    document = inspect(planned(path, speculative=asked, caps=LAPTOP))
    assert document["unclaimed"] == []
    for part in document["runners"].values():
        assert (part["unexpected"], part["missing"], part["wrong"]) == ([], [], [])
