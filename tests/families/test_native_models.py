"""Whole tiny models on native kernels give the reference's logits: each kind of layer, in prompt, verify and decode.

The reference itself is held against transformers by test_oracles.py, where reference checkpoints are at hand.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from proa.runner.runner import Runner
from proa.units import Phase
from tests.factories.checkpoints import write_tiny
from tests.factories.hybrid_runners import write_tiny_hybrid
from tests.factories.mla_checkpoints import write_mla
from tests.factories.native import native_runner, probed, why_not
from tests.factories.runners import Rows, runner_of

FOUND = probed()
WHY_NOT = why_not(FOUND)
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

MODELS = {
    "llama": write_tiny,
    "qwen3_moe": write_tiny,
    "deepseek_v3": write_mla,
    "glm_moe_dsa": write_mla,
    "qwen3_next": write_tiny_hybrid,
    "kimi_linear": write_tiny_hybrid,
}
TOKENS = torch.randint(10, 500, (43,), generator=torch.Generator().manual_seed(0)).tolist()


def logits(runner: Runner) -> torch.Tensor:
    rows = Rows(runner, 1, 64)
    prompt, verified = rows.prefill(0, TOKENS[:37]), rows.span(0, Phase.VERIFY, TOKENS[37:42])
    return torch.cat([prompt, runner.forward([verified]).logits, rows.decode(TOKENS[42:])])


@pytest.mark.parametrize("family", MODELS)
def test_native_logits_agree(family: str, tmp_path: Path) -> None:
    path = MODELS[family](family, tmp_path / family)
    native = native_runner(path, FOUND, num_pages=256, dtype="float32", matmul_kernel="native")
    built = native.describe()
    assert {built[name] for name in built if name in ("matmul_kernel", "moe_kernel")} <= {"native", None}
    ours, expected = logits(native), logits(runner_of(path, dtype="float32"))
    assert (ours - expected).abs().max() <= 1e-4 * expected.abs().max()
