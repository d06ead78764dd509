"""Block FP8 that stays in 8 bits: which parameters, on which host and kernels, and the bytes that this makes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from proa.conditions import Source
from proa.errors import KernelUnavailable
from proa.kernels.caps import DeviceCaps
from proa.loading.ledger import LoadLedger
from proa.plan.decision import Decision
from proa.plan.footprint import weights_bytes
from proa.plan.planned import Planned
from proa.plan.runner_plan import RunnerPlan
from proa.units import DType
from tests.factories.headers import GPU_HOST, SERVER, planned
from tests.plan.expert_headers import write_experts

NEW = replace(SERVER, isa=(*SERVER.isa, "avx512vbmi"))


def everything(name: str) -> bool:
    return True


def plan_of(model: Path, caps: DeviceCaps = NEW, **settings: Any) -> Planned:
    return planned(model, caps=caps, **settings).target


def decided(model: Path, caps: DeviceCaps = NEW, **settings: Any) -> Decision[str]:
    return plan_of(model, caps, **settings).plan.quantization


def kept(plan: RunnerPlan) -> set[str]:
    assert {form for _, form in plan.layout.blocks} <= {DType.F8_E4M3}
    return {name for name, _ in plan.layout.blocks}


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("kept")
    return write_experts(root / "glm", "glm4_moe", fp8=everything, num_nextn_predict_layers=0)


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("kept")
    return write_experts(root / "deepseek", "deepseek_v3", fp8=everything, num_nextn_predict_layers=0)


def test_linear_maps_and_experts_stay_in_eight_bits(glm: Path) -> None:
    planned = plan_of(glm)
    decision = planned.plan.quantization
    assert (decision.value, decision.source) == ("fp8", Source.CHECKPOINT)
    assert decision.reason == "16 parameters run on the stored FP8 codes, activations as they are"
    assert kept(planned.plan) == {
        *(f"layers.{layer}.attn.{part}.weight" for layer in range(3) for part in ("qkv", "o")),
        *(f"layers.0.ffn.{part}.weight" for part in ("gate_up", "down")),
        *(f"layers.{layer}.ffn.experts.{part}" for layer in (1, 2) for part in ("gate_up", "down")),
        *(f"layers.{layer}.ffn.shared.{part}.weight" for layer in (1, 2) for part in ("gate_up", "down")),
    }
    assert LoadLedger(planned).findings == ()


def test_parameters_have_a_scale_per_sixteen_rows_and_block_of_columns(glm: Path) -> None:
    table = plan_of(glm).parameters
    experts, down = table["layers.1.ffn.experts.gate_up"], table["layers.1.ffn.shared.down.weight"]
    assert (experts.shape, experts.dtype, experts.scale_shape) == ((8, 64, 64), DType.F8_E4M3, (8, 4, 2))
    assert (down.shape, down.scale_shape) == ((64, 32), (4, 1))
    assert table["layers.1.ffn.router.weight"].scale_shape is None
    assert table["layers.1.ffn.router.weight"].dtype is None


def test_the_bytes_are_those_of_codes_and_scales(glm: Path) -> None:
    ours, expanded = plan_of(glm), plan_of(glm, quantization="none")
    saved = 0
    for name in kept(ours.plan):
        *slots, rows, columns = ours.parameters[name].shape
        count = slots[0] if slots else 1
        saved += count * rows * columns - 4 * count * -(-rows // 16) * -(-columns // 32)
    difference = weights_bytes(expanded.parameters, expanded.plan) - weights_bytes(ours.parameters, ours.plan)
    assert difference == saved > 0


def test_the_up_projection_of_latent_rows_is_dequantised_and_the_plan_says_so(deepseek: Path) -> None:
    plan = plan_of(deepseek).plan
    assert plan.quantization.value == "fp8"
    assert "dequantised: layers.#.attn.kv_b.weight (absorbed head by head)" in plan.quantization.reason
    assert not [name for name in kept(plan) if "kv_b" in name]
    assert {"layers.0.attn.qkv_a.weight", "layers.2.attn.q_b.weight", "layers.0.attn.o.weight"} <= kept(plan)


def test_an_ask_for_none_expands_everything(glm: Path) -> None:
    plan = plan_of(glm, quantization="none").plan
    assert (plan.quantization.value, plan.quantization.source, kept(plan)) == ("none", Source.ASKED, set())


def test_float32_may_keep_codes_too_as_activations_stay_what_they_are(glm: Path) -> None:
    assert decided(glm, dtype="float32").value == "fp8"


BLOCKERS = [
    (SERVER, {}, "this CPU has no avx512vbmi"),
    (NEW, {"matmul_kernel": "reference"}, "reference does not compute on FP8 codes (matmul_kernel)"),
    (NEW, {"moe_kernel": "reference"}, "reference does not compute on FP8 codes (moe_kernel)"),
    (replace(NEW, kernels={"native.fp8": "failed: x"}), {}, "self-test failed: x"),
    (GPU_HOST, {}, "reference does not compute on FP8 codes (matmul_kernel)"),
]


@pytest.mark.parametrize(("caps", "settings", "why"), BLOCKERS)
def test_what_stands_against_it_is_said_and_an_ask_for_it_refused(
    glm: Path, caps: DeviceCaps, settings: dict[str, Any], why: str
) -> None:
    plan = plan_of(glm, caps, **settings).plan
    assert (plan.quantization.value, kept(plan)) == ("none", set())
    assert plan.quantization.reason.startswith("fp8 32x32 (") and plan.quantization.reason.endswith(why)
    with pytest.raises(KernelUnavailable, match="quantization = fp8 was asked for") as caught:
        plan_of(glm, caps, quantization="fp8", **settings)
    assert why in str(caught.value)


def test_each_of_them_alone_stands_in_the_way(glm: Path) -> None:
    """The reverse: on the same host without it nothing does."""
    assert decided(glm, replace(NEW, kernels={"native.fp8": "passed"}), matmul_kernel="native").value == "fp8"
    assert decided(glm, quantization="fp8").source is Source.ASKED


def test_a_parameter_of_which_a_part_is_plain_is_expanded(tmp_path: Path) -> None:
    model = write_experts(
        tmp_path / "m", "glm4_moe", fp8=lambda n: "k_proj" not in n and "experts.3.down" not in n,
        num_nextn_predict_layers=0,
    )  # fmt: skip
    plan = plan_of(model).plan
    assert not [name for name in kept(plan) if name.endswith("qkv.weight") or "experts." in name]
    reason = plan.quantization.reason
    assert "layers.#.attn.qkv.weight (merged with parts that are stored plain)" in reason
    assert "layers.#.ffn.experts.down (merged with parts that are stored plain)" in reason
    assert "layers.#.ffn.experts.gate_up (the other half of the experts is not kept)" in reason


def test_parts_that_begin_within_a_panel_are_expanded(tmp_path: Path) -> None:
    """One head's 24 query rows put the latent rows at row 24 of the merged projection."""
    model = write_experts(
        tmp_path / "m", "deepseek_v3", fp8=everything, q_lora_rank=None, num_nextn_predict_layers=0,
        num_attention_heads=1, num_key_value_heads=1,
    )  # fmt: skip
    plan = plan_of(model).plan
    assert not [name for name in kept(plan) if name.endswith("qkv_a.weight")]
    assert "layers.#.attn.qkv_a.weight (its parts do not begin at whole 16 rows and blocks)" in plan.quantization.reason


