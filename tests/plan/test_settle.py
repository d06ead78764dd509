"""The shape that all rules share: what an ask and `auto` do with conditions that block always, or steer auto only."""

from __future__ import annotations

from typing import Any

import pytest

from proa.choice import AUTO, Choice, Origin, OriginSource
from proa.conditions import Blocked, Blocks, Condition, FactView, Source
from proa.errors import KernelUnavailable, PlanError
from proa.plan.rules.settle import Knob, Option, names_role, settle


def condition(name: str, blocks: Blocks, fact: str, source: Source = Source.HARDWARE) -> Condition:
    def check(facts: FactView) -> Blocked | None:
        return Blocked(f"{name} says no", source) if facts[fact] else None

    return Condition(id=name, reads=(fact,), blocks=blocks, check=check)


HARD = condition("hard", Blocks.ALWAYS, "bad")
SOFT = condition("soft", Blocks.AUTO, "poor")
BEST = Option(value="best", rule="r.best", reason="it is best", source=Source.DEFAULT, requires=(SOFT, HARD))
PLAIN = Option(value="plain", rule="r.plain", reason="always there", source=Source.DEFAULT)
FINE: dict[str, Any] = {"bad": False, "poor": False, "caps.device": "cpu", "caps.isa": ["avx2"]}


def ask(value: str, where: str = "--knob") -> Choice[str]:
    return Choice(value=value, origin=Origin(source=OriginSource.FLAG, where=where))


def knob(choice: Choice[str], *, is_capability: bool = False) -> Knob[str]:
    return Knob(name="knob", role=None, ask=choice, is_capability=is_capability)


def test_auto_takes_the_first_option_that_nothing_blocks() -> None:
    decision = settle(knob(AUTO), FINE, (BEST, PLAIN))
    assert (decision.value, decision.rule, decision.reason, decision.rejected) == ("best", "r.best", "it is best", ())
    assert decision.inputs == {"bad": False, "poor": False}


def test_auto_passes_over_a_blocked_option_with_the_first_blocker_as_reason_and_all_in_rejected() -> None:
    decision = settle(knob(AUTO), FINE | {"bad": True, "poor": True}, (BEST, PLAIN))
    assert (decision.value, decision.rule, decision.reason) == ("plain", "hard", "hard says no")
    assert [(r.value, r.rule) for r in decision.rejected] == [("best", "hard"), ("best", "soft")]
    assert decision.source is Source.HARDWARE


def test_an_ask_overrides_a_condition_that_only_steers_auto_and_keeps_it_as_a_note() -> None:
    decision = settle(knob(ask("best")), FINE | {"poor": True}, (BEST, PLAIN))
    assert (decision.value, decision.source, decision.reason) == ("best", Source.ASKED, "asked")
    assert [(n.condition, n.reason) for n in decision.notes] == [("soft", "soft says no")]


def test_an_ask_against_a_condition_that_blocks_always_is_an_error_with_every_blocker_and_what_works() -> None:
    with pytest.raises(PlanError) as caught:
        settle(knob(ask("best")), FINE | {"bad": True, "poor": True}, (BEST, PLAIN))
    text = str(caught.value)
    assert caught.value.slug == "plan/refused" and not isinstance(caught.value, KernelUnavailable)
    assert "knob = best was asked for (--knob) but cannot be." in text
    assert "hard says no" in text and "soft says no" in text and "can be: plain." in text


def test_a_capability_that_is_lacking_is_exit_code_4_and_says_what_the_host_has() -> None:
    with pytest.raises(KernelUnavailable, match="have: cpu, avx2") as caught:
        settle(knob(ask("best"), is_capability=True), FINE | {"bad": True}, (BEST, PLAIN))
    assert caught.value.exit_code == 4 and "can run: plain." in str(caught.value)


def test_an_ask_reads_the_facts_of_its_own_option_only() -> None:
    decision = settle(knob(ask("plain")), FINE | {"bad": True, "poor": True}, (BEST, PLAIN))
    assert (decision.value, decision.inputs, decision.notes, decision.checked) == ("plain", {}, (), ())


def test_every_condition_that_was_asked_is_kept_with_its_facts_also_those_that_hold() -> None:
    decision = settle(knob(AUTO), FINE | {"poor": True}, (BEST, PLAIN))
    assert [(c.condition, c.blocks, c.reason, dict(c.inputs)) for c in decision.checked] == [
        ("hard", Blocks.ALWAYS, None, {"bad": False}),
        ("soft", Blocks.AUTO, "soft says no", {"poor": True}),
    ]


def test_a_condition_cannot_read_a_fact_that_it_does_not_declare() -> None:
    sly = Condition(id="sly", reads=(), blocks=Blocks.AUTO, check=HARD.check)
    option = Option(value="sly", rule="r", reason="", source=Source.DEFAULT, requires=(sly,))
    with pytest.raises(KeyError, match="bad"):
        settle(knob(AUTO), FINE, (option, PLAIN))


def test_a_value_that_no_option_has_is_an_error_naming_the_known_ones() -> None:
    with pytest.raises(PlanError, match="known: best, plain") as caught:
        settle(knob(ask("other")), FINE, (BEST, PLAIN))
    assert caught.value.slug == "plan/unknown-value"


@pytest.mark.parametrize(
    ("where", "names"),
    [
        ("--draft.dtype", True),
        ("--target.attention.decode", True),
        ("PROA_DRAFT__DTYPE", True),
        ("run.toml: draft.dtype", True),
        ("draft_dtype", True),
        ("draft.dtype", True),
        ("--dtype", False),
        ("PROA_DTYPE", False),
        ("draft.toml: dtype", False),
        ("draft-models/run.toml: linear_attention.decode", False),
        ("", False),
    ],
)
def test_an_ask_names_a_runner_by_its_spelling_not_by_the_file_it_lies_in(where: str, names: bool) -> None:
    assert names_role(ask("x", where)) is names
