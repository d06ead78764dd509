"""The shape that every rule shares: options with conditions, an ask, one Decision. Owns no knob and no condition.

A rule states its options in the order in which `auto` prefers them. An explicit ask looks at its own option only: a
blocked ALWAYS condition is an error, a blocked AUTO condition becomes a note. `auto` takes the first option that
nothing blocks and keeps what blocked the ones before it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, TypeVar, cast

from proa.choice import Choice
from proa.conditions import Blocks, Condition, Source, Verdict, evaluate
from proa.errors import KernelUnavailable, PlanError
from proa.plan.decision import Checked, Decision, Note, Rejected
from proa.units import Role

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


# No slots: on Python 3.11 a frozen dataclass with slots and Generic fails when subscripted.
@dataclass(frozen=True, kw_only=True)
class Option(Generic[T_co]):
    """One value that a knob may take. `rule` and `reason` are the decision's when nothing else explains it; `reads`
    names the facts from which the option itself was made."""

    value: T_co
    rule: str
    reason: str
    source: Source
    requires: tuple[Condition, ...] = ()
    reads: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Knob(Generic[T_co]):
    """What is being decided, for whom (None: both runners), and what was asked. `is_capability`: an ask that fails is
    a matter of this host and version (KernelUnavailable, exit 4), not of the request."""

    name: str
    role: Role | None
    ask: Choice[T_co]
    is_capability: bool = False


def settle(
    knob: Knob[T], facts: Mapping[str, Any], options: Sequence[Option[T]], *, asked: Option[T] | None = None
) -> Decision[T]:
    """One decision. `asked` is the option of an explicit ask where the options do not list every possible value."""
    if knob.ask.is_auto:
        return _auto(knob, facts, options)
    listed = next((option for option in options if option.value == knob.ask.value), asked)
    if listed is None:
        raise unknown_value(knob, [option.value for option in options])
    return _asked(knob, facts, listed, options)


def _auto(knob: Knob[T], facts: Mapping[str, Any], options: Sequence[Option[T]]) -> Decision[T]:
    verdicts: list[tuple[Option[T], Verdict]] = []
    for option in options:
        outcome = evaluate(option.requires, facts)
        verdicts += [(option, verdict) for verdict in outcome]
        if any(verdict.blocked for verdict in outcome):
            continue
        blockers = [(other, v.condition.id, v.blocked) for other, v in verdicts if v.blocked is not None]
        first = blockers[0] if blockers else None
        return Decision(
            knob=knob.name,
            value=option.value,
            requested=knob.ask,
            source=first[2].source if first else option.source,
            rule=first[1] if first else option.rule,
            reason=first[2].reason if first else option.reason,
            inputs=_inputs(facts, option, verdicts),
            rejected=tuple(Rejected(value=other.value, rule=rule, reason=b.reason) for other, rule, b in blockers),
            checked=_checked(verdicts),
        )
    raise _nothing_can(knob, verdicts)


def _asked(knob: Knob[T], facts: Mapping[str, Any], option: Option[T], options: Sequence[Option[T]]) -> Decision[T]:
    verdicts = [(option, verdict) for verdict in evaluate(option.requires, facts)]
    blocked = [v for _, v in verdicts if v.blocked is not None]
    if any(v.condition.blocks is Blocks.ALWAYS for v in blocked):
        raise _cannot(knob, facts, option, options)
    return Decision(
        knob=knob.name,
        value=option.value,
        requested=knob.ask,
        source=Source.ASKED,
        rule=f"{knob.name}.asked",
        reason="asked",
        inputs=_inputs({}, option, verdicts),
        notes=tuple(Note(condition=v.condition.id, reason=v.blocked.reason) for v in blocked if v.blocked),
        checked=_checked(verdicts),
    )


def _inputs(
    facts: Mapping[str, Any], option: Option[T], verdicts: Sequence[tuple[Option[T], Verdict]]
) -> dict[str, Any]:
    inputs = {name: facts[name] for name in option.reads if name in facts}
    for _, verdict in verdicts:
        inputs |= verdict.inputs
    return inputs


def _checked(verdicts: Sequence[tuple[Option[T], Verdict]]) -> tuple[Checked, ...]:
    return tuple(
        Checked(
            value=option.value,
            condition=verdict.condition.id,
            blocks=verdict.condition.blocks,
            reason=verdict.blocked.reason if verdict.blocked else None,
            inputs=verdict.inputs,
        )
        for option, verdict in verdicts
    )


def _cannot(knob: Knob[T], facts: Mapping[str, Any], option: Option[T], options: Sequence[Option[T]]) -> PlanError:
    """The error of an ask that must not be taken: what was asked and how, every blocker, what works."""
    blockers = [v.blocked.reason for v in evaluate(option.requires, facts) if v.blocked]
    able = ", ".join(show(o.value) for o in options if not any(v.blocked for v in evaluate(o.requires, facts)))
    what = f"{knob.name} = {show(option.value)} was asked for{spelled(knob.ask)} but cannot"
    role = knob.role.value if knob.role else None
    if not knob.is_capability:
        found = [f"can be: {able}."] if able else []
        return PlanError("plan/refused", f"{what} be.", role=role, facts=[*blockers, *found])
    have = f"have: {facts['caps.device']}, {' '.join(facts['caps.isa'])}"
    found = [f"can run: {able}."] if able else []
    return KernelUnavailable("plan/kernel-unavailable", f"{what} run here.", role=role, facts=[*blockers, have, *found])


def _nothing_can(knob: Knob[T], verdicts: Sequence[tuple[Option[T], Verdict]]) -> PlanError:
    """The error of a knob that was left open, and of which every value is blocked."""
    blockers = [f"{show(option.value)}: {verdict.blocked.reason}" for option, verdict in verdicts if verdict.blocked]
    role, what = knob.role.value if knob.role else None, f"{knob.name}: nothing can be chosen here."
    if knob.is_capability:
        return KernelUnavailable("plan/kernel-unavailable", what, role=role, facts=blockers)
    return PlanError("plan/refused", what, role=role, facts=blockers)


def unknown_value(knob: Knob[Any], known: Sequence[Any]) -> PlanError:
    return PlanError(
        "plan/unknown-value",
        f"{knob.name} = {show(knob.ask.value)} was asked for{spelled(knob.ask)}, which Proa does not know.",
        role=knob.role.value if knob.role else None,
        facts=(f"known: {', '.join(map(show, known))}",),
    )


def spelled(ask: Choice[Any]) -> str:
    """` (--draft.dtype)`, or nothing where the ask has no spelling."""
    return f" ({ask.origin.where})" if ask.origin.where else ""


def names_role(ask: Choice[Any]) -> bool:
    """The ask was for one runner by name (`--draft.dtype`, `PROA_DRAFT__DTYPE`, `draft_dtype`), not for both."""
    spelling = ask.origin.where.rpartition(": ")[2]
    return re.match(r"(--|PROA_)?(draft|target)(\.|__?)", spelling, re.IGNORECASE) is not None


def show(value: Any) -> str:
    """A decision's value as users type it; one that differs by layer as `1..3 fused, 4 separate`."""
    if isinstance(value, Mapping):
        answers = cast("Mapping[str, Any]", value)
        return ", ".join(f"{layers} {show(answer)}" for layers, answer in answers.items())
    if isinstance(value, Enum):
        return str(value.value)
    return "none" if value is None else str(value)
