"""Source groups by their headers: complete ones pass, and every way of being incomplete or misshapen is named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from proa.errors import WeightError
from proa.loading.ledger import LoadLedger
from tests.factories.checkpoints import tensor_shapes, tiny_config
from tests.factories.fp8 import is_linear, with_fp8
from tests.factories.headers import planned, write_headers

Stored = dict[str, tuple[str, Sequence[int]]]
UP = "model.layers.1.mlp.experts.3.up_proj"
Q = "model.layers.2.self_attn.q_proj"


def fp8_headers() -> Stored:
    """Qwen3-MoE in block FP8 as released: codes and float32 scales, the rest bfloat16."""
    stored: Stored = {}
    for name, shape in tensor_shapes(tiny_config("qwen3_moe")):
        stored[name] = ("F8_E4M3" if is_linear(name) else "BF16", shape)
        if is_linear(name):
            stored[f"{name}_scale_inv"] = ("F32", (-(-shape[0] // 32), -(-shape[1] // 32)))
    return stored


def int4_headers() -> Stored:
    """Routed experts packed in groups of 32, as Kimi K2 releases them; the rest bfloat16."""
    stored: Stored = {}
    for name, shape in tensor_shapes(tiny_config("qwen3_moe")):
        if ".experts." not in name:
            stored[name] = ("BF16", shape)
            continue
        base = name.removesuffix("weight")
        stored[f"{base}weight_packed"] = ("I32", (shape[0], shape[1] // 8))
        stored[f"{base}weight_scale"] = ("BF16", (shape[0], shape[1] // 32))
        stored[f"{base}weight_shape"] = ("I64", (2,))
    return stored


def with_int4(config: dict[str, Any]) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    quant = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups, "ignore": []}
    return {**config, "quantization_config": quant}


def ledger(path: Path, stored: Stored, config: dict[str, Any]) -> LoadLedger:
    shapes = {name: shape for name, (_, shape) in stored.items()}
    write_headers(path, config, dtypes={name: dtype for name, (dtype, _) in stored.items()}, shapes=shapes)
    return LoadLedger(planned(path).target)


def refused(path: Path, stored: Stored, config: dict[str, Any]) -> WeightError:
    with pytest.raises(WeightError) as caught:
        ledger(path, stored, config).refuse_findings()
    return caught.value


FP8, INT4 = with_fp8(tiny_config("qwen3_moe")), with_int4(tiny_config("qwen3_moe"))


def test_complete_fp8_groups_pass_and_scales_are_placed(tmp_path: Path) -> None:
    stored = fp8_headers()
    found = ledger(tmp_path, stored, FP8)
    found.refuse_findings()
    found.refuse_forms()
    account = found.as_json()
    assert account["tensors"]["placed"] == account["tensors"]["total"] == len(stored)
    groups = {(group["template"], group["dtype"]): group for group in account["groups"]}
    scale = groups["model.layers.#.mlp.experts.#.down_proj.weight_scale_inv", "F32"]
    assert (scale["count"], scale["parameter"], scale["shape"]) == (24, "layers.#.ffn.experts.down", [2, 1])


def test_modules_left_plain_beside_fp8_ones_pass(tmp_path: Path) -> None:
    """A last layer in bfloat16, and attention of the first one: each module is what its tensors say."""
    stored = fp8_headers()
    for name in [name for name in stored if "layers.2." in name or "layers.0.self_attn" in name]:
        if name.endswith("_scale_inv"):
            del stored[name]
        elif stored[name][0] == "F8_E4M3":
            stored[name] = ("BF16", stored[name][1])
    ledger(tmp_path, stored, FP8).refuse_findings()


def test_float32_gates_and_bfloat16_scales_pass(tmp_path: Path) -> None:
    stored = fp8_headers()
    for name, (dtype, shape) in stored.items():
        if name.endswith("mlp.gate.weight"):
            stored[name] = ("F32", shape)
        elif dtype == "F32":
            stored[name] = ("BF16", shape)
    ledger(tmp_path, stored, FP8).refuse_findings()


def drop(name: str) -> Callable[[Stored], None]:
    return lambda stored: stored.pop(name) and None


def put(name: str, dtype: str, shape: Sequence[int]) -> Callable[[Stored], None]:
    return lambda stored: stored.update({name: (dtype, shape)})


WRONG: dict[str, tuple[Callable[[Stored], None], str, str, tuple[str, ...]]] = {
    "no scale": (
        drop(f"{UP}.weight_scale_inv"), "weights/incomplete-group", f"{UP}.weight_scale_inv", (f"{UP}.weight",)
    ),
    "no codes": (drop(f"{UP}.weight"), "weights/incomplete-group", f"{UP}.weight", (f"{UP}.weight_scale_inv",)),
    "codes made bfloat16": (
        put(f"{Q}.weight", "BF16", (128, 64)), "weights/incomplete-group", f"{Q}.weight",
        ("BF16 [128, 64]", "F8_E4M3", f"{Q}.weight_scale_inv"),
    ),
    "scale grid too small": (
        put(f"{Q}.weight_scale_inv", "F32", (3, 2)), "weights/shape", f"{Q}.weight_scale_inv",
        ("F32 [3, 2]", "expected [4, 2]", "32 x 32", f"{Q}.weight [128, 64]"),
    ),
    "codes transposed": (
        put(f"{Q}.weight", "F8_E4M3", (64, 128)), "weights/shape", f"{Q}.weight", ("[64, 128]", "expected [128, 64]")
    ),
    "scale of another type": (
        put(f"{Q}.weight_scale_inv", "I32", (4, 2)), "weights/dtype", f"{Q}.weight_scale_inv", ("I32", "BF16 or F32")
    ),
    "a scale of another form as well": (
        put(f"{Q}.weight_scale", "F32", (1,)), "weights/unclaimed", f"{Q}.weight_scale", ("block FP8",)
    ),
    "a scale of a norm": (
        put("model.norm.weight_scale_inv", "F32", (1,)), "weights/unclaimed", "model.norm.weight_scale_inv", ()
    ),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_a_broken_fp8_group_is_refused_naming_the_member_and_its_group(wrong: str, tmp_path: Path) -> None:
    change, slug, name, facts = WRONG[wrong]
    stored = fp8_headers()
    change(stored)
    error = refused(tmp_path, stored, FP8)
    assert (error.slug, error.role) == (slug, "target")
    line = next(fact for fact in error.facts if f": {name}  " in fact)
    assert all(fact in line for fact in facts), line


def test_scales_without_a_block_size_in_the_config_are_refused(tmp_path: Path) -> None:
    config = {**FP8, "quantization_config": {"quant_method": "fp8", "fmt": "e4m3"}}
    error = refused(tmp_path, fp8_headers(), config)
    assert error.slug == "weights/shape" and "no weight_block_size" in str(error)


# Forms that are accounted for and do not run


def test_packed_int4_is_accounted_for_and_refused_at_load_by_name(tmp_path: Path) -> None:
    stored = int4_headers()
    found = ledger(tmp_path, stored, INT4)
    found.refuse_findings()
    account = found.as_json()
    assert account["tensors"]["placed"] == len(stored) and account["unexpected"] == account["missing"] == []
    with pytest.raises(WeightError, match=r"does not run yet \(quant_method = compressed-tensors\)") as caught:
        found.refuse_forms()
    assert caught.value.slug == "weights/unsupported-form" and "int4 in groups" in str(caught.value)


@pytest.mark.parametrize("member", ["weight_packed", "weight_scale", "weight_shape"])
def test_a_lost_member_of_a_packed_weight_is_named(member: str, tmp_path: Path) -> None:
    stored = int4_headers()
    del stored[f"{UP}.{member}"]
    error = refused(tmp_path, stored, INT4)
    assert error.slug == "weights/incomplete-group" and f"incomplete: {UP}.{member}  " in str(error)


@pytest.mark.parametrize(
    ("member", "dtype", "shape"),
    [("weight_packed", "I32", (32, 4)), ("weight_scale", "BF16", (32, 1)), ("weight_shape", "I64", (3,))],
)
def test_a_packed_member_of_another_shape_is_named(
    member: str, dtype: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    stored = int4_headers()
    stored[f"{UP}.{member}"] = (dtype, shape)
    error = refused(tmp_path, stored, INT4)
    assert error.slug == "weights/shape" and f"shape: {UP}.{member}  {dtype} {list(shape)}" in str(error)


def test_fp8_with_one_scale_per_tensor_is_accounted_for_and_refused_at_load(tmp_path: Path) -> None:
    stored: Stored = {}
    for name, (dtype, shape) in fp8_headers().items():
        is_scale = name.endswith("_scale_inv")
        stored[name.removesuffix("_inv") if is_scale else name] = (dtype, (1,) if is_scale else shape)
    found = ledger(tmp_path, stored, {**FP8, "quantization_config": {"quant_method": "fp8"}})
    found.refuse_findings()
    with pytest.raises(WeightError, match="one scale per tensor") as caught:
        found.refuse_forms()
    assert caught.value.slug == "weights/unsupported-form"


def test_a_method_known_by_name_only_is_refused_at_load_before_its_tensors_are_called_strays(tmp_path: Path) -> None:
    stored = int4_headers()
    for name in [name for name in stored if name.endswith("weight_packed")]:
        stored[name.replace("weight_packed", "qweight")] = stored.pop(name)
    found = ledger(tmp_path, stored, {**FP8, "quantization_config": {"quant_method": "gptq", "bits": 4}})
    with pytest.raises(WeightError, match="quant_method = gptq") as caught:
        found.refuse_forms()
    assert caught.value.slug == "weights/unsupported-form"
