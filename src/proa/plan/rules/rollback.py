"""How the recurrent state of a rejected proposal is undone: what was measured for this runner's shapes and kernels.

Replay takes less memory, so states of all rows must have been measured to be faster, and have room.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from proa.conditions import Blocked, Blocks, Condition, Facts, FactView, Source
from proa.plan.context import RunnerContext
from proa.plan.costs import rollback_case
from proa.plan.decision import Decision
from proa.plan.footprint import state_bytes
from proa.plan.rules import absent
from proa.plan.rules.settle import Knob, Option, settle
from proa.plan.rules.states import StateSize
from proa.plan.runner_plan import LinearAttentionPlan
from proa.units import DType, Rollback, format_bytes

WORTH = 0.95
"""Of the time with replay that states of all rows may take: a twentieth is what a measurement may be off."""
OF_FREE = 8
"""States of all rows of all requests may take one part in so many of the free memory, weights included."""


def _are_faster(facts: FactView) -> Blocked | None:
    measured = facts["measured.rollback"]
    if measured is None:
        return Blocked("replay takes less memory, and nobody has measured which is faster here", Source.DEFAULT)
    return None if _is_faster(measured) else Blocked(_said(measured), Source.HARDWARE)


def _have_room(facts: FactView) -> Blocked | None:
    # Without proposals there is no such number, and a target's plan is the same with and without a draft beside it.
    if not _is_faster(facts["measured.rollback"]):
        return None
    needed, free = facts["states.bytes"], facts["caps.memory_available"]
    if needed <= free // OF_FREE:
        return None
    said = f"states of all rows take {format_bytes(needed)}, more than one part in {OF_FREE} of {format_bytes(free)}"
    return Blocked(said, Source.HARDWARE)


FASTER = Condition(id="rollback.faster", reads=("measured.rollback",), blocks=Blocks.AUTO, check=_are_faster)
ROOM = Condition(
    id="rollback.room",
    reads=("measured.rollback", "states.bytes", "caps.memory_available"),
    blocks=Blocks.AUTO,
    check=_have_room,
)


def rollback(
    ctx: RunnerContext, facts: Facts, linear: LinearAttentionPlan, dtype: DType, states: DType | None
) -> Decision[Rollback] | Decision[None]:
    """`linear`, `dtype` and `states` are what was decided of the runner's kernels, compute type and state type."""
    ask, undoing = ctx.intent.rollback, ctx.undoing
    if not ctx.spec.delta_layers:
        return absent.without_states(ctx, facts, "rollback", ask)
    case = rollback_case(ctx.role, ctx.spec, linear, dtype, states, undoing.draft_tokens, undoing.threads)
    costs = undoing.costs.get(str(case))
    measured = None if costs is None else asdict(costs)
    slot = state_bytes(ctx.spec, dtype, states)
    total = StateSize.of(slot, 0, Rollback.STATES, undoing.draft_tokens).nbytes * undoing.max_num_seqs
    free = ctx.caps.memory_available
    facts = facts | {
        "measured.rollback": measured,
        "states.bytes": total,
        "caps.memory_available": ctx.caps.memory_bytes // 2 if free is None else free,
    }
    kept = Option(
        value=Rollback.STATES,
        rule="rollback.states",
        reason="" if measured is None else _said(measured),
        source=Source.HARDWARE,
        requires=(FASTER, ROOM),
    )
    reason = "keeps one state per request beside the committed one"
    replay = Option(value=Rollback.REPLAY, rule="rollback.replay", reason=reason, source=Source.DEFAULT)
    return settle(Knob(name="rollback", role=ctx.role, ask=ask), facts, (kept, replay))


def _is_faster(measured: dict[str, float] | None) -> bool:
    return measured is not None and measured[Rollback.STATES.value] <= WORTH * measured[Rollback.REPLAY.value]


def _said(measured: dict[str, Any]) -> str:
    replay, states = (1e3 * measured[way.value] for way in (Rollback.REPLAY, Rollback.STATES))
    return f"measured: {replay:.3g} ms a step with replay, {states:.3g} ms with states of all rows"
