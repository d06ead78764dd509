"""Weight rules of hybrid families: complete in every stored form, and every stored row in its place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from proa.arch import delta
from proa.arch.blocks import NormSpec
from proa.arch.decoder import DecoderSpec
from proa.arch.delta_blocks import Decay, DeltaSpec, OutputGate
from proa.arch.layout import WeightLayout
from proa.arch.parameters import decoder_parameters
from proa.arch.registry import Reading, read_config
from proa.arch.weights import Action, Elsewhere, LeftOut, NameMap, Place, Unknown
from proa.checkpoint.hf_config import HFView
from proa.errors import WeightError
from proa.units import Algorithm, DType, Role
from tests.factories.hybrid_checkpoints import HYBRID_FAMILIES, hybrid_config, hybrid_shapes, hybrid_tensors, is_stacked
from tests.factories.layouts import layout_of


def read(config: dict[str, Any]) -> Reading:
    return read_config(HFView(config, where="config.json"))


def layout(spec: DecoderSpec, config: dict[str, Any], *, fused: bool) -> WeightLayout:
    stacked = [layer.index for layer in spec.layers] if is_stacked(config) else []
    return layout_of(spec, fused=None if fused else [], stacked=stacked, tied_head=spec.tied_head)


def runners(config: dict[str, Any], *, fused: bool) -> Iterator[tuple[Role, NameMap]]:
    """The checked maps of the target, and of the draft where there is one, each knowing of the other."""
    found = read(config)
    arranged = layout(found.spec, config, fused=fused)
    target = NameMap(found.weights(found.spec, arranged), found.prefixes)
    target.check(decoder_parameters(found.spec, arranged))
    if Algorithm.NEXTN not in found.drafts:
        yield Role.TARGET, target
        return
    decoder = found.drafts[Algorithm.NEXTN].decoder
    arranged = layout(decoder, config, fused=fused)
    draft = NameMap(found.family.drafts[Algorithm.NEXTN].weights(decoder, arranged))
    draft.check(decoder_parameters(decoder, arranged))
    yield Role.TARGET, target.beside(draft)
    yield Role.DRAFT, draft.beside(target)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("family", HYBRID_FAMILIES)
def test_every_stored_tensor_has_one_owner_and_every_expected_one_is_stored(family: str, fused: bool) -> None:
    config = hybrid_config(family, attention_bias=True) if "qwen" in family else hybrid_config(family)
    shapes = hybrid_shapes(config)
    owners: dict[str, list[Role]] = {name: [] for name in shapes}
    for role, names in runners(config, fused=fused):
        for name, shape in shapes.items():
            claim = names.claim(name)
            assert not isinstance(claim, Unknown), f"{role}: {name}"
            if isinstance(claim, Place):
                assert claim.shape == shape, name
                owners[name].append(role)
            else:
                is_tower = ".visual." in name and role is Role.TARGET
                assert isinstance(claim, LeftOut if is_tower else Elsewhere), name
        assert set(names.expected()) <= set(shapes)
    assert {name for name, roles in owners.items() if len(roles) != 1} == {n for n in shapes if ".visual." in n}


@pytest.mark.parametrize("family", HYBRID_FAMILIES)
def test_dropping_any_rule_is_named_by_the_partition_check(family: str) -> None:
    found = read(hybrid_config(family))
    arranged = layout(found.spec, hybrid_config(family), fused=False)
    rules = list(found.weights(found.spec, arranged))
    for dropped in (rule for rule in rules if rule.action is Action.LOAD):
        with pytest.raises(WeightError) as caught:
            NameMap(rule for rule in rules if rule is not dropped).check(decoder_parameters(found.spec, arranged))
        assert caught.value.slug == "weights/partition"


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen3_next", "model.layers.3.linear_attn.in_proj_ba.weight"),
        ("qwen3_next", "model.layers.0.linear_attn.in_proj_qkv.weight"),
        ("qwen3_next", "model.layers.0.self_attn.q_proj.weight"),
        ("qwen3_5_text", "model.layers.0.linear_attn.in_proj_qkvz.weight"),
        ("qwen3_5_text", "model.layers.0.linear_attn.conv1d.bias"),
        ("qwen3_5_text", "model.language_model.norm.weight"),
        ("qwen3_5_text", "model.visual.merger.norm.bias"),
        ("qwen3_5", "model.norm.weight"),
        ("qwen3_5", "model.language_model.lm_head.weight"),
        ("qwen3_5", "model.language_model.mtp.norm.weight"),
        ("qwen3_5", "visual.merger.norm.bias"),
        ("kimi_linear", "model.layers.3.self_attn.q_conv1d.weight"),
        ("kimi_linear", "model.layers.0.self_attn.kv_b_proj.weight"),
        ("kimi_linear", "model.layers.0.block_sparse_moe.gate.weight"),
        ("kimi_linear", "model.layers.1.mlp.up_proj.weight"),
    ],
)
def test_a_tensor_of_another_family_layer_or_wrapper_is_unknown(family: str, name: str) -> None:
    _, target = next(runners(hybrid_config(family), fused=False))
    assert isinstance(target.claim(name), Unknown)


def test_scales_belong_to_projections_and_not_to_convolutions_norms_or_decays() -> None:
    _, names = next(runners(hybrid_config("qwen3_5"), fused=False))
    prefix = "model.language_model.layers"
    for stem in (
        "0.linear_attn.in_proj_qkv",
        "0.linear_attn.in_proj_a",
        "0.linear_attn.out_proj",
        "3.self_attn.q_proj",
    ):
        claim = names.claim(f"{prefix}.{stem}.weight_scale_inv")
        assert isinstance(claim, Place) and claim.group == f"{prefix}.{stem}.weight"
    for stem in ("0.linear_attn.conv1d", "0.linear_attn.norm", "3.self_attn.q_norm"):
        assert isinstance(names.claim(f"{prefix}.{stem}.weight_scale_inv"), Unknown)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next", "kimi_linear"])
def test_decays_and_their_biases_are_kept_in_float32(family: str) -> None:
    found = read(hybrid_config(family))
    table = decoder_parameters(found.spec, layout(found.spec, hybrid_config(family), fused=False))
    kinds = {name: table[f"layers.0.attn.{name}"].dtype for name in ("a_log", "dt_bias", "conv.weight", "proj.weight")}
    assert kinds == {"a_log": DType.F32, "dt_bias": DType.F32, "conv.weight": None, "proj.weight": None}


# Where the rows go: parameters filled as the places say, against the published arrangement of the stored tensors.


def assembled(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The target's parameters, NaN where nothing went."""
    found = read(config)
    arranged = layout(found.spec, config, fused=False)
    names = NameMap(found.weights(found.spec, arranged), found.prefixes)
    table = decoder_parameters(found.spec, arranged)
    filled = {name: torch.full(info.shape, torch.nan) for name, info in table.items()}
    for name, tensor in tensors.items():
        claim = names.claim(name)
        for fill in claim.fills if isinstance(claim, Place) else ():
            parameter = filled[fill.parameter]
            target = parameter.view(-1, parameter.shape[-1]) if parameter.ndim > 1 else parameter
            source = tensor.reshape(-1, tensor.shape[-1]) if tensor.ndim > 1 else tensor
            stored = fill.part.rows if fill.part is not None else None
            part = target[slice(*(fill.rows or (None,)))]
            part.copy_(source[slice(*(stored or (None,)))].reshape(part.shape))
    assert not [name for name, value in filled.items() if value.isnan().any()]
    return filled


