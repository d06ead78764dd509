"""Compute dtype, weight format and dtype of the KV cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from proa.conditions import Blocked, Blocks, Condition, FactView, Source
from proa.kernels.kernel_info import NATIVE, passed_self_test
from proa.plan.context import RunnerContext
from proa.plan.decision import Decision, Note
from proa.plan.rules.settle import Knob, Option, settle
from proa.units import DType

COMPUTE = (DType.F32, DType.BF16)
NONE, FP8 = "none", "fp8"
HARDWARE = Source.HARDWARE
CODES = frozenset({DType.F8_E4M3, DType.F8_E5M2, DType.I32, DType.I8, DType.U8})
"""Element types of quantised weights in the hub's forms: values exist only with the scales beside them."""


def stored_format(facts: Mapping[str, Any]) -> DType:
    """The element type of most stored bytes; float32 of an empty checkpoint."""
    return DType(next(iter(facts["stored.bytes"]), DType.F32.value))


def _not_fp16(facts: FactView) -> Blocked:
    where = "a CPU" if facts["plan.device"] == "cpu" else "Proa's"
    return Blocked(f"fp16 is not {where} compute dtype", Source.HARDWARE)


def _on_blocks(facts: FactView) -> Blocked | None:
    if not facts["stored.blocks"]:
        return Blocked("no linear map is stored in a block format that kernels compute on", Source.CONSTRAINT)
    for kernel in ("plan.matmul_kernel", "plan.moe_kernel"):
        if facts[kernel] not in (NATIVE, None):
            return Blocked(f"{facts[kernel]} does not compute on stored blocks", Source.CONSTRAINT)
    return None


def _on_codes(facts: FactView) -> Blocked | None:
    codes, expanded = facts["stored.codes"], facts["stored.expanded"]
    if not codes:
        why = "; ".join(dict.fromkeys(expanded.values()))
        return Blocked(why or "no linear map is stored as block FP8 throughout", Source.CHECKPOINT)
    for kernel in ("plan.matmul_kernel", "plan.moe_kernel"):
        if facts[kernel] not in (NATIVE, None):
            return Blocked(f"{facts[kernel]} does not compute on FP8 codes ({kernel.partition('.')[2]})", HARDWARE)
    return None


def _byte_tables(facts: FactView) -> Blocked | None:
    return None if "avx512vbmi" in facts["caps.isa"] else Blocked("this CPU has no avx512vbmi", HARDWARE)


def _no_kernels_on_codes(_: FactView) -> Blocked:
    return Blocked("no kernel computes on this stored form", Source.CONSTRAINT)


def _dot_products(facts: FactView) -> Blocked | None:
    return None if "avx512_vnni" in facts["caps.isa"] else Blocked("this CPU has no avx512_vnni", Source.HARDWARE)


def _not_float32(facts: FactView) -> Blocked | None:
    if facts["plan.dtype"] != DType.F32.value:
        return None
    return Blocked("float32 was asked for, and kernels on blocks round activations to 8 bits", Source.CONSTRAINT)


FP16 = Condition(id="dtype.no_fp16", reads=("plan.device",), blocks=Blocks.ALWAYS, check=_not_fp16)
BLOCKS = Condition(
    id="quantization.kernels",
    reads=("stored.blocks", "plan.matmul_kernel", "plan.moe_kernel"),
    blocks=Blocks.ALWAYS,
    check=_on_blocks,
)
KEPT = Condition(id="quantization.kept_codes", reads=(), blocks=Blocks.ALWAYS, check=_no_kernels_on_codes)
CODES_FIT = Condition(
    id="quantization.fp8_kernels",
    reads=("stored.codes", "stored.expanded", "plan.matmul_kernel", "plan.moe_kernel"),
    blocks=Blocks.ALWAYS,
    check=_on_codes,
)
VBMI = Condition(id="quantization.vbmi", reads=("caps.isa",), blocks=Blocks.ALWAYS, check=_byte_tables)
VNNI = Condition(id="quantization.vnni", reads=("caps.isa",), blocks=Blocks.ALWAYS, check=_dot_products)
ROUNDED = Condition(id="quantization.float32", reads=("plan.dtype",), blocks=Blocks.AUTO, check=_not_float32)


