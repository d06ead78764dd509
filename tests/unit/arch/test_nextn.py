"""The bundled draft layer: derived from its target's last layer, with rules of its own and copies that are compared."""

from __future__ import annotations

from typing import Any

import pytest

from proa.arch import nextn
from proa.arch.decoder import Borrow, DecoderSpec, DraftSpec, TapPoint
from proa.arch.parameters import decoder_parameters
from proa.arch.registry import read_config
from proa.arch.weights import Action, Borrowed, Elsewhere, Fill, NameMap, Place, Unknown
from proa.checkpoint.hf_config import HFView
from proa.errors import ConfigError, WeightError
from proa.units import Algorithm
from tests.factories.checkpoints import tensor_shapes, tiny_config
from tests.factories.layouts import layout_of
from tests.factories.moe_checkpoints import stacked_shapes


def parsed(**overrides: Any) -> tuple[dict[str, Any], DecoderSpec, DraftSpec]:
    config = tiny_config("glm4_moe", **overrides)
    reading = read_config(HFView(config, where="config.json"))
    return config, reading.spec, reading.drafts[Algorithm.NEXTN]


def test_the_draft_has_its_targets_last_layer_behind_it_and_borrows_embedding_and_head() -> None:
    _, target, draft = parsed()
    decoder = draft.decoder
    assert (draft.algorithm, [layer.index for layer in decoder.layers]) == (Algorithm.NEXTN, [3])
    assert (decoder.layers[0].mixer, decoder.layers[0].ffn) == (target.layers[-1].mixer, target.layers[-1].ffn)
    assert decoder.borrows == (Borrow.EMBED, Borrow.HEAD)
    assert decoder.entry is not None and decoder.entry.norm == target.final_norm
    assert (decoder.vocab, decoder.hidden, decoder.max_positions) == (target.vocab, target.hidden, target.max_positions)
    assert [(tap.point, tap.width) for tap in draft.taps] == [(TapPoint.NORMED, 64)]


def test_no_announced_layer_is_no_draft() -> None:
    config = HFView(tiny_config("glm4_moe", num_nextn_predict_layers=0), where="config.json")
    assert dict(read_config(config).drafts) == {}


@pytest.mark.parametrize("overrides", [{"num_nextn_predict_layers": 2}, {"num_nextn_predict_layers": -1}])
def test_another_number_of_draft_layers_is_refused_by_name(overrides: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="num_nextn_predict_layers") as caught:
        parsed(**overrides)
    assert caught.value.slug == "config/unimplemented"


def test_a_draft_layer_behind_layers_without_experts_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="the last layer has no experts"):
        parsed(first_k_dense_replace=3)


@pytest.mark.parametrize("files", ["listed", "stacked"])
@pytest.mark.parametrize("fused", [False, True])
def test_target_and_draft_claim_every_tensor_of_the_checkpoint_once(fused: bool, files: str) -> None:
    config, target, draft = parsed()
    reading = read_config(HFView(config, where="config.json"))
    stored = dict(tensor_shapes(config))
    stored = stacked_shapes(stored) if files == "stacked" else stored
    chosen: Any = {"fused": None if fused else (), "stacked": range(4) if files == "stacked" else ()}
    own, other = layout_of(target, **chosen), layout_of(draft.decoder, **chosen)
    draft_names = NameMap(nextn.nextn_rules(draft.decoder, other))
    target_names = NameMap(reading.weights(target, own))
    draft_names.check(decoder_parameters(draft.decoder, other))
    for name, shape in stored.items():
        claims = (target_names.claim(name), draft_names.claim(name))
        owned = [claim for claim in claims if not isinstance(claim, Unknown)]
        assert len(owned) == 1, name
        assert isinstance(owned[0], Place | Borrowed) and owned[0].shape == shape
    both = {**target_names.expected(), **draft_names.expected()}
    copies = {"model.layers.3.embed_tokens.weight", "model.layers.3.shared_head.head.weight"}
    assert set(both) | copies == set(stored)
    assert target_names.beside(draft_names).claim("model.layers.3.enorm.weight") == Elsewhere()


def test_the_target_and_its_draft_may_have_different_layouts() -> None:
    _, target, draft = parsed()
    fused, separate = layout_of(draft.decoder, fused=None), layout_of(draft.decoder, fused=())
    shared = "model.layers.3.mlp.shared_experts.down_proj.weight"
    slots = NameMap(nextn.nextn_rules(draft.decoder, fused)).claim(shared)
    own = NameMap(nextn.nextn_rules(draft.decoder, separate)).claim(shared)
    assert isinstance(slots, Place) and isinstance(own, Place)
    assert (slots.is_shared_slot, slots.fills[0].parameter) == (True, "layers.3.ffn.experts.down")
    assert (own.is_shared_slot, own.fills[0].parameter) == (False, "layers.3.ffn.shared.down.weight")


def test_the_entry_reads_the_embedding_first_and_the_copies_are_compared() -> None:
    _, _, draft = parsed()
    names = NameMap(nextn.nextn_rules(draft.decoder, layout_of(draft.decoder, fused=())))
    projection = names.claim("model.layers.3.eh_proj.weight")
    assert isinstance(projection, Place)
    assert (projection.shape, projection.fills) == ((64, 128), (Fill(parameter="entry.proj.weight"),))
    places = {name: names.claim(f"model.layers.3.{name}.weight") for name in ("enorm", "hnorm", "shared_head.norm")}
    assert {name: claim.fills[0].parameter for name, claim in places.items() if isinstance(claim, Place)} == {
        "enorm": "entry.embed_norm.weight", "hnorm": "entry.hidden_norm.weight", "shared_head.norm": "norm.weight",
    }  # fmt: skip
    copies = [names.claim(f"model.layers.3.{name}.weight") for name in ("embed_tokens", "shared_head.head")]
    assert [claim.parameter for claim in copies if isinstance(claim, Borrowed)] == ["embed.weight", "head.weight"]


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.2.enorm.weight",
        "model.layers.4.enorm.weight",
        "model.layers.3.enorm.bias",
        "model.layers.3.eh_proj.bias",
        "model.layers.3.mlp.experts.8.up_proj.weight",
        "model.layers.3.stray.weight",
    ],
)
def test_a_stray_name_under_the_draft_is_unknown(name: str) -> None:
    _, _, draft = parsed()
    names = NameMap(nextn.nextn_rules(draft.decoder, layout_of(draft.decoder, fused=())))
    assert isinstance(names.claim(name), Unknown)


def test_dropping_any_rule_of_the_draft_is_named_by_the_partition_check() -> None:
    _, _, draft = parsed()
    layout = layout_of(draft.decoder, fused=None)
    rules = list(nextn.nextn_rules(draft.decoder, layout))
    for dropped in (rule for rule in rules if rule.action is Action.LOAD):
        with pytest.raises(WeightError) as caught:
            NameMap(rule for rule in rules if rule is not dropped).check(decoder_parameters(draft.decoder, layout))
        assert caught.value.slug == "weights/partition"
