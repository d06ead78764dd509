"""Shared experts in slots of the routed ones give the logits of separate ones, in every family that can have both.

The checkpoints are the oracles of test_oracles.py; PROA_ORACLES names their directory.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from proa.errors import PlanError
from proa.runner.runner import Runner
from tests.factories.runners import Rows, runner_of

pytestmark = pytest.mark.oracle

SHARED = (
    "glm4_moe", "deepseek_v2_lite", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe_lite",
    "mistral4", "kimi_k2", "kimi_k25",
)  # fmt: skip
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}  # relative to the largest logit


def folder(oracle_dir: Path, name: str) -> Path:
    found = oracle_dir / "plain" / name
    if not found.is_dir():
        pytest.skip(f"PROA_ORACLES has no plain/{name}")
    return found


def prompt_of(path: Path) -> list[int]:
    with np.load(path / "reference.npz") as arrays:
        return arrays["prompt"].tolist()


def logits_and_tokens(runner: Runner, prompt: list[int]) -> tuple[torch.Tensor, list[int]]:
    """Of the prompt, and 16 greedy tokens after it."""
    rows = Rows(runner, 1, 128)
    logits = rows.prefill(0, prompt)
    tokens = [int(logits[-1].argmax())]
    while len(tokens) < 16:
        tokens.append(int(rows.decode(tokens[-1:])[0].argmax()))
    return logits, tokens


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", SHARED)
def test_fused_and_separate_are_one_function(name: str, dtype: str, oracle_dir: Path) -> None:
    path = folder(oracle_dir, name)
    runners = [runner_of(path, dtype=dtype, shared_experts=how) for how in ("fused", "separate")]
    said = [set(runner.describe()["layout"]["shared_experts"].values()) for runner in runners]
    assert said == [{"fused"}, {"separate"}]
    (fused, fused_tokens), (separate, tokens) = (logits_and_tokens(runner, prompt_of(path)) for runner in runners)
    assert ((fused - separate).abs().max() / separate.abs().max()).item() <= TOLERANCE[dtype]
    if dtype == "float32":
        assert fused_tokens == tokens


def test_a_shared_slot_with_another_weight_is_noticed(oracle_dir: Path) -> None:
    """The reverse: the shared expert at 0.9 of its weight is no rounding."""
    path = folder(oracle_dir, "deepseek_v3")
    fused, separate = (runner_of(path, dtype="float32", shared_experts=how) for how in ("fused", "separate"))
    fused._model.layers["2"].ffn._slot_weight *= 0.9
    one, other = (Rows(runner, 1, 128).prefill(0, prompt_of(path)) for runner in (fused, separate))
    assert ((one - other).abs().max() / other.abs().max()).item() > 1e-3


def test_a_width_that_makes_no_slots_stays_separate(oracle_dir: Path) -> None:
    """qwen2_moe's shared expert of 48 beside routed ones of 32."""
    path = folder(oracle_dir, "qwen2_moe")
    with pytest.raises(PlanError, match="48"):
        runner_of(path, dtype="float32", shared_experts="fused")
    said = runner_of(path, dtype="float32").describe()["layout"]["shared_experts"]
    assert set(said.values()) == {"separate"}
