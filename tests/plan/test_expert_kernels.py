"""Kernels and stored forms of models with experts or latent attention: what is planned, and what is against more."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from proa.conditions import Blocked, FactView, Source
from proa.errors import KernelUnavailable, PlanError
from proa.kernels import catalog
from proa.kernels.caps import DeviceCaps
from proa.kernels.catalog import CATALOG, MAX_GROUPS, MOE, NATIVE_MIXERS, kernels_for
from proa.plan.decision import Decision
from proa.units import DType, Numerics
from tests.factories.checkpoints import tiny_config
from tests.factories.headers import GPU_HOST, LAPTOP, SERVER, planned, write_headers
from tests.plan.expert_headers import config_of, shapes_of, write_experts


def decided(model: Path, knob: str, caps: DeviceCaps = SERVER, **settings: Any) -> Decision[Any]:
    return planned(model, caps=caps, **settings).plans.target.decisions()[knob]


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_experts(tmp_path_factory.mktemp("kernels") / "glm", "glm4_moe")


# experts


def test_the_catalogue_has_experts_kernels_with_slots_and_says_what_others_lack() -> None:
    kernels = {kernel.backend: kernel for kernel in kernels_for(MOE)}
    assert [name for name, kernel in kernels.items() if kernel.has_slots] == ["native", "reference"]
    assert not any(kernel.has_slots for kernel in CATALOG if kernel.op != MOE)
    assert {"onednn", "flashinfer", "triton"} <= set(kernels)


@pytest.mark.parametrize("caps", [LAPTOP, SERVER, GPU_HOST])
def test_experts_run_on_a_kernel_that_is_bound(glm: Path, caps: DeviceCaps) -> None:
    decision = decided(glm, "moe_kernel", caps)
    assert decision.value == ("native" if caps is SERVER else "reference")
    passed_over = {"native", "onednn", "flashinfer", "triton"} if caps is not SERVER else set[str]()
    assert {r.value for r in decision.rejected} == passed_over


@pytest.mark.parametrize(("asked", "says"), [("onednn", "no experts"), ("triton", "no triton kernels")])
def test_an_experts_kernel_that_cannot_run_is_refused_by_name(glm: Path, asked: str, says: str) -> None:
    with pytest.raises(KernelUnavailable, match=f"moe_kernel = {asked}") as caught:
        planned(glm, flags={"--moe-kernel": asked})
    assert says in str(caught.value) and "can run: " in str(caught.value)


def test_f37_each_runner_holds_its_own_experts_kernel_and_an_ask_for_one_is_not_the_others(glm: Path) -> None:
    plans = planned(glm, speculative="nextn", flags={"--draft.moe-kernel": "reference"}).plans
    assert plans.draft is not None
    assert (plans.draft.moe_kernel.value, plans.draft.moe_kernel.source) == ("reference", Source.ASKED)
    assert plans.target.moe_kernel.requested.is_auto


def test_numerics_are_exact_only_where_the_experts_are_too(glm: Path) -> None:
    plan = planned(glm, caps=SERVER, moe_kernel="reference").plans.target
    assert plan.numerics.value is Numerics.FAST
    assert MOE in plan.numerics.inputs["kernels.not_exact"]


FACTS: dict[str, Any] = {
    "plan.device": "cpu", "caps.has_compiler": True, "caps.isa": ["avx512f"], "caps.failed.native": None,
    "caps.failed.native.moe": None,
    "spec.expert_sizes": {"hidden": [64], "expert_width": [32]}, "spec.router_groups": 8,
}  # fmt: skip
BREAKS: dict[str, dict[str, Any]] = {
    "kernel.native.device": {"plan.device": "cuda"},
    "kernel.native.compiler": {"caps.has_compiler": False},
    "kernel.native.isa": {"caps.isa": ["avx2"]},
    "kernel.native.sizes": {"spec.expert_sizes": {"hidden": [64], "expert_width": [40]}},
    "kernel.native.groups": {"spec.router_groups": MAX_GROUPS + 1},
    "kernel.native.self_test": {"caps.failed.native": "failed: ffn differs"},
    "kernel.native.moe_self_test": {"caps.failed.native.moe": "failed: experts differ"},
}


@pytest.mark.parametrize("name", BREAKS)
def test_every_condition_of_native_experts_can_hold_and_can_fail(name: str) -> None:
    native = next(kernel for kernel in CATALOG if (kernel.op, kernel.backend) == (MOE, "native"))
    (condition,) = [one for one in native.requires if one.id == name]
    held, broken = (condition.check(FactView(facts, condition.reads)) for facts in (FACTS, FACTS | BREAKS[name]))
    assert held is None and isinstance(broken, Blocked)


# attention


WORDS = {
    "deepseek_v2_lite": ["mla"],
    "deepseek_v3": ["mla"],
    "deepseek_v32": ["indexer", "mla"],
    "glm_moe_dsa": ["indexer", "mla"],
    "mistral4": ["mla", "query scale"],
    "glm4_moe": ["gqa"],
    "minimax_m2": ["gqa", "whole q/k norm"],
}


@pytest.mark.parametrize(("family", "words"), WORDS.items())
def test_native_attention_is_planned_where_it_covers_every_layer_and_else_says_what_it_lacks(
    tmp_path: Path, family: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(family)
    model = write_headers(tmp_path / "m", config, shapes=shapes_of(config))
    assert decided(model, "attention.decode").value == "native"
    monkeypatch.setattr(catalog, "NATIVE_MIXERS", NATIVE_MIXERS - {words[0]})
    decision = decided(model, "attention.decode")
    (check,) = [c for c in decision.checked if c.condition == "kernel.native.mixers"]
    assert check.inputs == {"spec.mixers": words}
    assert check.reason == f"native attention does not cover {words[0]}"
    with pytest.raises(KernelUnavailable, match="attention.decode = native"):
        planned(model, caps=SERVER, attention_decode="native")


def test_index_keys_of_native_attention_have_a_largest_size(tmp_path: Path) -> None:
    for size, says in ((256, None), (272, "native index keys have at most 256 elements, not 272")):
        config = config_of("deepseek_v32", index_head_dim=size)
        decision = decided(write_headers(tmp_path / str(size), config, shapes=shapes_of(config)), "attention.decode")
        (check,) = [c for c in decision.checked if c.condition == "kernel.native.latent"]
        assert check.reason == says


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"kv_lora_rank": 528}, "at most 512 elements, not 528"),
        ({"kv_lora_rank": 40}, "latent_rank 40"),
        ({"qk_nope_head_dim": 15}, "pairs, not of 15"),
        ({"q_lora_rank": 24}, "q_rank 24"),
    ],
)
def test_latent_sizes_that_native_attention_has_no_form_for_are_named(
    tmp_path: Path, overrides: dict[str, Any], says: str
) -> None:
    decision = decided(write_experts(tmp_path / "m", "glm4_moe_lite", **overrides), "attention.verify")
    assert decision.value == "reference"
    assert says in "; ".join(r.reason for r in decision.rejected if r.value == "native")


def test_a_failed_self_test_of_latent_ops_rules_them_out_and_leaves_other_attention(tmp_path: Path) -> None:
    caps = replace(SERVER, kernels={**SERVER.kernels, "native.latent": "failed: latent rows differ"})
    latent = decided(write_experts(tmp_path / "mla", "glm4_moe_lite"), "attention.decode", caps)
    assert latent.value == "reference"
    assert "latent rows differ" in "; ".join(r.reason for r in latent.rejected if r.value == "native")
    assert decided(write_experts(tmp_path / "gqa", "glm4_moe"), "attention.decode", caps).value == "native"


def test_sizes_of_all_layers_are_looked_at(tmp_path: Path) -> None:
    model = write_experts(tmp_path / "m", "glm4_moe", moe_intermediate_size=40)
    decision = decided(model, "matmul_kernel")
    assert decision.value != "native" and "shared_width 40" in decision.rejected[0].reason


# stored forms


def test_block_fp8_weights_are_computed_with_in_bfloat16_and_dequantised_on_load(tmp_path: Path) -> None:
    model = write_experts(tmp_path / "m", "deepseek_v3", fp8=lambda name: True, num_nextn_predict_layers=0)
    dtype, stored = decided(model, "dtype"), decided(model, "quantization")
    assert (dtype.value, dtype.source) == (DType.BF16, Source.CHECKPOINT)
    assert "fp8 32x32 weights are computed with in bfloat16" in dtype.reason
    count = 3 * 5 + 3 + 2 * (3 * 8 + 3)  # attention of 3 layers, one dense MLP, experts of 2 layers
    assert stored.value == "none"
    assert stored.reason.startswith(f"fp8 32x32 ({count} tensors) dequantised on load")
    assert stored.inputs["stored.formats"] == {"fp8 32x32": count}


def test_to_keep_eight_bits_is_refused_where_no_kernel_can(tmp_path: Path, glm: Path) -> None:
    model = write_experts(tmp_path / "m", "glm4_moe", fp8=lambda name: True)
    with pytest.raises(KernelUnavailable, match="quantization = fp8 was asked for") as caught:
        planned(model, quantization="fp8")
    assert "reference does not compute on FP8 codes (matmul_kernel)" in str(caught.value)
    assert decided(model, "quantization", quantization="none").source is Source.ASKED
    with pytest.raises(PlanError, match="which Proa does not know"):
        planned(glm, quantization="fp8")


def test_what_lies_beside_a_runners_tensors_is_no_fact_of_it(tmp_path: Path) -> None:
    huge = {"unrelated.weight": (4096, 4096)}
    model = write_headers(tmp_path / "m", tiny_config("llama"), add=huge, dtypes={"unrelated.weight": "F32"})
    dtype = decided(model, "dtype")
    assert dtype.value is DType.BF16 and set(dtype.inputs["stored.bytes"]) == {"bfloat16"}


def test_int4_experts_are_planned_and_the_plan_says_that_they_are_not_loaded(tmp_path: Path) -> None:
    config = config_of("kimi_k2")
    shapes, packed, kinds = shapes_of(config), dict[str, tuple[int, ...]](), dict[str, str]()
    for name, shape in shapes.items():
        if ".experts." not in name:
            packed[name] = shape
            continue
        base = name.removesuffix("weight")
        packed |= {f"{base}weight_packed": (shape[0], shape[1] // 8), f"{base}weight_scale": (shape[0], shape[1] // 32)}
        packed[f"{base}weight_shape"] = (2,)
        kinds |= {f"{base}weight_packed": "I32", f"{base}weight_shape": "I64"}
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": [],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }  # fmt: skip
    model = write_headers(tmp_path / "m", config, shapes=packed, dtypes=kinds)
    plan = planned(model, caps=GPU_HOST).plans.target
    assert plan.quantization.reason.startswith(
        "int4 group 32 (48 tensors); int4 group 32 is accounted for, but not loaded by this version"
    )
    assert plan.dtype.value is DType.BF16
    assert plan.shared_experts.rule == "moe.fuse.storage_differs"
    assert "stored as int4 group 32, shared ones as bfloat16" in plan.shared_experts.reason


def test_a_native_kernel_that_failed_its_test_is_passed_over_for_experts_too(glm: Path) -> None:
    caps = replace(SERVER, kernels={"native": "failed: experts differ"})
    decision = decided(glm, "moe_kernel", caps)
    assert decision.value == "reference"
    assert "kernel.native.self_test" in {r.rule for r in decision.rejected}
