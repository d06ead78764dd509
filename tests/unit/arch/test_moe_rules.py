"""The weight rules of MoE layers, in every layout and stored form: a partition, and the right values in each slot."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from proa.arch.decoder import DecoderSpec
from proa.arch.layout import WeightLayout
from proa.arch.parameters import decoder_parameters
from proa.arch.registry import read_config
from proa.arch.weights import Action, Fill, NameMap, Place, Unknown, member_of
from proa.checkpoint.hf_config import HFView
from proa.errors import WeightError
from proa.units import DType
from tests.factories.checkpoints import random_tensors, tensor_shapes, tiny_config
from tests.factories.layouts import layout_of
from tests.factories.moe_checkpoints import MOE_FAMILIES, stacked, stacked_shapes

MIXED: dict[str, Any] = {"decoder_sparse_step": 2, "mlp_only_layers": [1], "num_hidden_layers": 6}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in MOE_FAMILIES),
    ("qwen2_moe", MIXED),
    ("qwen3_moe", MIXED | {"attention_bias": True}),
    ("glm4_moe", {"n_shared_experts": 2, "use_qk_norm": False}),
    ("glm4_moe", {"n_shared_experts": 0, "num_nextn_predict_layers": 0}),
    ("minimax_m2", {"use_routing_bias": False, "use_qk_norm": False}),
]
FUSABLE: list[tuple[str, dict[str, Any]]] = [
    ("qwen2_moe", {"shared_expert_intermediate_size": 32}),
    ("qwen2_moe", MIXED | {"shared_expert_intermediate_size": 32}),
    *(("glm4_moe", {"n_shared_experts": count}) for count in (1, 2, 3)),
]
ARRANGED = [*((*variant, False) for variant in (*VARIANTS, *FUSABLE)), *((*variant, True) for variant in FUSABLE)]
FORMS = ["listed", "stacked"]


def model(family: str, **overrides: Any) -> tuple[dict[str, Any], DecoderSpec, Any]:
    config = tiny_config(family, **overrides)
    reading = read_config(HFView(config, where="config.json"))
    return config, reading.spec, reading.weights


def arranged(spec: DecoderSpec, form: str, *, fused: bool) -> WeightLayout:
    every = range(len(spec.layers))
    return layout_of(spec, fused=None if fused else (), stacked=every if form == "stacked" else ())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("family", "overrides", "fused"), ARRANGED)
def test_the_rules_fill_every_parameter_exactly_once(
    family: str, overrides: dict[str, Any], form: str, fused: bool
) -> None:
    _, spec, weights = model(family, **overrides)
    layout = arranged(spec, form, fused=fused)
    NameMap(weights(spec, layout)).check(decoder_parameters(spec, layout))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("family", "overrides", "fused"), ARRANGED)
def test_every_tensor_of_a_hub_checkpoint_has_a_place_of_its_shape(
    family: str, overrides: dict[str, Any], form: str, fused: bool
) -> None:
    config, spec, weights = model(family, **overrides)
    stored = dict(tensor_shapes(config | {"num_nextn_predict_layers": 0}))
    stored = stacked_shapes(stored) if form == "stacked" else stored
    names = NameMap(weights(spec, arranged(spec, form, fused=fused)))
    claims = {name: names.claim(name) for name in stored}
    assert {name: claim.shape for name, claim in claims.items() if isinstance(claim, Place)} == stored
    assert set(names.expected()) == set(stored)
    slots = {name for name, claim in claims.items() if isinstance(claim, Place) and claim.is_shared_slot}
    assert slots == (
        {name for name in stored if ".shared_expert" in name and "_gate.w" not in name} if fused else set()
    )


@pytest.mark.parametrize(("family", "fused"), [("qwen2_moe", False), ("glm4_moe", True), ("minimax_m2", False)])
@pytest.mark.parametrize("form", FORMS)
def test_dropping_any_rule_is_named_by_the_partition_check(family: str, form: str, fused: bool) -> None:
    _, spec, weights = model(family)
    layout = arranged(spec, form, fused=fused)
    rules = list(weights(spec, layout))
    for dropped in (rule for rule in rules if rule.action is Action.LOAD):
        with pytest.raises(WeightError) as caught:
            NameMap(rule for rule in rules if rule is not dropped).check(decoder_parameters(spec, layout))
        assert caught.value.slug == "weights/partition"
        assert dropped.fills[0].parameter.rpartition("#")[2] in str(caught.value)


def test_a_slot_filled_from_the_next_expert_is_named_by_the_partition_check() -> None:
    _, spec, weights = model("qwen3_moe")
    layout = arranged(spec, "listed", fused=False)
    rules = [
        replace(rule, fills=(rule.fills[0]._replace(per_slot=rule.fills[0].per_slot + 1),))
        if "down_proj" in rule.source
        else rule
        for rule in weights(spec, layout)
    ]
    with pytest.raises(WeightError, match=r"ffn\.experts\.down"):
        NameMap(rules).check(decoder_parameters(spec, layout))


def test_layers_of_one_model_may_differ_in_layout_and_form() -> None:
    config, spec, weights = model("glm4_moe", num_hidden_layers=5, num_nextn_predict_layers=0)
    layout = layout_of(spec, fused=(2, 4), stacked=(3, 4))
    names = NameMap(weights(spec, layout))
    parameters = decoder_parameters(spec, layout)
    names.check(parameters)
    assert {layer: parameters[f"layers.{layer}.ffn.experts.down"].shape[0] for layer in (1, 2, 3, 4)} == {
        1: 8, 2: 9, 3: 8, 4: 9,
    }  # fmt: skip
    claims = {layer: names.claim(f"model.layers.{layer}.mlp.shared_experts.up_proj.weight") for layer in (1, 2, 3, 4)}
    assert {layer: isinstance(claim, Place) and claim.is_shared_slot for layer, claim in claims.items()} == {
        1: False, 2: True, 3: False, 4: True,
    }  # fmt: skip
    assert isinstance(names.claim("model.layers.3.mlp.experts.0.up_proj.weight"), Unknown)
    assert isinstance(names.claim("model.layers.2.mlp.experts.gate_up_proj"), Unknown)
    dense = names.claim("model.layers.0.mlp.up_proj.weight")
    assert isinstance(dense, Place) and dense.shape == (config["intermediate_size"], 64)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("glm4_moe", "model.layers.0.mlp.experts.0.up_proj.weight"),
        ("glm4_moe", "model.layers.1.mlp.experts.8.up_proj.weight"),
        ("glm4_moe", "model.layers.1.mlp.up_proj.weight"),
        ("glm4_moe", "model.layers.1.mlp.shared_expert_gate.weight"),
        ("glm4_moe", "model.layers.1.mlp.gate.bias"),
        ("qwen2_moe", "model.layers.1.mlp.shared_experts.up_proj.weight"),
        ("qwen3_moe", "model.layers.1.mlp.shared_expert.up_proj.weight"),
        ("qwen3_moe", "model.layers.1.mlp.gate.e_score_correction_bias"),
        ("minimax_m2", "model.layers.1.block_sparse_moe.gate.e_score_correction_bias"),
        ("minimax_m2", "model.layers.1.mlp.experts.0.w1.weight"),
        ("minimax_m2", "model.layers.3.block_sparse_moe.gate.weight"),
    ],
)
def test_a_tensor_of_another_family_or_layer_is_unknown(family: str, name: str) -> None:
    _, spec, weights = model(family)
    assert isinstance(NameMap(weights(spec, arranged(spec, "listed", fused=False))).claim(name), Unknown)


def test_minimax_w1_is_the_gate_w3_the_way_up_and_w2_the_way_down() -> None:
    _, spec, weights = model("minimax_m2")
    names = NameMap(weights(spec, arranged(spec, "listed", fused=False)))
    fills = {}
    for part in ("w1", "w2", "w3"):
        claim = names.claim(f"model.layers.2.block_sparse_moe.experts.3.{part}.weight")
        assert isinstance(claim, Place)
        fills[part] = claim.fills
    assert fills == {
        "w1": (Fill(parameter="layers.2.ffn.experts.gate_up", rows=(192, 224)),),
        "w3": (Fill(parameter="layers.2.ffn.experts.gate_up", rows=(224, 256)),),
        "w2": (Fill(parameter="layers.2.ffn.experts.down", rows=(192, 256)),),
    }


def test_the_correction_bias_is_kept_in_float32_and_scales_belong_to_matrices_only() -> None:
    _, spec, weights = model("glm4_moe")
    layout = arranged(spec, "listed", fused=True)
    assert decoder_parameters(spec, layout)["layers.1.ffn.router.bias"].dtype is DType.F32
    names = NameMap(weights(spec, layout))
    for stem in ("mlp.experts.5.down_proj", "mlp.shared_experts.up_proj", "self_attn.o_proj"):
        name = f"model.layers.1.{stem}.weight_scale_inv"
        claim = names.claim(name)
        assert isinstance(claim, Place)
        assert (member_of(claim, name), claim.group) == ("weight_scale_inv", f"model.layers.1.{stem}.weight")
    for stem in ("input_layernorm", "self_attn.q_norm"):
        assert isinstance(names.claim(f"model.layers.1.{stem}.weight_scale_inv"), Unknown)


def assembled(names: NameMap, tensors: dict[str, torch.Tensor], layout: WeightLayout, spec: DecoderSpec) -> Any:
    """Parameters filled as the places say, and nothing else."""
    shapes = {name: info.shape for name, info in decoder_parameters(spec, layout).items()}
    filled = {name: torch.full(shape, torch.nan, dtype=torch.float64) for name, shape in shapes.items()}
    for name, tensor in tensors.items():
        claim = names.claim(name)
        assert isinstance(claim, Place), name
        for fill in claim.fills:
            source = tensor.to(torch.float64)
            if fill.part is not None:
                source = source[slice(*(fill.part.rows or (None,)))]
                source = source[:, slice(*(fill.part.columns or (None,)))]
            target = filled[fill.parameter]
            flat = target.view(-1, target.shape[-1]) if target.ndim > 1 else target
            flat[slice(*(fill.rows or (None,)))] = source.reshape(-1, source.shape[-1]) if flat.ndim > 1 else source
    return filled


def gated(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_slots_hold_each_expert_and_together_the_whole_shared_mlp(count: int, form: str) -> None:
    config, spec, weights = model("glm4_moe", n_shared_experts=count, num_nextn_predict_layers=0)
    tensors = random_tensors(config, 3, torch.float32)
    layout = arranged(spec, form, fused=True)
    stored = stacked(tensors) if form == "stacked" else tensors
    filled = assembled(NameMap(weights(spec, layout)), stored, layout, spec)
    gate_up, down = filled["layers.2.ffn.experts.gate_up"], filled["layers.2.ffn.experts.down"]
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    slots = [gated(x, gate_up[slot, :32], gate_up[slot, 32:], down[slot]) for slot in range(8 + count)]
    block = "model.layers.2.mlp"

    def stored_mlp(where: str) -> torch.Tensor:
        gate, up, down = (tensors[f"{block}.{where}.{part}_proj.weight"].double() for part in ("gate", "up", "down"))
        return gated(x, gate, up, down)

    for expert in range(8):
        torch.testing.assert_close(slots[expert], stored_mlp(f"experts.{expert}"))
    torch.testing.assert_close(sum(slots[8:]), stored_mlp("shared_experts"))


def test_a_shared_mlp_that_does_not_fit_its_slots_has_no_rules() -> None:
    _, spec, weights = model("qwen2_moe")  # shared width 48, routed width 32
    with pytest.raises(WeightError, match=r"shared_expert: 1 slots of 32 do not hold 48 rows") as caught:
        list(weights(spec, arranged(spec, "listed", fused=True)))
    assert caught.value.slug == "weights/partition"
