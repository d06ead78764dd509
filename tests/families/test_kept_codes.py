"""Models whose block FP8 stays in 8 bits: logits as those of transformers' float32 model of the same rounded weights,
exact numerics, and what was built is what was promised.

The checkpoints and their reference.npz are written by another program; PROA_ORACLES names their directory.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from proa.runner.describe import promised
from proa.runner.runner import Runner
from proa.units import Numerics, Phase
from tests.factories.checkpoints import random_tensors, tiny_config, write_checkpoint
from tests.factories.fp8 import quantised, with_fp8
from tests.factories.mla_checkpoints import MLA_FAMILIES, mla_config, mla_tensors
from tests.factories.native import native_plan, native_runner, probed, why_not
from tests.factories.runners import Rows

FOUND = probed()
WHY_NOT = why_not(FOUND) or (None if "avx512vbmi" in FOUND.caps.isa else "this CPU has no avx512vbmi")
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

ORACLES = (
    "qwen2_moe", "qwen3_moe", "glm4_moe", "minimax_m2", "deepseek_v2_lite", "deepseek_v2", "deepseek_v3",
    "deepseek_v32", "glm_moe_dsa", "glm4_moe_lite", "kimi_k2", "kimi_k25", "qwen3_next", "qwen3_5", "qwen3_5_moe",
    "kimi_linear", "mistral3_vl",
)  # fmt: skip
SPARSE = ("deepseek_v32", "glm_moe_dsa")  # rounding changes which rows most of theirs see: near is all that can be said
TOLERANCE = 2e-4  # float32
BF16_TOLERANCE = 6e-2  # of a row's norm: activations are rounded to 2^-9 some ten times in each of up to eight layers
PROMPT = [(7 * i * i + 3) % 512 for i in range(70)]


@pytest.fixture(scope="module", params=ORACLES)
def path(request: pytest.FixtureRequest, oracle_dir: Path) -> Path:
    folder = oracle_dir / "fp8" / request.param
    if not (folder / "reference.npz").is_file():
        pytest.skip(f"PROA_ORACLES has no fp8/{request.param}")
    return folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    prompt: list[int]
    logits: torch.Tensor

    def error(self, path: Path, **asks: Any) -> torch.Tensor:
        """Ours minus the reference's logits [prompt rows, V]."""
        runner = native_runner(path, FOUND, num_pages=16, **asks)
        assert runner.plan.quantization.value == asks["quantization"]
        return Rows(runner, 1, 128).prefill(0, self.prompt) - self.logits


@pytest.fixture(scope="module")
def reference(path: Path) -> Reference:
    with np.load(path / "reference.npz") as arrays:
        return Reference(prompt=arrays["prompt"].tolist(), logits=torch.from_numpy(arrays["logits"]))


@pytest.mark.oracle
@pytest.mark.parametrize("quantization", ["fp8", "none"])
def test_float32_logits_are_those_of_the_rounded_weights(path: Path, reference: Reference, quantization: str) -> None:
    assert float(reference.error(path, dtype="float32", quantization=quantization).abs().max()) < TOLERANCE


@pytest.mark.oracle
def test_bfloat16_logits_are_as_near_as_with_dequantised_weights(path: Path, reference: Reference) -> None:
    """Of the middle row: in a few rows a rounded router takes another expert than the reference, whatever is kept."""
    kept, expanded = (
        (reference.error(path, dtype="bfloat16", quantization=form).norm(dim=1) / reference.logits.norm(dim=1)).median()
        for form in ("fp8", "none")
    )
    assert float(kept) < BF16_TOLERANCE
    if path.name not in SPARSE:
        assert float(kept) < 1.5 * float(expanded)


FAMILIES = ("glm4_moe", "qwen2_moe", "deepseek_v3", "deepseek_v32", "mistral4")


@pytest.fixture(scope="module", params=FAMILIES)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, root = request.param, tmp_path_factory.mktemp("codes")
    if family in MLA_FAMILIES:
        config = mla_config(family)
        tensors = mla_tensors(config, 0, torch.float32)
    else:
        config = tiny_config(family)
        tensors = random_tensors(config, 0, torch.float32)
    return write_checkpoint(root / family, with_fp8(config), quantised(tensors)[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_built_runner_is_what_its_plan_promised(written: Path, dtype: str) -> None:
    plan = native_plan(written, FOUND, dtype=dtype)
    assert plan.plan.quantization.value == "fp8" and plan.plan.numerics.value is Numerics.EXACT
    said = native_runner(written, FOUND, num_pages=9, dtype=dtype).describe()
    assert said == promised(plan.plan, plan.spec, plan.parameters, 9)
    wide = native_runner(written, FOUND, num_pages=9, dtype=dtype, quantization="none").describe()
    assert said["weights_bytes"] < wide["weights_bytes"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_rows_logits_have_the_same_bits_however_the_prompt_is_cut(written: Path, dtype: str) -> None:
    def cut(runner: Runner, sizes: list[int]) -> torch.Tensor:
        rows, at, parts = Rows(runner, 1, 96), 0, []
        for size in sizes:
            phase = Phase.DECODE if size == 1 else (Phase.VERIFY, Phase.PREFILL)[size > 8]
            parts.append(runner.forward([rows.span(0, phase, PROMPT[at : at + size])]).logits)
            at += size
        return torch.cat(parts)

    runner = native_runner(written, FOUND, num_pages=16, dtype=dtype)
    whole = cut(runner, [70])
    for sizes in ([1] * 70, [8] * 8 + [6], [9, 61], [5, 3, 62], [49, 21]):
        assert torch.equal(cut(runner, sizes), whole)


@pytest.mark.parametrize("layout", ["fused", "separate"])
def test_shared_experts_compute_the_same_in_slots_and_apart(tmp_path: Path, layout: str) -> None:
    """Loading checks slots against the separate form by itself; here both against the dequantised model."""
    config = tiny_config("glm4_moe", n_shared_experts=2)
    path = write_checkpoint(tmp_path, with_fp8(config), quantised(random_tensors(config, 0, torch.float32))[0])
    made = [
        Rows(native_runner(path, FOUND, dtype="float32", shared_experts=layout, quantization=kept), 1, 96).prefill(
            0, PROMPT
        )
        for kept in ("fp8", "none")
    ]
    assert float((made[0] - made[1]).norm() / made[1].norm()) < 1e-5
