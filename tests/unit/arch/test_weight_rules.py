"""The weight rules of dense decoders: they partition the parameters, and dropping or shifting any of them is seen."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from proa.arch.common import decoder_rules
from proa.arch.decoder import DecoderSpec
from proa.arch.layout import WeightLayout
from proa.arch.parameters import decoder_parameters
from proa.arch.registry import read_config
from proa.arch.weights import Action, Fill, LeftOut, NameMap, Place, Tied, Unknown, WeightRule
from proa.checkpoint.hf_config import HFView
from proa.errors import WeightError
from tests.factories.checkpoints import FAMILIES, tensor_shapes, tiny_config

OWN, TIED = WeightLayout(tied_head=False), WeightLayout(tied_head=True)
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in FAMILIES),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("qwen3", {"attention_bias": True}),
]


def spec_of(family: str, **overrides: Any) -> DecoderSpec:
    return read_config(HFView(tiny_config(family, **overrides), where="config.json")).spec


@pytest.mark.parametrize(("variant", "layout"), list(product(VARIANTS, (OWN, TIED))))
def test_the_rules_fill_every_parameter_exactly_once(variant: tuple[str, dict[str, Any]], layout: WeightLayout) -> None:
    spec = spec_of(variant[0], **variant[1])
    NameMap(decoder_rules(spec, layout)).check(decoder_parameters(spec, layout))


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_tensor_of_a_hub_checkpoint_has_a_place_of_its_shape(variant: tuple[str, dict[str, Any]]) -> None:
    config = tiny_config(variant[0], **variant[1])
    spec = spec_of(variant[0], **variant[1])
    names = NameMap(decoder_rules(spec, WeightLayout(tied_head=config["tie_word_embeddings"])))
    stored = dict(tensor_shapes(config))
    claims = {name: names.claim(name) for name in stored}
    assert {name: claim.shape for name, claim in claims.items() if isinstance(claim, Place)} == stored
    assert set(names.expected()) == set(stored)


@pytest.mark.parametrize("family", FAMILIES)
def test_dropping_any_rule_is_named_by_the_partition_check(family: str) -> None:
    spec = spec_of(family)
    rules = list(decoder_rules(spec, OWN))
    for dropped in (rule for rule in rules if rule.action is Action.LOAD):
        kept = NameMap(rule for rule in rules if rule is not dropped)
        parameter = dropped.fills[0].parameter.replace("#", "0").replace(".", r"\.")
        with pytest.raises(WeightError, match=parameter) as caught:
            kept.check(decoder_parameters(spec, OWN))
        assert caught.value.slug == "weights/partition"


def test_a_rule_shifted_by_one_row_is_named_by_the_partition_check() -> None:
    spec = spec_of("llama")

    def shifted(rule: WeightRule) -> WeightRule:
        start, stop = rule.fills[0].rows or (0, 0)
        return replace(rule, fills=(rule.fills[0]._replace(rows=(start + 1, stop + 1)),))

    rules = [shifted(rule) if "k_proj" in rule.source else rule for rule in decoder_rules(spec, OWN)]
    with pytest.raises(WeightError, match=r"attn\.qkv\.weight"):
        NameMap(rules).check(decoder_parameters(spec, OWN))


def test_q_k_and_v_lie_in_this_order_and_gate_before_up() -> None:
    names = NameMap(decoder_rules(spec_of("llama"), OWN))
    rows = {}
    for part in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        claim = names.claim(f"model.layers.2.{part}.weight")
        assert isinstance(claim, Place)
        rows[part] = (claim.fills[0].parameter, claim.fills[0].rows)
    assert rows == {
        "self_attn.q_proj": ("layers.2.attn.qkv.weight", (0, 64)),
        "self_attn.k_proj": ("layers.2.attn.qkv.weight", (64, 96)),
        "self_attn.v_proj": ("layers.2.attn.qkv.weight", (96, 128)),
        "mlp.gate_proj": ("layers.2.ffn.gate_up.weight", (0, 128)),
        "mlp.up_proj": ("layers.2.ffn.gate_up.weight", (128, 256)),
    }


def test_a_stored_head_is_compared_in_a_tied_layout_and_loaded_in_the_other() -> None:
    spec = spec_of("llama")
    tied = NameMap(decoder_rules(spec, TIED)).claim("lm_head.weight")
    own = NameMap(decoder_rules(spec, OWN)).claim("lm_head.weight")
    assert isinstance(tied, Tied) and tied.parameter == "embed.weight"
    assert isinstance(own, Place) and own.fills == (Fill(parameter="head.weight"),)


@pytest.mark.parametrize("name", ["model.layers.1.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"])
def test_stored_rope_frequencies_are_left_out_with_a_reason(name: str) -> None:
    claim = NameMap(decoder_rules(spec_of("llama"), OWN)).claim(name)
    assert isinstance(claim, LeftOut) and "computed from the config" in claim.reason


def test_gguf_rope_factors_have_a_place_when_the_config_says_factors() -> None:
    spec = spec_of("llama", rope_scaling={"rope_type": "factors"})
    names = NameMap(decoder_rules(spec, OWN))
    claim = names.claim("rope_freqs.weight")
    assert isinstance(claim, Place) and (claim.fills, claim.shape) == ((Fill(parameter="rope.factors"),), (8,))
    names.check(decoder_parameters(spec, OWN))
    assert isinstance(NameMap(decoder_rules(spec_of("llama"), OWN)).claim("rope_freqs.weight"), Unknown)


@pytest.mark.parametrize(
    "name",
    ["model.layers.3.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.bias", "model.layers.00.mlp.up_proj.weight"],
)
def test_a_layer_too_many_or_a_bias_that_is_not_there_is_unknown(name: str) -> None:
    claim = NameMap(decoder_rules(spec_of("llama"), OWN)).claim(name)
    assert isinstance(claim, Unknown)


def test_an_unknown_name_comes_with_the_nearest_expected_ones_of_its_layer() -> None:
    claim = NameMap(decoder_rules(spec_of("llama"), OWN)).claim("model.layers.1.self_attn.q_prj.weight")
    assert isinstance(claim, Unknown) and claim.nearest[0] == "model.layers.1.self_attn.q_proj.weight"


def test_two_rules_for_one_name_are_refused() -> None:
    rules = list(decoder_rules(spec_of("llama"), OWN))
    with pytest.raises(WeightError, match=r"embed_tokens") as caught:
        NameMap([*rules, rules[0]])
    assert caught.value.slug == "weights/rule-clash"


def test_allowed_names_are_left_out_and_others_stay_unknown() -> None:
    names = NameMap(decoder_rules(spec_of("llama"), OWN)).allowing({"extra.a": "extra.*"})
    allowed = names.claim("extra.a")
    assert isinstance(allowed, LeftOut) and (allowed.template, allowed.reason) == (
        "extra.*", "allowed by --allow-unexpected",
    )  # fmt: skip
    assert isinstance(names.claim("extra.b"), Unknown)
