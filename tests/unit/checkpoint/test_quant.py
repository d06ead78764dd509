"""quantization_config: what is understood, what is only known by name, and what is refused as meaningless."""

from __future__ import annotations

from typing import Any

import pytest

from proa.checkpoint.hf_config import HFView
from proa.checkpoint.quant import Form, QuantSpec, form_of, quant_spec
from proa.errors import ConfigError
from proa.units import DType

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 64]}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": INT4}},
    "ignore": ["lm_head", "re:.*self_attn.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"],
}


def spec(**quant: Any) -> QuantSpec:
    found = quant_spec(HFView({"quantization_config": quant}, where="config.json"))
    assert found is not None
    return found


def test_block_fp8_gives_the_rows_and_columns_of_a_scale() -> None:
    found = spec(**FP8)
    assert (found.method, found.block, found.group, found.runs) == ("fp8", (128, 64), None, True)


def test_fp8_without_a_block_has_none() -> None:
    assert spec(quant_method="fp8").block is None


def test_packed_int4_gives_its_group() -> None:
    found = spec(**PACKED)
    assert (found.method, found.block, found.group) == ("compressed-tensors", None, 32)


@pytest.mark.parametrize(
    "weights", [INT4 | {"num_bits": 8}, INT4 | {"symmetric": False}, INT4 | {"strategy": "channel", "group_size": None}]
)
def test_another_compressed_form_has_no_int4_group(weights: dict[str, Any]) -> None:
    assert spec(**PACKED | {"config_groups": {"group_0": {"weights": weights}}}).group is None


@pytest.mark.parametrize("method", ["gptq", "awq", "modelopt", "mxfp4", "bitsandbytes"])
def test_other_methods_are_known_by_name_and_do_not_run(method: str) -> None:
    assert not spec(quant_method=method).runs


@pytest.mark.parametrize(
    "config", [{}, {"quantization_config": None}, {"quantization_config": {"quant_method": "none"}}]
)
def test_without_a_method_there_is_no_spec(config: dict[str, Any]) -> None:
    assert quant_spec(HFView(config, where="config.json")) is None


@pytest.mark.parametrize(
    ("quant", "said"),
    [
        ({}, "quant_method is missing"),
        ({"quant_method": "fp9"}, "fp9"),
        (FP8 | {"weight_block_size": [128]}, "weight_block_size"),
        (FP8 | {"weight_block_size": [0, 128]}, "weight_block_size"),
        (FP8 | {"weight_block_size": [128.0, 128]}, "weight_block_size"),
        (FP8 | {"weight_block_size": 128}, "weight_block_size must be a list"),
        (FP8 | {"fmt": "e5m2"}, "e5m2"),
        (FP8 | {"modules_to_not_convert": [3]}, "modules_to_not_convert"),
        (FP8 | {"ignored_layers": "lm_head"}, "ignored_layers must be a list"),
        (PACKED | {"config_groups": {}}, "config_groups is empty"),
        (PACKED | {"config_groups": {"g": {"weights": INT4 | {"num_bits": 0}}}}, "num_bits = 0"),
        (PACKED | {"config_groups": {"g": {"weights": INT4 | {"group_size": 0}}}}, "group_size = 0"),
        (PACKED | {"ignore": ["re:("]}, "is no pattern"),
        (PACKED | {"ignore": ["re:(a+)+$"]}, "repeats too much"),
        (PACKED | {"ignore": ["re:" + ".*x" * 9]}, "repeats too much"),
    ],
)
def test_values_without_a_meaning_are_refused_by_name(quant: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        quant_spec(HFView({"quantization_config": quant or {"x": 1}}, where="config.json"))
    assert said in str(caught.value) and "quantization_config" in str(caught.value)


@pytest.mark.parametrize(
    ("pattern", "module"),
    [
        ("lm_head", "lm_head"),
        ("model.layers.61", "model.layers.61.mlp.experts.3.up_proj"),
        ("gate", "model.layers.3.mlp.gate"),
        ("model.layers.0.self_attn.qkv_proj", "model.layers.0.self_attn.k_proj"),
        ("model.layers.0.mlp.gate_up_proj", "model.layers.0.mlp.up_proj"),
        ("fused_qkv_a_proj_with_mqa", "model.layers.0.self_attn.q_a_proj"),
        ("re:.*self_attn.*", "model.layers.0.self_attn.q_proj"),
    ],
)
def test_an_excluded_name_covers_the_module_its_parts_and_what_is_inside(pattern: str, module: str) -> None:
    assert spec(**FP8, modules_to_not_convert=[pattern]).excludes(module)


@pytest.mark.parametrize(
    ("pattern", "module"),
    [
        ("model.layers.6", "model.layers.61.mlp.up_proj"),
        ("gate", "model.layers.3.mlp.gate_proj"),
        ("model.layers.0.self_attn.qkv_proj", "model.layers.0.self_attn.o_proj"),
        ("re:self_attn", "model.layers.0.self_attn.q_proj"),
    ],
)
def test_it_covers_nothing_else(pattern: str, module: str) -> None:
    assert not spec(**FP8, modules_to_not_convert=[pattern]).excludes(module)


@pytest.mark.parametrize(
    ("members", "form"),
    [
        ({"weight": DType.BF16}, Form.PLAIN),
        ({"weight": DType.F8_E4M3, "weight_scale_inv": DType.F32}, Form.FP8_BLOCK),
        ({"weight": DType.F8_E4M3}, Form.FP8_BLOCK),
        ({"weight": DType.BF16, "weight_scale_inv": DType.F32}, Form.FP8_BLOCK),
        ({"weight": DType.F8_E4M3, "weight_scale": DType.F32}, Form.FP8_SCALED),
        ({"weight_packed": DType.I32, "weight_scale": DType.BF16, "weight_shape": DType.I64}, Form.INT4),
        ({"weight_packed": DType.I32}, Form.INT4),
    ],
)
def test_the_members_that_are_there_tell_the_form(members: dict[str, DType], form: Form) -> None:
    values = members.get("weight") or members["weight_packed"]
    assert form_of(members, values) is form
