"""Whether and how proposals are made, how many tokens each has, how they are verified."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any

from proa.choice import Choice
from proa.conditions import Blocked, Blocks, Condition, FactView, Source
from proa.config.intent import RunnerIntent, SpeculativeIntent
from proa.errors import PlanError
from proa.plan.decision import Decision, Note
from proa.plan.rules.settle import Knob, Option, names_role, settle, show, spelled
from proa.units import Algorithm, Verification

MEASURED = "at most; the length of each step follows from measured costs and acceptance, 0 included"
LENGTHS: Mapping[Algorithm, tuple[int, str]] = MappingProxyType(
    {
        Algorithm.STANDALONE: (
            7,
            f"{MEASURED}; each proposed token costs a pass of the draft, and later ones are accepted less often",
        ),
        Algorithm.NGRAM: (
            15,
            f"{MEASURED}; proposals cost nothing to make, and 16 rows still share one pass over the weights",
        ),
        Algorithm.NEXTN: (
            3,
            f"{MEASURED}; each proposed token costs a pass of one layer, which was trained for the first of them",
        ),
    }
)


def _has_draft(facts: FactView) -> Blocked | None:
    return None if facts["draft.given"] else Blocked("no draft checkpoint was given (--draft PATH)", Source.CONSTRAINT)


def _no_draft(facts: FactView) -> Blocked | None:
    given = facts["draft.given"]
    return Blocked("contradiction: a draft checkpoint was given (--draft) too", Source.CONSTRAINT) if given else None


def _no_dspark(facts: FactView) -> Blocked | None:
    keys = facts["bundle.dspark_keys"]
    if not keys:
        return None
    return Blocked(f"the checkpoint carries DSpark stages ({', '.join(keys)}), no nextn layer", Source.CHECKPOINT)


def _family_bundles(facts: FactView) -> Blocked | None:
    if Algorithm.NEXTN.value in facts["bundle.known"]:
        return None
    return Blocked(f"checkpoints of the {facts['bundle.family']} family bundle no nextn draft", Source.CHECKPOINT)


def _is_announced(facts: FactView) -> Blocked | None:
    word = Algorithm.NEXTN.value
    if word in facts["bundle.announced"] or word not in facts["bundle.known"]:
        return None
    return Blocked("config.json announces no nextn layer (num_nextn_predict_layers)", Source.CHECKPOINT)


def _is_stored(facts: FactView) -> Blocked | None:
    word = Algorithm.NEXTN.value
    if word in facts["bundle.stored"] or word not in facts["bundle.announced"]:
        return None
    return Blocked("no tensor of a nextn layer is stored; it was stripped from this checkpoint", Source.CHECKPOINT)


def _in_this_version(_: FactView) -> Blocked:
    return Blocked("not in this version of Proa; it comes later", Source.CONSTRAINT)


def _only_asked(_: FactView) -> Blocked:
    return Blocked("helps only where the answer repeats its context: only when asked for", Source.DEFAULT)


HAS_DRAFT = Condition(id="speculative.has_draft", reads=("draft.given",), blocks=Blocks.ALWAYS, check=_has_draft)
NO_DRAFT = Condition(id="speculative.no_draft", reads=("draft.given",), blocks=Blocks.ALWAYS, check=_no_draft)
LATER = Condition(id="speculative.later", reads=(), blocks=Blocks.ALWAYS, check=_in_this_version)
NEXTN = tuple(
    Condition(id=f"speculative.nextn.{name}", reads=reads, blocks=Blocks.ALWAYS, check=check)
    for name, reads, check in (
        ("dspark", ("bundle.dspark_keys",), _no_dspark),
        ("family", ("bundle.known", "bundle.family"), _family_bundles),
        ("announced", ("bundle.known", "bundle.announced"), _is_announced),
        ("stored", ("bundle.announced", "bundle.stored"), _is_stored),
    )
)
ASKED = Condition(id="speculative.only_asked", reads=(), blocks=Blocks.AUTO, check=_only_asked)

REQUIRES: Mapping[Algorithm, tuple[Condition, ...]] = MappingProxyType(
    {
        Algorithm.STANDALONE: (HAS_DRAFT,),
        Algorithm.NONE: (NO_DRAFT,),
        Algorithm.NGRAM: (NO_DRAFT, ASKED),
        Algorithm.NEXTN: NEXTN,
        **dict.fromkeys((Algorithm.EAGLE3, Algorithm.DFLASH, Algorithm.DSPARK), (LATER,)),
    }
)


def algorithm(ask: Choice[Algorithm], facts: Mapping[str, Any]) -> Decision[Algorithm]:
    """Standalone with a draft checkpoint, else none. Contradictions between the ask and the files are errors.

    A bundled draft is in `facts` as that of the draft checkpoint, where one was given, else of the target's.
    """
    options = [
        Option(
            value=value,
            rule=f"speculative.{value.value}",
            reason="a draft checkpoint was given" if value is Algorithm.STANDALONE else "as asked",
            source=Source.CHECKPOINT,
            requires=requires,
        )
        for value, requires in REQUIRES.items()
    ]
    decision = settle(Knob(name="speculative", role=None, ask=ask), facts, options)
    if not ask.is_auto or decision.value is not Algorithm.NONE or not facts["bundle.stored"]:
        return decision
    there = ", ".join(facts["bundle.stored"])
    offer = Note(condition="speculative.bundled", reason=f"the checkpoint bundles a draft: --speculative {there}")
    return replace(decision, notes=(*decision.notes, offer))


def num_draft_tokens(ask: Choice[int], chosen: Algorithm) -> Decision[int]:
    """Longest proposal per step; 0 is plain decoding. Left open, the length of each step is measured."""
    length, reason = LENGTHS[chosen]
    auto = Option(value=length, rule=f"num_draft_tokens.{chosen.value}", reason=reason, source=Source.DEFAULT)
    asked = Option(value=ask.value or 0, rule="", reason="", source=Source.ASKED)
    return settle(Knob(name="num_draft_tokens", role=None, ask=ask), {}, (auto,), asked=asked)


def verification(ask: Choice[Verification]) -> Decision[Verification]:
    """Coupled unless asked otherwise."""
    coupled = "token for token what plain decoding gives"
    options = (
        Option(value=Verification.COUPLED, rule="verification.coupled", reason=coupled, source=Source.DEFAULT),
        Option(value=Verification.REJECTION, rule="verification.rejection", reason="", source=Source.ASKED),
    )
    return settle(Knob(name="verification", role=None, ask=ask), {}, options)


def refuse_idle_asks(ask: SpeculativeIntent, chosen: Algorithm) -> None:
    """An ask for a proposal length with nothing that proposes is an error, unless `none` was asked for by name."""
    length = ask.num_draft_tokens
    if chosen is Algorithm.NONE and ask.algorithm.is_auto and length.value:
        raise PlanError(
            "plan/nothing-proposes",
            f"num_draft_tokens = {length.value} was asked for{spelled(length)}, but nothing proposes.",
            hint="--draft PATH for a draft model, or --speculative ngram, or nextn where the model has such a layer",
        )


def refuse_draft_asks(draft: RunnerIntent, chosen: Algorithm) -> None:
    """A setting that names the draft, without a draft runner, is an error; one that names no runner is the target's."""
    asked: tuple[tuple[str, Choice[Any]], ...] = tuple(
        (leaf.name, getattr(draft, leaf.name)) for leaf in fields(draft) if leaf.name != "path"
    )
    for name, choice in asked:
        if not choice.is_auto and names_role(choice):
            raise PlanError(
                "plan/no-draft-runner",
                f"{name} = {show(choice.value)} was asked for{spelled(choice)}, but there is no draft runner.",
                role="draft",
                facts=(f"speculative = {chosen.value}",),
                hint="--draft PATH, or --speculative nextn for a draft in the checkpoint",
            )