@pytest.mark.parametrize("block", [[20, 32], [32, 24], [128, 256]])
def test_blocks_that_kernels_have_no_form_for_are_expanded(tmp_path: Path, block: list[int]) -> None:
    model = write_experts(tmp_path / "m", "glm4_moe", fp8=everything, num_nextn_predict_layers=0)
    config = (model / "config.json").read_text()
    assert "[32, 32]" in config
    (model / "config.json").write_text(config.replace("[32, 32]", str(block)))
    decision = decided(model)
    assert decision.value == "none"
    assert f"blocks of {block[0]}x{block[1]}, not of whole 16 rows and 16 columns, at most 128" in decision.reason


def test_halves_of_a_shared_expert_in_slots_must_begin_at_whole_blocks(tmp_path: Path) -> None:
    """Two shared experts of 32 columns each: slots hold whole blocks of 32, and halves of blocks of 64."""
    model = write_experts(tmp_path / "m", "glm4_moe", fp8=everything, n_shared_experts=2, num_nextn_predict_layers=0)
    assert {name for name in kept(plan_of(model, shared_experts="fused").plan) if "experts" in name}
    config = (model / "config.json").read_text()
    (model / "config.json").write_text(config.replace("[32, 32]", "[32, 64]"))
    plan = plan_of(model, shared_experts="fused").plan
    assert not [name for name in kept(plan) if "experts" in name]
    assert "layers.#.ffn.experts.down (its parts do not begin at whole 16 rows and blocks)" in plan.quantization.reason
    assert [name for name in kept(plan_of(model, shared_experts="separate").plan) if "experts.down" in name]


def test_a_plain_draft_beside_it_keeps_nothing_and_the_reverse(tmp_path: Path) -> None:
    for stored, answers in (
        (lambda n: "layers.3." not in n, ("fp8", "none")),
        (lambda n: "layers.3." in n, ("none", "fp8")),
    ):
        model = write_experts(tmp_path / answers[0], "glm4_moe", fp8=stored)
        plans = planned(model, caps=NEW, speculative="nextn").plans
        assert plans.draft is not None
        assert (plans.target.quantization.value, plans.draft.quantization.value) == answers
