"""Slots for the states of linear attention: of running requests, and of prompts that later requests may begin with.

A state does not grow with its request, so requests are bounded by slots as they are by pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from proa.choice import AUTO, Choice
from proa.conditions import Source
from proa.errors import CacheExhausted
from proa.plan.decision import Decision
from proa.plan.rules.settle import Knob, Option, settle, spelled
from proa.units import Role, Rollback, format_bytes

SNAPSHOTS = 16
FOR_REQUESTS, FOR_SNAPSHOTS = 2, 4
"""States of running requests may take half of what the weights leave free, snapshots a quarter of the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSize:
    """What one request's states take: `slots` of `slot_bytes`, and `rows` of `row_bytes` for inputs of verified rows.

    All 0 without linear attention.
    """

    slot_bytes: int
    slots: int
    row_bytes: int
    rows: int

    @classmethod
    def of(cls, slot_bytes: int, row_bytes: int, rollback: Rollback | None, draft_tokens: int) -> StateSize:
        """With replay, a committed and a tentative state, and the inputs of a proposal's rows, its anchor included;
        else a committed state and one after each of these rows. Without proposals, one row is written at a time."""
        if rollback is None:
            return cls(slot_bytes=0, slots=0, row_bytes=0, rows=0)
        rows = draft_tokens + 1 if draft_tokens else 0
        if rollback is Rollback.REPLAY:
            return cls(slot_bytes=slot_bytes, slots=2, row_bytes=row_bytes, rows=rows)
        return cls(slot_bytes=slot_bytes, slots=1 + max(1, rows), row_bytes=row_bytes, rows=0)

    @property
    def nbytes(self) -> int:
        return self.slots * self.slot_bytes + self.rows * self.row_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePlan:
    """By role, the slots; `max_num_seqs` is what they allow, `nbytes` what all of them take."""

    max_num_seqs: Decision[int]
    state_slots: Mapping[str, Decision[int]]
    snapshot_slots: Mapping[str, Decision[int]]
    kept_rows: Mapping[str, int]
    nbytes: int


def states(
    seqs: Decision[int], ask: Choice[int], sizes: Mapping[Role, StateSize], left: int, facts: Mapping[str, Any]
) -> StatePlan:
    """`left` bytes are free beside the weights. Raises CacheExhausted where not even one request's states fit, or not
    those of as many as were asked for."""
    each = sum(size.nbytes for size in sizes.values())
    inputs = {**facts, "memory.state_bytes": {role.value: size.nbytes for role, size in sizes.items()}}
    if each:
        seqs = _within(seqs, each, left, inputs)
    slot_bytes = sum(size.slot_bytes for size in sizes.values())
    kept = _snapshots(ask, slot_bytes, left - seqs.value * each, inputs)
    return StatePlan(
        max_num_seqs=seqs,
        state_slots={role.value: _slots(role, size, seqs, inputs) for role, size in sizes.items()},
        snapshot_slots={
            role.value: replace(kept, knob=f"memory.{role.value}_snapshot_slots")
            if size.slots
            else _none(role, "snapshot")
            for role, size in sizes.items()
        },
        kept_rows={role.value: seqs.value * size.rows for role, size in sizes.items()},
        nbytes=seqs.value * each + kept.value * slot_bytes,
    )


def _within(seqs: Decision[int], each: int, left: int, inputs: Mapping[str, Any]) -> Decision[int]:
    """As many requests as have room for their states."""
    least = seqs.value if seqs.source is Source.ASKED else 1
    if least * each > left:
        asked = f" were asked for{spelled(seqs.requested)}" if seqs.source is Source.ASKED else ""
        raise CacheExhausted(
            "memory/states-do-not-fit",
            f"the states of one request take {format_bytes(each)}, and {format_bytes(left)} is free beside the weights"
            + (f"; {seqs.value} requests{asked}." if asked else "."),
            hint=f"--max-num-seqs {left // each}" if left >= each else "a smaller model, or more memory",
        )
    most = max(1, left // FOR_REQUESTS // each)
    if seqs.value <= most or seqs.source is Source.ASKED:
        return replace(seqs, inputs=inputs)
    reason = f"the states of {most} requests, {format_bytes(each)} each, take half of what is free beside the weights"
    return replace(seqs, value=most, source=Source.HARDWARE, rule="max_num_seqs.states", reason=reason, inputs=inputs)


def _snapshots(ask: Choice[int], slot_bytes: int, left: int, inputs: Mapping[str, Any]) -> Decision[int]:
    """One number for both runners: a request resumes where both have a state."""
    most = max(0, left) // FOR_SNAPSHOTS // slot_bytes if slot_bytes else 0
    value, reason = min(SNAPSHOTS, most), "prompts that later requests begin with; each costs a state"
    if most < SNAPSHOTS:
        reason = f"{most} states of {format_bytes(slot_bytes)} take a quarter of what is left"
    auto = Option(value=value, rule="memory.snapshots", reason=reason, source=Source.DEFAULT, reads=tuple(inputs))
    asked = Option(value=ask.value or 0, rule="", reason="", source=Source.ASKED)
    return settle(Knob(name="snapshots", role=None, ask=ask), inputs, (auto,), asked=asked)


def _slots(role: Role, size: StateSize, seqs: Decision[int], inputs: Mapping[str, Any]) -> Decision[int]:
    if not size.slots:
        return _none(role, "state")
    reason = f"{size.slots} per running request"
    if size.rows:
        reason += f", and the inputs of {size.rows} rows"
    auto = Option(
        value=seqs.value * size.slots,
        rule="memory.state_slots",
        reason=reason,
        source=Source.CONSTRAINT,
        reads=tuple(inputs),
    )
    knob = Knob(name=f"memory.{role.value}_state_slots", role=role, ask=AUTO)
    return settle(knob, inputs, (auto,))


def _none(role: Role, what: str) -> Decision[int]:
    knob = Knob(name=f"memory.{role.value}_{what}_slots", role=role, ask=AUTO)
    why = "0 linear-attention layers"
    return settle(knob, {}, (Option(value=0, rule="memory.no_states", reason=why, source=Source.CHECKPOINT),))
