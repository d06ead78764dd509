"""Whether prompts that begin alike are computed once: the decision, its reasons and its notes."""

from __future__ import annotations

from pathlib import Path

import pytest

from proa.conditions import Source
from proa.errors import ConfigError
from proa.plan.decision import Decision
from proa.plan.explain import explain_json
from proa.plan.rules import schedule
from proa.units import Numerics, Switch
from tests.factories.headers import LAPTOP, planned, write_headers, write_tiny_headers
from tests.factories.hybrid_checkpoints import hybrid_config, hybrid_shapes


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_headers(tmp_path_factory.mktemp("prefix") / "dense", "llama")


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = hybrid_config("qwen3_next")
    return write_headers(tmp_path_factory.mktemp("prefix") / "hybrid", config, shapes=hybrid_shapes(config))


def decision(path: Path, **settings: object) -> Decision[Switch]:
    return planned(path, **settings).plans.schedule.prefix_cache


def test_it_is_on_unless_it_was_asked_off(dense: Path, hybrid: Path) -> None:
    for path in (dense, hybrid):
        found = decision(path)
        assert (found.value, found.source, found.rule) == (Switch.ON, Source.DEFAULT, "prefix_cache.on")
        asked = decision(path, prefix_cache="off")
        assert (asked.value, asked.source, asked.notes) == (Switch.OFF, Source.ASKED, ())


def test_where_numerics_are_fast_a_note_says_what_a_hit_may_change(dense: Path) -> None:
    for ask in ({}, {"prefix_cache": "on"}):
        found = decision(dense, numerics="fast", **ask)
        assert found.value is Switch.ON
        [note] = found.notes
        assert note.condition == "prefix_cache.exact"
        assert "--numerics exact" in note.reason
        assert found.inputs["target.numerics"].value == "fast"


def test_where_they_are_exact_there_is_nothing_to_note(dense: Path) -> None:
    facts = {"target.numerics": Numerics.EXACT, "target.linear_layers": 0, "asked.snapshots": None}
    found = schedule.prefix_cache(planned(dense).plans.schedule.prefix_cache.requested, facts)
    assert (found.value, found.notes) == (Switch.ON, ())
    assert "target.numerics" not in found.inputs


def test_linear_attention_without_snapshots_has_nothing_to_go_on_from(dense: Path, hybrid: Path) -> None:
    found = decision(hybrid, snapshots=0)
    assert (found.value, found.source, found.rule) == (Switch.OFF, Source.CONSTRAINT, "prefix_cache.snapshots")
    assert "--snapshots" in found.reason
    assert [rejected.value for rejected in found.rejected] == [Switch.ON]
    assert decision(hybrid, snapshots=1).value is Switch.ON
    assert decision(dense, snapshots=0).value is Switch.ON


def test_an_ask_for_it_is_taken_all_the_same_with_a_note(hybrid: Path) -> None:
    found = decision(hybrid, snapshots=0, prefix_cache="on")
    assert (found.value, found.source) == (Switch.ON, Source.ASKED)
    assert "prefix_cache.snapshots" in [note.condition for note in found.notes]


def test_it_is_told_and_part_of_the_plans_digest(dense: Path) -> None:
    on, off = (planned(dense, prefix_cache=switch, caps=LAPTOP).plans for switch in ("on", "off"))
    assert explain_json(off, {})["engine"]["prefix_cache"]["value"] == "off"
    assert on.digest != off.digest
    assert on.target.digest == off.target.digest


def test_another_word_is_refused_with_the_choices(dense: Path) -> None:
    with pytest.raises(ConfigError, match=r"on"):
        decision(dense, prefix_cache="maybe")
