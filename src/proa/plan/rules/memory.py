"""How many cache pages each runner has. Both runners get pages for the same number of tokens.

States that do not grow come first (rules/states.py): without its states no request runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from proa.choice import Choice
from proa.conditions import Source
from proa.config.intent import CacheIntent
from proa.errors import CacheExhausted
from proa.kernels.caps import DeviceCaps
from proa.plan.decision import Decision, Note
from proa.plan.rules.settle import spelled
from proa.plan.rules.states import StatePlan, StateSize, states
from proa.plan.runner_plan import MemoryPlan
from proa.units import Role, format_bytes

AUTO_KV_BYTES = 4 * 2**30
RESERVE_BYTES = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerSize:
    """What one runner takes: resident weights, and bytes of a page of `page_size` rows over all its layers. Of the
    weights, a step of one row reads `step_bytes`.

    `slack` is how many rows a request may hold beyond its length (proposed ones, in the draft's pool); `states` are
    what it holds beside its rows.
    """

    role: Role
    weights_bytes: int
    step_bytes: int
    page_bytes: int
    page_size: int
    slack: int
    states: StateSize

    def pages(self, tokens: int, seqs: int) -> int:
        """Pages for `tokens` rows over `seqs` requests, their slack included."""
        return _ceil(tokens + seqs * self.slack, self.page_size)

    def most_pages(self, seqs: int, length: int) -> int:
        """Pages with which `seqs` requests of `length` rows never wait."""
        return seqs * _ceil(length + self.slack, self.page_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Bytes for all pages, and the rule that set them."""

    nbytes: int
    rule: str
    reason: str
    source: Source


def memory_facts(caps: DeviceCaps, device: str) -> dict[str, Any]:
    """Memory of the device that the target runs on. What is free is half of all where nobody knows."""
    total, free = caps.memory_bytes, caps.memory_available
    if device == "cuda" and caps.gpus:
        total, free = caps.gpus[0].memory_bytes, caps.gpus[0].memory_free
    return {"caps.memory_bytes": total, "caps.memory_available": total // 2 if free is None else free}


def memory(
    ask: CacheIntent,
    sizes: Sequence[RunnerSize],
    seqs: Decision[int],
    length: int,
    hidden: int,
    facts: Mapping[str, Any],
) -> tuple[Decision[int], MemoryPlan]:
    """The number of requests that have room for their states, and the memory of that many.

    `hidden`: bytes of a hidden row that a draft keeps of a row in the target's cache until it has used it; 0 without
    such a draft.
    Raises CacheExhausted when weights or states do not fit, or not even one page does.
    """
    beside = _beside(sum(size.weights_bytes for size in sizes), facts)
    left = beside - _reserve(beside)
    slots = states(seqs, ask.snapshots, {size.role: size.states for size in sizes}, left, facts)
    return slots.max_num_seqs, _pages(ask.memory_bytes, sizes, slots, length, hidden, facts)


def _pages(
    ask: Choice[int],
    sizes: Sequence[RunnerSize],
    slots: StatePlan,
    length: int,
    hidden: int,
    facts: Mapping[str, Any],
) -> MemoryPlan:
    """Pages for the least of: what was asked or is free, and what all requests of `length` rows can use."""
    weights, seqs = sum(size.weights_bytes for size in sizes), slots.max_num_seqs.value
    budget = _budget(ask, _beside(weights, facts), slots.nbytes, hidden, sizes)
    most = {size.role: size.most_pages(seqs, length) for size in sizes}
    counts = _spread(budget.nbytes, sizes, seqs)
    useful = sum(most[size.role] * size.page_bytes for size in sizes)
    if all(counts[size.role] >= most[size.role] for size in sizes):
        reason = f"{seqs} requests of {length} tokens never wait for pages"
        budget, counts = Budget(nbytes=useful, rule="memory.enough", reason=reason, source=Source.CONSTRAINT), most
    _refuse_no_page(counts, budget, sizes, ask)
    # Each hidden row is of a row that its request has in the target's cache, and which no other request computed.
    kept = counts[Role.TARGET] * sizes[0].page_size * hidden
    inputs = {
        **facts,
        "memory.weights_bytes": weights,
        **({"memory.hidden_bytes": kept} if kept else {}),
        **({"memory.states_bytes": slots.nbytes} if slots.nbytes else {}),
        "memory.page_bytes": {s.role.value: s.page_bytes for s in sizes},
    }
    return MemoryPlan(
        target_pages=_decision("memory.target_pages", counts[Role.TARGET], ask, budget, inputs),
        draft_pages=_decision("memory.draft_pages", counts.get(Role.DRAFT, 0), ask, budget, inputs),
        state_slots=slots.state_slots,
        snapshot_slots=slots.snapshot_slots,
        kept_rows=slots.kept_rows,
        page_bytes={size.role.value: size.page_bytes for size in sizes},
        state_bytes={size.role.value: size.states.slot_bytes for size in sizes},
        weights_bytes={size.role.value: size.weights_bytes for size in sizes},
        hidden_bytes=kept,
        step_bytes={size.role.value: size.step_bytes for size in sizes},
    )


def _refuse_no_page(counts: Mapping[Role, int], budget: Budget, sizes: Sequence[RunnerSize], ask: Choice[int]) -> None:
    if min(counts.values()) < 1:
        page = sum(size.page_bytes for size in sizes)
        raise CacheExhausted(
            "memory/no-page",
            f"{format_bytes(budget.nbytes)} for KV pages{spelled(ask)} is less than one page ({format_bytes(page)}).",
            facts=(budget.reason,),
            hint="--kv-memory, or a smaller --page-size",
        )


def _beside(weights: int, facts: Mapping[str, Any]) -> int:
    """Bytes that are free beside the weights."""
    free: int = facts["caps.memory_available"]
    if weights > free:
        raise CacheExhausted(
            "memory/weights-do-not-fit",
            f"the weights take {format_bytes(weights)}, but only {format_bytes(free)} of memory is free.",
            facts=(f"memory of the device: {format_bytes(facts['caps.memory_bytes'])}",),
            hint="a smaller model, or more memory",
        )
    return free - weights


def _reserve(beside: int) -> int:
    return min(RESERVE_BYTES, beside // 4)


def _budget(ask: Choice[int], beside: int, states: int, hidden: int, sizes: Sequence[RunnerSize]) -> Budget:
    """Of `beside` bytes that the weights leave, `states` are taken, and beside every row in pages `hidden` ones."""
    if ask.value is not None:
        return Budget(nbytes=ask.value, rule="memory.asked", reason="asked", source=Source.ASKED)
    reserve = _reserve(beside)
    row = sum(size.page_bytes // size.page_size for size in sizes)
    left = max(0, beside - reserve - states)
    left = left * row // (row + hidden) if hidden else left
    if left < AUTO_KV_BYTES:
        before = f"the weights, {format_bytes(states)} of states" if states else "the weights"
        before += ", hidden rows for the draft" if hidden else ""
        reason = f"what is free after {before} and a reserve of {format_bytes(reserve)}"
        return Budget(nbytes=left, rule="memory.free", reason=reason, source=Source.HARDWARE)
    reason = f"{format_bytes(AUTO_KV_BYTES)} unless --kv-memory says otherwise"
    return Budget(nbytes=AUTO_KV_BYTES, rule="memory.auto_cap", reason=reason, source=Source.DEFAULT)


def _spread(nbytes: int, sizes: Sequence[RunnerSize], seqs: int) -> dict[Role, int]:
    """The most pages per runner within `nbytes` such that every runner holds the same tokens beside its slack."""
    low, high = 0, nbytes // max(1, sizes[0].page_bytes) * sizes[0].page_size
    while low < high:
        tokens = (low + high + 1) // 2
        if sum(size.pages(tokens, seqs) * size.page_bytes for size in sizes) <= nbytes:
            low = tokens
        else:
            high = tokens - 1
    tokens = low // sizes[0].page_size * sizes[0].page_size
    return {size.role: size.pages(tokens, seqs) if tokens else 0 for size in sizes}


def _decision(knob: str, pages: int, ask: Choice[int], budget: Budget, inputs: Mapping[str, Any]) -> Decision[int]:
    hidden: int = inputs.get("memory.hidden_bytes", 0)
    taken = inputs["memory.weights_bytes"] + inputs.get("memory.states_bytes", 0) + hidden + budget.nbytes
    free: int = inputs["caps.memory_available"]
    over = Note(
        condition="memory.within_free",
        reason=f"weights, states{', hidden rows' if hidden else ''} and pages take {format_bytes(taken)}, "
        f"but only {format_bytes(free)} is free",
    )
    return Decision(
        knob=knob,
        value=pages,
        requested=ask,
        source=budget.source,
        rule=budget.rule,
        reason=budget.reason,
        inputs=inputs,
        notes=(over,) if taken > free else (),
    )


def _ceil(rows: int, page_size: int) -> int:
    return -(-rows // page_size)