def stored_and_filled(family: str, **overrides: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    config = hybrid_config(family, **overrides)
    tensors = hybrid_tensors(config, 0, torch.float32)
    return tensors, assembled(config, tensors)


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text", "qwen3_5"])
def test_gates_of_the_attention_lie_behind_the_values_head_by_head(family: str) -> None:
    tensors, filled = stored_and_filled(family, attention_bias=True)
    prefix = "model.language_model.layers.3" if family == "qwen3_5" else "model.layers.3"
    for end in ("weight", "bias"):
        q, k, v = (tensors[f"{prefix}.self_attn.{name}_proj.{end}"] for name in "qkv")
        by_head = q.unflatten(0, (4, 2, 32))  # head, query or gate, element
        expected = torch.cat([by_head[:, 0].flatten(0, 1), k, v, by_head[:, 1].flatten(0, 1)])
        torch.testing.assert_close(filled[f"layers.3.attn.qkv.{end}"], expected, rtol=0, atol=0)


def test_ungated_queries_lie_before_keys_and_values_as_in_other_families() -> None:
    tensors, filled = stored_and_filled("qwen3_5_text", attn_output_gate=False)
    expected = torch.cat([tensors[f"model.layers.3.self_attn.{name}_proj.weight"] for name in "qkv"])
    torch.testing.assert_close(filled["layers.3.attn.qkv.weight"], expected, rtol=0, atol=0)


def test_projections_grouped_by_key_head_come_apart() -> None:
    tensors, filled = stored_and_filled("qwen3_next")
    prefix, groups, shared, key, value = "model.layers.1.linear_attn", 2, 2, 16, 24
    qkvz = tensors[f"{prefix}.in_proj_qkvz.weight"].unflatten(0, (groups, -1))
    q, k, v, z = qkvz.split([key, key, shared * value, shared * value], dim=1)
    b, a = tensors[f"{prefix}.in_proj_ba.weight"].unflatten(0, (groups, -1)).split([shared, shared], dim=1)
    expected = torch.cat([part.flatten(0, 1) for part in (q, k, v, b, a, z)])
    torch.testing.assert_close(filled["layers.1.attn.proj.weight"], expected, rtol=0, atol=0)


def test_flat_projections_are_stacked_as_they_are() -> None:
    tensors, filled = stored_and_filled("qwen3_5_moe")
    prefix = "model.language_model.layers.1.linear_attn"
    expected = torch.cat([tensors[f"{prefix}.in_proj_{name}.weight"] for name in ("qkv", "b", "a", "z")])
    torch.testing.assert_close(filled["layers.1.attn.proj.weight"], expected, rtol=0, atol=0)
    torch.testing.assert_close(filled["layers.1.attn.conv.weight"], tensors[f"{prefix}.conv1d.weight"])
    torch.testing.assert_close(filled["layers.1.attn.a_log"], tensors[f"{prefix}.A_log"])


def test_kimis_projections_convolutions_and_low_rank_maps_each_find_their_place() -> None:
    tensors, filled = stored_and_filled("kimi_linear")
    prefix = "model.layers.4.self_attn"
    own = {name.removeprefix("layers.4.attn."): value for name, value in filled.items() if ".4.attn." in name}
    exact: dict[str, torch.Tensor] = {
        "proj.weight": torch.cat([tensors[f"{prefix}.{name}_proj.weight"] for name in "qkvb"]),
        "conv.weight": torch.cat([tensors[f"{prefix}.{name}_conv1d.weight"] for name in "qkv"]),
        "a_down.weight": tensors[f"{prefix}.f_a_proj.weight"],
        "a_up.weight": tensors[f"{prefix}.f_b_proj.weight"],
        "z_down.weight": tensors[f"{prefix}.g_a_proj.weight"],
        "z_up.weight": tensors[f"{prefix}.g_b_proj.weight"],
        "a_log": tensors[f"{prefix}.A_log"].flatten(),
        "dt_bias": tensors[f"{prefix}.dt_bias"],
        "norm.weight": tensors[f"{prefix}.o_norm.weight"],
        "o.weight": tensors[f"{prefix}.o_proj.weight"],
    }
    assert own.keys() == exact.keys()
    for name, value in exact.items():
        torch.testing.assert_close(own[name], value, rtol=0, atol=0, msg=name)


def test_rules_of_kimi_delta_attention_need_its_rank() -> None:
    spec = DeltaSpec(
        key_heads=2, value_heads=2, key_dim=16, value_dim=16, taps=4, decay=Decay.CHANNEL, gate=OutputGate.SIGMOID,
        norm=NormSpec(eps=1e-5), rank=None,
    )  # fmt: skip
    with pytest.raises(ValueError, match="rank"):
        list(delta.kda_rules(spec, 64, [0]))


def test_a_tied_head_is_compared_and_not_loaded() -> None:
    config = hybrid_config("qwen3_5", tie_word_embeddings=True)
    for role, names in runners(config, fused=False):
        assert "lm_head.weight" not in names.expected(), role
