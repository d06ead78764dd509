"""Compute dtype, weight format and dtype of the KV cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from proa.conditions import Blocked, Blocks, Condition, FactView, Source
from proa.plan.context import RunnerContext
from proa.plan.decision import Decision, Note
from proa.plan.rules.settle import Knob, Option, settle
from proa.units import DType

COMPUTE = (DType.F32, DType.BF16)


def stored_format(facts: Mapping[str, Any]) -> DType:
    """The element type of most stored bytes; float32 of an empty checkpoint."""
    return DType(next(iter(facts["stored.bytes"]), DType.F32.value))


def _not_fp16(facts: FactView) -> Blocked:
    where = "a CPU" if facts["plan.device"] == "cpu" else "Proa's"
    return Blocked(f"fp16 is not {where} compute dtype", Source.HARDWARE)


def _not_blocks(_: FactView) -> Blocked:
    return Blocked("kernels that compute on stored blocks are not in this version of Proa", Source.CONSTRAINT)


FP16 = Condition(id="dtype.no_fp16", reads=("plan.device",), blocks=Blocks.ALWAYS, check=_not_fp16)
BLOCKS = Condition(id="quantization.no_block_kernels", reads=(), blocks=Blocks.ALWAYS, check=_not_blocks)


def dtype(ctx: RunnerContext, facts: Mapping[str, Any]) -> Decision[DType]:
    """The stored type of most bytes where it can compute; fp16 and blocks become bfloat16."""
    stored = stored_format(facts)
    value, why = DType.BF16, f"stored as {stored.value}"
    if stored.is_block:
        why = f"{stored.value} blocks are dequantised to bfloat16 at load"
    elif stored in (DType.F32, DType.F64):
        value = DType.F32
    first = Option(value=value, rule="dtype.stored", reason=why, source=Source.CHECKPOINT, reads=("stored.bytes",))
    other = Option(
        value=COMPUTE[value is DType.F32], rule="dtype.other", reason="the other compute type", source=Source.DEFAULT
    )
    fp16 = Option(value=DType.F16, rule="dtype.fp16", reason=why, source=Source.CHECKPOINT, requires=(FP16,))
    options = (fp16, first, other) if stored is DType.F16 else (first, other, fp16)
    decision = settle(Knob(name="dtype", role=ctx.role, ask=ctx.intent.dtype), facts, options)
    return _noting_mix(decision, facts["stored.bytes"])


def _noting_mix(decision: Decision[DType], stored: Mapping[str, int]) -> Decision[DType]:
    """Says so where the file mixes element types: the majority by bytes decides, every tensor is converted."""
    if len(stored) < 2:
        return decision
    total = sum(stored.values())
    shares = ", ".join(f"{name} {100 * size / total:.3g} %" for name, size in stored.items())
    note = Note(condition="dtype.mixed", reason=f"stored bytes: {shares}; all become {decision.value.value}")
    return replace(decision, notes=(*decision.notes, note))


def quantization(ctx: RunnerContext, facts: Mapping[str, Any]) -> Decision[str]:
    """The weight format that runs: `none` in this version, so stored blocks are dequantised at load."""
    counts: Mapping[str, int] = facts["stored.tensors"]
    blocks = [name for name in counts if DType(name).is_block]
    reason = "no quantised tensors"
    if blocks:
        found = ", ".join(f"{name} blocks ({counts[name]} tensor{'s' * (counts[name] > 1)})" for name in blocks)
        reason = f"{found} dequantised on load"
    kept = [
        Option(value=name, rule="quantization.kept", reason="as stored", source=Source.CHECKPOINT, requires=(BLOCKS,))
        for name in blocks
    ]
    none = Option(
        value="none", rule="quantization.none", reason=reason, source=Source.CHECKPOINT, reads=("stored.tensors",)
    )
    knob = Knob(name="quantization", role=ctx.role, ask=ctx.intent.quantization, is_capability=True)
    decision = settle(knob, facts, (*kept, none))
    return decision if not blocks or knob.ask.value else replace(decision, reason=reason, source=Source.CHECKPOINT)


def kv_dtype(ctx: RunnerContext, facts: Mapping[str, Any]) -> Decision[DType]:
    """Keys and values are kept in the compute type unless asked otherwise."""
    options = tuple(
        Option(
            value=value,
            rule="kv_dtype.compute",
            reason="the compute dtype",
            source=Source.DEFAULT,
            reads=("plan.dtype",),
        )
        for value in sorted(COMPUTE, key=lambda value: value.value != facts["plan.dtype"])
    )
    return settle(Knob(name="kv_dtype", role=ctx.role, ask=ctx.intent.kv_dtype), facts, options)
