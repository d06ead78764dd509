"""The tables of `explain --families`, and the audit that no draft can be asked less than its target (F12-F18)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from proa.arch.decoder import DecoderSpec, DraftSpec
from proa.arch.family import BundledDraft
from proa.arch.registry import FAMILIES, Reading, read_config
from proa.arch.wrappers import WRAPPERS
from proa.checkpoint.open import open_checkpoint
from proa.plan.families import families_json, families_table, pairs, runner_knobs, unasked
from proa.plan.rules.moe import FUSION
from proa.units import Algorithm
from tests.factories.headers import planned
from tests.plan.expert_headers import NEXTN_FAMILIES, write_experts


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    return {family: write_experts(root / family, family) for family in NEXTN_FAMILIES}


def reading(path: Path) -> Reading:
    return read_config(open_checkpoint(path).config)


def test_every_target_entry_is_listed_with_its_drafts_and_the_decisions_that_each_answers() -> None:
    listed = families_json(FAMILIES)
    assert [entry["family"] for entry in listed if "family" in entry] == [family.name for family in FAMILIES]
    assert [entry["wrapper"] for entry in listed if "wrapper" in entry] == [w.architectures[0] for w in WRAPPERS]
    own = {entry["family"]: entry for entry in listed if "family" in entry}
    assert own["llama"]["drafts"] == ["standalone", "ngram"]
    assert own["glm4_moe"]["drafts"] == ["nextn", "standalone", "ngram"]
    assert own["glm4_moe"]["bundled"][0]["draft"] == "glm4_moe/nextn"
    assert all(entry["decisions"] == list(runner_knobs()) for entry in listed)


def test_the_text_names_every_entry_and_every_pair() -> None:
    text = families_table(FAMILIES)
    for family in FAMILIES:
        assert f"{family.name}  ({', '.join(family.architectures)})" in text
    for wrapper in WRAPPERS:
        assert f"{wrapper.architectures[0]}" in text
    assert {pair.target for pair in pairs(FAMILIES)} >= set(NEXTN_FAMILIES)
    assert all(f"{family}/nextn  the same questions" in text for family in NEXTN_FAMILIES)


def test_the_knobs_are_those_of_a_plan(models: dict[str, Path]) -> None:
    assert set(runner_knobs()) == set(planned(models["glm4_moe"]).plans.target.decisions())


@pytest.mark.parametrize("family", NEXTN_FAMILIES)
def test_f18_a_draft_is_asked_every_question_of_its_target(models: dict[str, Path], family: str) -> None:
    resolved = planned(models[family], speculative="nextn")
    assert resolved.draft is not None
    target, draft = (one.plan.shared_experts for one in resolved.runners)
    assert [c.condition for c in draft.checked] == [c.condition for c in target.checked] == [c.id for c in FUSION]
    read = reading(models[family])
    assert list(unasked(read.spec, read.drafts[Algorithm.NEXTN])) == []


def without_shared(draft: DraftSpec) -> DecoderSpec:
    (layer,) = draft.decoder.layers
    plain: Any = replace(layer.ffn, shared=None)  # type: ignore[arg-type]  # an MoE layer, as the test above shows
    return replace(draft.decoder, layers=(replace(layer, ffn=plain),))


@pytest.mark.parametrize("family", NEXTN_FAMILIES)
def test_f18_a_draft_that_misses_the_question_is_named(models: dict[str, Path], family: str) -> None:
    read = reading(models[family])
    draft = read.drafts[Algorithm.NEXTN]
    layer = draft.decoder.layers[0].index
    (missing,) = unasked(read.spec, replace(draft, decoder=without_shared(draft)))
    assert f"layer {layer} of the draft" in missing
    (foreign,) = unasked(read.spec, replace(draft, decoder=replace(draft.decoder, family="llama")))
    assert "llama" in foreign


def test_f18_a_draft_cannot_be_registered_without_its_derivation_from_a_target() -> None:
    with pytest.raises(TypeError, match="derive"):
        BundledDraft(weights=FAMILIES[0].weights)  # type: ignore[call-arg]  # what the test is about