def dtype(ctx: RunnerContext, facts: Mapping[str, Any]) -> Decision[DType]:
    """The stored type of most bytes where it can compute; fp16 and blocks become bfloat16."""
    stored = stored_format(facts)
    value, why = DType.BF16, f"stored as {stored.value}"
    if stored.is_block:
        why = f"{stored.value} blocks are computed with in bfloat16"
    elif stored in CODES:
        why = f"{next(iter(facts['stored.formats']), stored.value)} weights are computed with in bfloat16"
    elif stored in (DType.F32, DType.F64):
        value = DType.F32
    reads = ("stored.bytes", "stored.formats") if stored in CODES else ("stored.bytes",)
    first = Option(value=value, rule="dtype.stored", reason=why, source=Source.CHECKPOINT, reads=reads)
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
    """The weight format that runs: the stored one where kernels compute on it, else `none` (the compute dtype).

    Only the runner's own tensors are looked at: a plain draft beside a quantised target is not quantised.
    """
    stored: Mapping[str, int] = facts["stored.tensors"]
    blocks = [name for name in stored if DType(name).is_block]
    counts = Counter(format for _, format in facts["stored.blocks"])
    kept = [
        Option(
            value=name,
            rule="quantization.kept",
            reason=_kept_reason(counts, facts) + _expanded(facts),
            source=Source.CHECKPOINT,
            requires=(BLOCKS, VNNI, ROUNDED),
            reads=("stored.tensors", "stored.blocks", "stored.expanded"),
        )
        for name in sorted(blocks, key=lambda name: -counts[name])
    ]
    kept += [_kept_codes(name, facts) for name in dict.fromkeys(map(_method, facts["stored.formats"]))]
    reason = _stored_reason(blocks, facts)
    reads = ("stored.tensors", "stored.formats", "stored.unread", "checkpoint.quant")
    none = Option(value=NONE, rule="quantization.none", reason=reason, source=Source.CHECKPOINT, reads=reads)
    knob = Knob(name="quantization", role=ctx.role, ask=ctx.intent.quantization, is_capability=True)
    decision = settle(knob, facts, (*kept, none))
    if kept and decision.value == NONE and ctx.intent.quantization.is_auto:
        return replace(decision, reason=f"{reason}: {decision.reason}")
    return decision


def _method(format: str) -> str:
    """`fp8 128x128` -> `fp8`; one scale per tensor or row is another method."""
    return format if format == "fp8 scaled" else format.split(maxsplit=1)[0]


def _kept_codes(name: str, facts: Mapping[str, Any]) -> Option[str]:
    if name != FP8:
        return Option(value=name, rule="quantization.kept", reason="", source=Source.CHECKPOINT, requires=(KEPT,))
    reason = f"{sum(facts['stored.codes'].values())} parameters run on the stored FP8 codes, activations as they are"
    return Option(
        value=name,
        rule="quantization.kept",
        reason=reason + _expanded(facts),
        source=Source.CHECKPOINT,
        requires=(CODES_FIT, VBMI, passed_self_test(NATIVE, "fp8")),
        reads=("stored.formats", "stored.codes", "stored.expanded"),
    )


def _stored_reason(blocks: Sequence[str], facts: Mapping[str, Any]) -> str:
    """What quantised tensors the runner has, and that they are expanded while loading."""
    found = [(f"{name} blocks", facts["stored.tensors"][name]) for name in blocks]
    found += facts["stored.formats"].items()
    if found:
        said = ", ".join(f"{name} ({count} tensor{'s' * (count > 1)})" for name, count in found)
        if facts["stored.unread"]:
            return f"{said}; {', '.join(facts['stored.unread'])} is accounted for, but not loaded by this version"
        return f"{said} dequantised on load"
    if facts["checkpoint.quant"] is None:
        return "no quantised tensors"
    return f"no quantised tensors (excluded from the checkpoint's {facts['checkpoint.quant']})"


def _kept_reason(counts: Mapping[str, int], facts: Mapping[str, Any]) -> str:
    said = ", ".join(f"{count} in {name}" for name, count in counts.items())
    what = (
        "linear maps and experts" if any(".experts." in name for name, _ in facts["stored.blocks"]) else "linear maps"
    )
    return f"{what} run on the stored blocks ({said}), activations rounded to 8 bits in groups of 32"


def _expanded(facts: Mapping[str, Any]) -> str:
    said = ", ".join(f"{template} ({why})" for template, why in facts["stored.expanded"].items())
    return f"; dequantised: {said}" if said else ""


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
