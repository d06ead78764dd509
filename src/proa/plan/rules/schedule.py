"""Limits of one step and of one request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from proa.arch.delta_blocks import BLOCK
from proa.choice import AUTO, Choice
from proa.conditions import Blocked, Blocks, Condition, FactView, Source
from proa.errors import CacheExhausted
from proa.plan.decision import Decision, Note
from proa.plan.rules.settle import Knob, Option, settle, spelled
from proa.units import Numerics, Switch

MAX_NUM_SEQS = 32
PREFILL_CHUNK = 512


def max_num_seqs(ask: Choice[int]) -> Decision[int]:
    reason = "more requests hardly raise the throughput of a CPU, and each one waits longer"
    return _number("max_num_seqs", ask, MAX_NUM_SEQS, reason)


def prefill_chunk(ask: Choice[int], alignment: int) -> Decision[int]:
    """A whole number of aligned blocks: an ask is rounded down to one, or up to the first.

    Rounded, not refused: how much is computed per step changes no result, and one setting must do for runners with and
    without linear attention.
    """
    reason = "long enough to be compute-bound, short enough not to stall running requests"
    decision = _number("prefill_chunk", ask, PREFILL_CHUNK, reason)
    whole = max(1, decision.value // alignment) * alignment
    if whole == decision.value:
        return decision
    why = f"chunks end at multiples of {alignment} tokens here, so {decision.value} become {whole}"
    return replace(decision, value=whole, source=Source.CONSTRAINT, rule="prefill_chunk.aligned", reason=why)


def prefill_alignment(facts: Mapping[str, Any]) -> Decision[int]:
    """`facts` has `engine.linear_layers`, those of all runners. Blocks of linear attention lie at absolute multiples of
    their length: a prompt that is cut there gets the same bits however it is cut, and has states to begin again from.
    """
    layers = facts["engine.linear_layers"]
    value, why = (BLOCK, "prefill blocks of linear attention") if layers else (1, "0 linear-attention layers")
    option = Option(
        value=value,
        rule="prefill_alignment.blocks" if layers else "prefill_alignment.none",
        reason=why,
        source=Source.CHECKPOINT,
        reads=("engine.linear_layers",),
    )
    return settle(Knob(name="prefill_alignment", role=None, ask=AUTO), facts, (option,))


def _has_snapshots(facts: FactView) -> Blocked | None:
    if facts["asked.snapshots"] != 0 or not facts["target.linear_layers"]:
        return None
    return Blocked("linear attention goes on from a snapshot, and none are kept (--snapshots)", Source.CONSTRAINT)


SNAPSHOTS = Condition(
    id="prefix_cache.snapshots",
    reads=("asked.snapshots", "target.linear_layers"),
    blocks=Blocks.AUTO,
    check=_has_snapshots,
)


def prefix_cache(ask: Choice[Switch], facts: Mapping[str, Any]) -> Decision[Switch]:
    """Whether a prompt that begins like an earlier one is computed from there on only.

    `facts` has `target.numerics`, `target.linear_layers` and `asked.snapshots`.
    """
    on = Option(
        value=Switch.ON,
        rule="prefix_cache.on",
        reason="prompts often begin alike, and pages that are needed otherwise are given up",
        source=Source.DEFAULT,
        requires=(SNAPSHOTS,),
    )
    off = Option(value=Switch.OFF, rule="prefix_cache.off", reason="nothing could be used", source=Source.CONSTRAINT)
    decision = settle(Knob(name="prefix_cache", role=None, ask=ask), facts, (on, off))
    if decision.value is Switch.OFF or facts["target.numerics"] is Numerics.EXACT:
        return decision
    why = "rows computed in other company differ in their last bits, and answers after a hit may (--numerics exact)"
    inputs = {**decision.inputs, "target.numerics": facts["target.numerics"]}
    return replace(decision, inputs=inputs, notes=(*decision.notes, Note(condition="prefix_cache.exact", reason=why)))


def _number(knob: str, ask: Choice[int], default: int, reason: str) -> Decision[int]:
    auto = Option(value=default, rule=f"{knob}.default", reason=reason, source=Source.DEFAULT)
    asked = Option(value=ask.value or default, rule="", reason="", source=Source.ASKED)
    return settle(Knob(name=knob, role=None, ask=ask), {}, (auto,), asked=asked)


def _trained(facts: FactView) -> Blocked | None:
    asked, trained = facts["asked.max_model_len"], facts["spec.max_positions"]
    if asked <= trained:
        return None
    return Blocked(f"{asked} is more than the {trained} positions that the model was trained for", Source.CHECKPOINT)


TRAINED = Condition(
    id="max_model_len.trained",
    reads=("asked.max_model_len", "spec.max_positions"),
    blocks=Blocks.ALWAYS,
    check=_trained,
)


def max_model_len(ask: Choice[int], facts: Mapping[str, Any]) -> Decision[int]:
    """Longest prompt and answer together: the trained length, or what the pages hold where that is less.

    `facts` has `spec.max_positions` of the target. Memory is looked at by `within_pages`, once the pages are known.
    """
    trained = facts["spec.max_positions"]
    auto = Option(
        value=trained,
        rule="max_model_len.trained",
        reason="the trained length",
        source=Source.CHECKPOINT,
        reads=("spec.max_positions",),
    )
    asked = Option(value=ask.value or trained, rule="", reason="", source=Source.ASKED, requires=(TRAINED,))
    knob = Knob(name="max_model_len", role=None, ask=ask)
    return settle(knob, {**facts, "asked.max_model_len": ask.value}, (auto,), asked=asked)


def within_pages(decision: Decision[int], capacity: int, pages: Decision[int]) -> Decision[int]:
    """The length again, once `capacity` rows of cache are known: one request alone must always be able to finish.

    Raises CacheExhausted when a length that was asked for does not fit.
    """
    inputs = {**pages.inputs, **decision.inputs, "memory.capacity_tokens": capacity}
    if decision.value <= capacity:
        return replace(decision, inputs=inputs)
    if decision.source is Source.ASKED:
        raise CacheExhausted(
            "memory/length-does-not-fit",
            f"max_model_len = {decision.value} was asked for{spelled(decision.requested)}, "
            f"but the KV pages hold {capacity} tokens.",
            facts=(f"pages: {pages.reason}",),
            hint=f"--max-model-len {capacity}, or more --kv-memory",
        )
    reason = f"the pages hold {capacity} tokens, fewer than the trained {decision.value}"
    return replace(
        decision, value=capacity, source=Source.HARDWARE, rule="max_model_len.pages", reason=reason, inputs=inputs
    )
