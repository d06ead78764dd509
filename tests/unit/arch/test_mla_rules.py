"""Weight rules of latent attention: complete for every family, layout and runner, and no rule can be missed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from proa.arch.decoder import DecoderSpec
from proa.arch.family import Weights
from proa.arch.layout import WeightLayout
from proa.arch.parameters import decoder_parameters
from proa.arch.registry import Reading, read_config
from proa.arch.weights import Borrowed, Elsewhere, Fill, NameMap, Place, Unknown
from proa.checkpoint.hf_config import HFView
from proa.errors import WeightError
from proa.units import Algorithm, Role
from tests.factories.layouts import layout_of
from tests.factories.mla_checkpoints import MLA_FAMILIES, mla_config, mla_shapes

DRAFTED = tuple(family for family in MLA_FAMILIES if mla_config(family).get("num_nextn_predict_layers"))


def read(family: str) -> Reading:
    return read_config(HFView(mla_config(family), where="config.json"))


def layout(spec: DecoderSpec, family: str, *, fused: bool) -> WeightLayout:
    stacked = [layer.index for layer in spec.layers] if family == "mistral4" else []
    return layout_of(spec, fused=None if fused else [], stacked=stacked)


def proved(weights: Weights, spec: DecoderSpec, family: str, *, fused: bool) -> NameMap:
    arranged = layout(spec, family, fused=fused)
    names = NameMap(weights(spec, arranged))
    names.check(decoder_parameters(spec, arranged))
    return names


def runners(family: str, *, fused: bool) -> Iterator[tuple[Role, NameMap]]:
    """The maps of the target, and of the draft where there is one, each knowing of the other."""
    found = read(family)
    target = proved(found.weights, found.spec, family, fused=fused)
    if Algorithm.NEXTN not in found.drafts:
        yield Role.TARGET, target
        return
    decoder = found.drafts[Algorithm.NEXTN].decoder
    draft = proved(found.family.drafts[Algorithm.NEXTN].weights, decoder, family, fused=fused)
    yield Role.TARGET, target.beside(draft)
    yield Role.DRAFT, draft.beside(target)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("family", MLA_FAMILIES)
def test_every_stored_tensor_is_claimed_and_every_expected_one_is_stored(family: str, fused: bool) -> None:
    shapes = mla_shapes(mla_config(family))
    for role, names in runners(family, fused=fused):
        for name, shape in shapes.items():
            claim = names.claim(name)
            assert not isinstance(claim, Unknown), f"{role}: {name}"
            if isinstance(claim, Place):
                assert claim.shape == shape, f"{role}: {name}"
        assert set(names.expected()) <= set(shapes), role


@pytest.mark.parametrize("family", DRAFTED)
def test_the_drafts_tensors_are_its_own_and_its_copies_are_borrowed(family: str) -> None:
    target, draft = (names for _, names in runners(family, fused=False))
    prefix = f"model.layers.{mla_config(family)['num_hidden_layers']}"
    for name in (f"{prefix}.eh_proj.weight", f"{prefix}.self_attn.kv_b_proj.weight"):
        assert target.claim(name) == Elsewhere()
        assert isinstance(draft.claim(name), Place)
    assert isinstance(draft.claim(f"{prefix}.shared_head.head.weight"), Borrowed)
    assert draft.claim("model.layers.0.self_attn.kv_b_proj.weight") == Elsewhere()


@pytest.mark.parametrize("family", MLA_FAMILIES)
def test_dropping_any_attention_rule_is_seen(family: str) -> None:
    found = read(family)
    arranged = layout(found.spec, family, fused=False)
    rules, table = list(found.weights(found.spec, arranged)), decoder_parameters(found.spec, arranged)
    loads = [rule for rule in rules if ".self_attn." in rule.source and rule.fills]
    assert len(loads) >= 5
    for dropped in loads:
        names = NameMap(rule for rule in rules if rule is not dropped)
        with pytest.raises(WeightError, match="not filled"):
            names.check(table)


@pytest.mark.parametrize(
    ("family", "stored", "first", "end"),
    [
        ("deepseek_v3", "q_a_proj", 0, 32),
        ("deepseek_v3", "kv_a_proj_with_mqa", 32, 72),
        ("deepseek_v2_lite", "q_proj", 0, 96),
        ("deepseek_v2_lite", "kv_a_proj_with_mqa", 96, 136),
    ],
)
def test_the_first_projections_lie_in_one_parameter_queries_first(
    family: str, stored: str, first: int, end: int
) -> None:
    (_, names), *_ = runners(family, fused=False)
    claim = names.claim(f"model.layers.1.self_attn.{stored}.weight")
    assert isinstance(claim, Place)
    assert claim.fills == (Fill(parameter="layers.1.attn.qkv_a.weight", rows=(first, end)),)


def test_a_layer_that_takes_over_a_selection_has_no_indexer_tensors() -> None:
    (_, names), *_ = runners("glm_moe_dsa", fused=False)
    assert isinstance(names.claim("model.layers.2.self_attn.indexer.wk.weight"), Place)
    assert isinstance(names.claim("model.layers.1.self_attn.indexer.wk.weight"), Unknown)


def test_matrices_may_be_stored_with_scales_and_norms_may_not() -> None:
    (_, names), *_ = runners("deepseek_v32", fused=False)
    scaled = names.claim("model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv")
    assert isinstance(scaled, Place) and scaled.group == "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    assert isinstance(names.claim("model.layers.0.self_attn.kv_a_layernorm.weight_scale_inv"), Unknown)
