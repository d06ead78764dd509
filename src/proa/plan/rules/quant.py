"""Compute dtype, weight format and dtype of the KV cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from proa.conditions import Blocked, Blocks, Condition, FactView, Source
from proa.kernels.catalog import NATIVE
from proa.plan.context import RunnerContext
from proa.plan.decision import Decision, Note
from proa.plan.rules.settle import Knob, Option, settle
from proa.units import DType

COMPUTE = (DType.F32, DType.BF16)
NONE = "none"


def stored_format(facts: Mapping[str, Any]) -> DType:
    """The element type of most stored bytes; float32 of an empty checkpoint."""
    return DType(next(iter(facts["stored.bytes"]), DType.F32.value))


def _not_fp16(facts: FactView) -> Blocked:
    where = "a CPU" if facts["plan.device"] == "cpu" else "Proa's"
    return Blocked(f"fp16 is not {where} compute dtype", Source.HARDWARE)


def _on_blocks(facts: FactView) -> Blocked | None:
    if not facts["stored.blocks"]:
        return Blocked("no linear map is stored in a block format that kernels compute on", Source.CONSTRAINT)
    if facts["plan.matmul_kernel"] != NATIVE:
        return Blocked(f"{facts['plan.matmul_kernel']} does not compute on stored blocks", Source.CONSTRAINT)
    return None


def _dot_products(facts: FactView) -> Blocked | None:
    return None if "avx512_vnni" in facts["caps.isa"] else Blocked("this CPU has no avx512_vnni", Source.HARDWARE)


def _not_float32(facts: FactView) -> Blocked | None:
    if facts["plan.dtype"] != DType.F32.value:
        return None
    return Blocked("float32 was asked for, and kernels on blocks round activations to 8 bits", Source.CONSTRAINT)


FP16 = Condition(id="dtype.no_fp16", reads=("plan.device",), blocks=Blocks.ALWAYS, check=_not_fp16)
BLOCKS = Condition(
    id="quantization.kernels", reads=("stored.blocks", "plan.matmul_kernel"), blocks=Blocks.ALWAYS, check=_on_blocks
)
VNNI = Condition(id="quantization.vnni", reads=("caps.isa",), blocks=Blocks.ALWAYS, check=_dot_products)
ROUNDED = Condition(id="quantization.float32", reads=("plan.dtype",), blocks=Blocks.AUTO, check=_not_float32)


def dtype(ctx: RunnerContext, facts: Mapping[str, Any]) -> Decision[DType]:
    """The stored type of most bytes where it can compute; fp16 and blocks become bfloat16."""
    stored = stored_format(facts)
    value, why = DType.BF16, f"stored as {stored.value}"
    if stored.is_block:
        why = f"{stored.value} blocks are computed with in bfloat16"
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
    note = Note(
        condition="dtype.mixed", reason=f"stored bytes: {shares}; all are computed with in {decision.value.value}"
    )
    return replace(decision, notes=(*decision.notes, note))


def quantization(ctx: RunnerContext, facts: Mapping[str, Any]) -> Decision[str]:
    """The weight format that runs: the stored blocks where kernels compute on them, else `none` (the compute dtype)."""
    stored: Mapping[str, int] = facts["stored.tensors"]
    blocks = [name for name in stored if DType(name).is_block]
    counts = Counter(format for _, format in facts["stored.blocks"])
    kept = [
        Option(
            value=name,
            rule="quantization.kept",
            reason=_kept_reason(counts),
            source=Source.CHECKPOINT,
            requires=(BLOCKS, VNNI, ROUNDED),
            reads=("stored.tensors",),
        )
        for name in sorted(blocks, key=lambda name: -counts[name])
    ]
    reason = "no quantised tensors"
    if blocks:
        found = ", ".join(f"{name} blocks ({stored[name]} tensor{'s' * (stored[name] > 1)})" for name in blocks)
        reason = f"{found} dequantised on load"
    none = Option(
        value=NONE, rule="quantization.none", reason=reason, source=Source.CHECKPOINT, reads=("stored.tensors",)
    )
    knob = Knob(name="quantization", role=ctx.role, ask=ctx.intent.quantization, is_capability=True)
    decision = settle(knob, facts, (*kept, none))
    if blocks and decision.value == NONE and ctx.intent.quantization.is_auto:
        return replace(decision, reason=f"{reason}: {decision.reason}")
    return decision


def _kept_reason(counts: Mapping[str, int]) -> str:
    linear = ", ".join(f"{count} in {name}" for name, count in counts.items())
    return f"linear maps run on the stored blocks ({linear}), activations rounded to 8 bits in groups of 32"


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
