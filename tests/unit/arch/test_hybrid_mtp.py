"""The draft layer that Qwen's hybrids bundle: a layer of full attention, with names and norms of its own."""

from __future__ import annotations

from typing import Any

import pytest

from proa.arch.blocks import AttentionSpec, FFNSpec, MoESpec
from proa.arch.decoder import Borrow, DecoderSpec, DraftSpec, TapPoint
from proa.arch.parameters import decoder_parameters
from proa.arch.registry import Reading, read_config
from proa.arch.weights import Action, NameMap, Place, Unknown
from proa.checkpoint.hf_config import HFView
from proa.errors import ConfigError, WeightError
from proa.units import Algorithm
from tests.factories.hybrid_checkpoints import HYBRID_FAMILIES, hybrid_config
from tests.factories.layouts import layout_of

QWEN = tuple(family for family in HYBRID_FAMILIES if family != "kimi_linear")


def read(family: str, **overrides: Any) -> Reading:
    return read_config(HFView(hybrid_config(family, **overrides), where="config.json"))


def draft_of(family: str, **overrides: Any) -> tuple[DecoderSpec, DraftSpec]:
    found = read(family, **overrides)
    return found.spec, found.drafts[Algorithm.NEXTN]


def names_of(family: str, *, fused: Any = (), stacked: Any = ()) -> NameMap:
    found = read(family)
    decoder = found.drafts[Algorithm.NEXTN].decoder
    arranged = layout_of(decoder, fused=fused, stacked=stacked)
    names = NameMap(found.family.drafts[Algorithm.NEXTN].weights(decoder, arranged))
    names.check(decoder_parameters(decoder, arranged))
    return names


@pytest.mark.parametrize("family", QWEN)
def test_the_draft_is_one_layer_of_full_attention_that_borrows_embedding_and_head(family: str) -> None:
    target, draft = draft_of(family)
    decoder = draft.decoder
    assert draft.algorithm is Algorithm.NEXTN
    assert [layer.index for layer in decoder.layers] == [0]
    assert isinstance(decoder.layers[0].mixer, AttentionSpec) and decoder.layers[0].mixer == target.layers[3].mixer
    assert decoder.layers[0].ffn == target.layers[3].ffn
    assert (decoder.delta_layers, decoder.borrows) == ((), (Borrow.EMBED, Borrow.HEAD))
    assert [(tap.point, tap.width) for tap in draft.taps] == [(TapPoint.NORMED, 64)]


@pytest.mark.parametrize("family", QWEN)
def test_all_norms_of_the_draft_lack_one(family: str) -> None:
    decoder = draft_of(family)[1].decoder
    assert decoder.entry is not None
    assert {decoder.entry.norm.offset, decoder.final_norm.offset, decoder.layers[0].norm.offset} == {1.0}
    assert decoder.layers[0].mixer.qk_norm is not None if isinstance(decoder.layers[0].mixer, AttentionSpec) else False


def test_the_draft_has_experts_or_an_mlp_as_its_target_has() -> None:
    assert isinstance(draft_of("qwen3_5")[1].decoder.layers[0].ffn, FFNSpec)
    assert isinstance(draft_of("qwen3_5_moe")[1].decoder.layers[0].ffn, MoESpec)
    _, beside_a_dense_layer = draft_of("qwen3_next", mlp_only_layers=[3])
    assert isinstance(beside_a_dense_layer.decoder.layers[0].ffn, MoESpec)


def test_qwen3_next_has_a_draft_that_its_config_does_not_name() -> None:
    assert "mtp_num_hidden_layers" not in hybrid_config("qwen3_next")
    assert Algorithm.NEXTN in read("qwen3_next").drafts


@pytest.mark.parametrize("family", QWEN)
def test_no_draft_is_announced_by_zero_layers_or_without_full_attention(family: str) -> None:
    assert dict(read(family, mtp_num_hidden_layers=0).drafts) == {}
    assert dict(read(family, layer_types=["linear_attention"] * 4).drafts) == {}


def test_kimi_linear_bundles_no_draft() -> None:
    assert dict(read("kimi_linear").drafts) == {}


@pytest.mark.parametrize(
    ("key", "value"),
    [("mtp_num_hidden_layers", 2), ("mtp_num_hidden_layers", -1), ("mtp_use_dedicated_embeddings", True)],
)
def test_more_layers_or_an_embedding_of_its_own_are_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=key) as caught:
        read("qwen3_5", **{key: value})
    assert caught.value.slug == "config/unimplemented"


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_text", "qwen3_next"])
def test_outer_tensors_fill_the_entry_and_the_norm_in_and_outside_a_wrapper(family: str) -> None:
    names = names_of(family)
    filled = {}
    for stored in ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        claim = names.claim(f"mtp.{stored}.weight")
        assert isinstance(claim, Place)
        filled[stored] = (claim.fills[0].parameter, claim.shape, claim.is_linear)
    assert filled == {
        "fc": ("entry.proj.weight", (64, 128), True),
        "pre_fc_norm_embedding": ("entry.embed_norm.weight", (64,), False),
        "pre_fc_norm_hidden": ("entry.hidden_norm.weight", (64,), False),
        "norm": ("norm.weight", (64,), False),
    }
    claim = names.claim("mtp.layers.0.self_attn.o_proj.weight")
    assert isinstance(claim, Place) and claim.fills[0].parameter == "layers.0.attn.o.weight"


@pytest.mark.parametrize("stacked", [(), (0,)])
@pytest.mark.parametrize("fused", [(), None])
def test_the_drafts_experts_may_be_stored_and_laid_out_in_every_way(stacked: Any, fused: Any) -> None:
    names = names_of("qwen3_5_moe", stacked=stacked, fused=fused)
    is_listed = isinstance(names.claim("mtp.layers.0.mlp.experts.7.up_proj.weight"), Place)
    assert is_listed == (not stacked)
    assert isinstance(names.claim("mtp.layers.0.mlp.experts.gate_up_proj"), Place) == bool(stacked)
    shared = names.claim("mtp.layers.0.mlp.shared_expert.up_proj.weight")
    assert isinstance(shared, Place) and shared.is_shared_slot == (fused is None)


@pytest.mark.parametrize(
    "name",
    [
        "mtp.layers.1.input_layernorm.weight",
        "mtp.layers.0.linear_attn.in_proj_ba.weight",
        "mtp.embed_tokens.weight",
        "mtp.fc.bias",
        "model.layers.0.input_layernorm.weight",
        "model.mtp.norm.weight",
    ],
)
def test_a_stray_name_beside_the_draft_is_unknown(name: str) -> None:
    assert isinstance(names_of("qwen3_next").claim(name), Unknown)


def test_dropping_any_rule_of_the_draft_is_named_by_the_partition_check() -> None:
    found = read("qwen3_next")
    decoder = found.drafts[Algorithm.NEXTN].decoder
    arranged = layout_of(decoder, fused=None)
    rules = list(found.family.drafts[Algorithm.NEXTN].weights(decoder, arranged))
    for dropped in (rule for rule in rules if rule.action is Action.LOAD):
        with pytest.raises(WeightError) as caught:
            NameMap(rule for rule in rules if rule is not dropped).check(decoder_parameters(decoder, arranged))
        assert caught.value.slug == "weights/partition"
