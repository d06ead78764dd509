"""Shared experts of a runner: slots of the routed ones (fused), or an MLP of their own. One answer per MoE layer.

A draft is asked like its target, over its own tensors. What a layer's answer amounts to is its MoELayout, the one
object that builder, router, weight rules and loader read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from proa.arch.blocks import MoESpec
from proa.arch.layout import MoELayout, ScaleOn
from proa.conditions import Blocked, Blocks, Condition, Facts, FactView, Source, evaluate
from proa.errors import PlanError
from proa.kernels.catalog import CATALOG, MOE
from proa.kernels.kernel_info import KernelInfo
from proa.plan.context import RunnerContext
from proa.plan.decision import Checked, Decision, Note, Rejected
from proa.plan.rules import absent
from proa.plan.rules.settle import Knob, Option, settle, show, spelled
from proa.plan.stored import EXPERTS, SHARED, Group, expert_layout, format_of
from proa.units import Role, SharedExperts

T = TypeVar("T")
FUSED, SEPARATE = SharedExperts.FUSED, SharedExperts.SEPARATE
KNOB = "shared_experts"


def _same_storage(facts: FactView) -> Blocked | None:
    routed, shared = facts["routed.storage"], facts["shared.storage"]
    if routed == shared or not routed or not shared:  # what is not stored at all is the loader's to refuse
        return None
    return Blocked(f"routed experts are stored as {routed}, shared ones as {shared}", Source.CHECKPOINT)


def _whole_slots(facts: FactView) -> Blocked | None:
    routed, shared = facts["routed.width"], facts["shared.width"]
    if shared % routed == 0:
        return None
    return Blocked(f"a shared width of {shared} does not divide into slots of {routed}", Source.CHECKPOINT)


def _same_activation(facts: FactView) -> Blocked | None:
    routed, shared = facts["routed.activation"], facts["shared.activation"]
    if routed == shared:
        return None
    return Blocked(f"routed experts are activated by {routed}, shared ones by {shared}", Source.CHECKPOINT)


def _has_slots(facts: FactView) -> Blocked | None:
    kernel = facts["plan.moe_kernel"]
    if facts["kernel.has_slots"]:
        return None
    return Blocked(f"the {kernel} experts kernel has no slots for shared experts", Source.CONSTRAINT)


def _undivided(facts: FactView) -> Blocked | None:
    ranks = facts["parallel.expert"]
    if ranks == 1:
        return None
    return Blocked(
        f"the experts are divided over {ranks} ranks, and none has a slot for the shared ones", Source.CONSTRAINT
    )


def _gains(facts: FactView) -> Blocked | None:
    if facts["plan.device"] != "cpu":
        return None
    return Blocked("one kernel for both gains nothing on a CPU", Source.HARDWARE)


def _condition(
    name: str, reads: tuple[str, ...], blocks: Blocks, check: Callable[[FactView], Blocked | None]
) -> Condition:
    return Condition(id=f"moe.fuse.{name}", reads=reads, blocks=blocks, check=check)


FUSION = (
    _condition("storage_differs", ("routed.storage", "shared.storage"), Blocks.ALWAYS, _same_storage),
    _condition("width_differs", ("routed.width", "shared.width"), Blocks.ALWAYS, _whole_slots),
    _condition("activation_differs", ("routed.activation", "shared.activation"), Blocks.ALWAYS, _same_activation),
    _condition("no_slots", ("plan.moe_kernel", "kernel.has_slots"), Blocks.ALWAYS, _has_slots),
    _condition("expert_parallel", ("parallel.expert",), Blocks.ALWAYS, _undivided),
    _condition("no_gain", ("plan.device",), Blocks.AUTO, _gains),
)
"""What speaks against slots in every family; a family's own conditions (Family.fusion) come after these.

Experts that are stored stacked are no obstacle: shared ones fill the slots after them.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPlan:
    """The decision, and the layout of each MoE layer that follows from it."""

    decision: Decision[Any]
    layouts: tuple[tuple[int, MoELayout], ...]


def conditions_of(ctx: RunnerContext) -> tuple[Condition, ...]:
    """Every condition that is asked of a layer of this runner. A bundled draft has its target's family."""
    return FUSION + ctx.family.fusion


def shared_experts(ctx: RunnerContext, facts: Facts) -> ExpertPlan:
    """Fused where one kernel can run both and nothing advises against it. `separate` always can be, and reads no fact.

    Raises PlanError `plan/shared-experts` where `fused` was asked for and an ALWAYS condition blocks it in any layer.
    """
    shared = {layer.index: layer.ffn for layer in ctx.spec.moe_layers if isinstance(layer.ffn, MoESpec)}
    asked = {index: moe for index, moe in shared.items() if moe.shared is not None}
    scale_on = _kernel(facts["plan.moe_kernel"]).scale_on if shared else ScaleOn.WEIGHTS
    if not asked:
        layouts = _layouts(ctx, shared, scale_on, frozenset())
        return ExpertPlan(decision=absent.shared_experts(ctx, facts), layouts=layouts)
    facts = facts | {"kernel.has_slots": _kernel(facts["plan.moe_kernel"]).has_slots}
    alike = _alike(asked, _layer_facts(ctx, asked))
    answers = [(layers, _answer(ctx, facts | own, layers)) for layers, own in alike]
    fused = frozenset(index for layers, answer in answers if answer.value is FUSED for index in layers)
    return ExpertPlan(decision=_merged(answers), layouts=_layouts(ctx, shared, scale_on, fused))


def _layouts(
    ctx: RunnerContext, layers: Mapping[int, MoESpec], scale_on: ScaleOn, fused: frozenset[int]
) -> tuple[tuple[int, MoELayout], ...]:
    files = ctx.found.files
    return tuple(
        (index, expert_layout(moe, files[index], scale_on, is_fused=index in fused)) for index, moe in layers.items()
    )


def both_layouts(ctx: RunnerContext) -> tuple[tuple[tuple[int, MoELayout], ...], ...]:
    """The layouts of all MoE layers with shared experts separate, and fused where they have whole slots, as far as
    names of tensors depend on them."""
    layers = {layer.index: layer.ffn for layer in ctx.spec.moe_layers if isinstance(layer.ffn, MoESpec)}
    fit = frozenset(
        index
        for index, moe in layers.items()
        if moe.shared is not None and moe.shared.count * moe.shared.width % moe.width == 0
    )
    return tuple(_layouts(ctx, layers, ScaleOn.WEIGHTS, fused) for fused in dict.fromkeys((frozenset[int](), fit)))


def _kernel(backend: str) -> KernelInfo:
    return next(kernel for kernel in CATALOG if (kernel.op, kernel.backend) == (MOE, backend))


def _layer_facts(ctx: RunnerContext, layers: Mapping[int, MoESpec]) -> dict[int, dict[str, Any]]:
    """What is compared within each layer: how both kinds of experts are stored, their widths and activations."""
    routed, shared = ctx.found.expert_groups(EXPERTS), ctx.found.expert_groups(SHARED)
    facts: dict[int, dict[str, Any]] = {}
    for index, moe in layers.items():
        if moe.shared is None:
            continue
        facts[index] = {
            "routed.storage": _storage(ctx, routed.get(index, ())),
            "shared.storage": _storage(ctx, shared.get(index, ())),
            "routed.width": moe.width,
            "shared.width": moe.shared.count * moe.shared.width,
            "routed.activation": moe.activation.words,
            "shared.activation": moe.shared.activation.words,
        }
    return facts


def _storage(ctx: RunnerContext, groups: Iterable[Group]) -> str:
    """The formats of one kind of experts: `fp8 128x128`, or by parameter where projections differ."""
    formats: dict[str, set[str]] = {}
    kinds = {(group.rule.fills[0].parameter, group.form, group.main.dtype) for group in groups}
    for template, form, dtype in kinds:
        parameter = template.removesuffix(".weight").rpartition(".")[2]
        formats.setdefault(parameter, set()).add(format_of(form, dtype, ctx.quant))
    words = {parameter: " and ".join(sorted(found)) for parameter, found in sorted(formats.items())}
    if len(set(words.values())) <= 1:
        return next(iter(words.values()), "")
    return ", ".join(f"{word} ({parameter})" for parameter, word in words.items())


def _alike(
    layers: Iterable[int], facts: Mapping[int, Mapping[str, Any]]
) -> list[tuple[tuple[int, ...], Mapping[str, Any]]]:
    """Layers with equal facts together, in the order of their first layer."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for index in layers:
        groups.setdefault(tuple(facts[index].values()), []).append(index)
    return [(tuple(indices), facts[indices[0]]) for indices in groups.values()]


def _answer(ctx: RunnerContext, facts: Mapping[str, Any], layers: Sequence[int]) -> Decision[SharedExperts]:
    """One decision for layers with equal facts."""
    ask, conditions = ctx.intent.shared_experts, conditions_of(ctx)
    if ask.value is FUSED:
        _refuse_blocked(ctx, facts, layers)
    options = (
        Option(
            value=FUSED,
            rule="moe.fuse.ok",
            reason="one kernel runs routed and shared experts",
            source=Source.DEFAULT,
            requires=conditions,
        ),
        Option(value=SEPARATE, rule="moe.fuse.separate", reason="always possible", source=Source.DEFAULT),
    )
    decision = settle(Knob(name=KNOB, role=ctx.role, ask=ask), facts, options)
    return decision if ask.is_auto else replace(decision, rule="moe.fuse.asked")


def _refuse_blocked(ctx: RunnerContext, facts: Mapping[str, Any], layers: Sequence[int]) -> None:
    blocked = [v for v in evaluate(conditions_of(ctx), facts) if v.blocked and v.condition.blocks is Blocks.ALWAYS]
    if not blocked:
        return
    lines = [f"{v.condition.id}: {v.blocked.reason}" for v in blocked if v.blocked]
    raise PlanError(
        "plan/shared-experts",
        f"{KNOB} = fused was asked for{spelled(ctx.intent.shared_experts)} but cannot be in {named(layers)}: "
        f"{lines[0]}.",
        role=ctx.role.value,
        facts=lines[1:],
        hint=f"--{ctx.role.value}.shared-experts separate" if ctx.role is Role.DRAFT else "--shared-experts separate",
    )


# One decision of several


def _merged(answers: Sequence[tuple[Sequence[int], Decision[SharedExperts]]]) -> Decision[Any]:
    """The runner's decision: one value where all layers agree, else one per group of layers."""
    (_, first), *others = answers
    if first.source is Source.ASKED and first.value is SEPARATE:
        return first
    values = {answer.value for _, answer in answers}
    value: Any = first.value if len(values) == 1 else {spans(layers): answer.value for layers, answer in answers}
    leading = next((answer for _, answer in answers if answer.value is SEPARATE), first)
    decision = replace(leading, value=value)
    if leading.source is Source.ASKED:
        reason = leading.reason
    else:
        reason = "; ".join(f"{named(layers)}: {answer.reason}" for layers, answer in answers)
    if not others:
        return replace(decision, reason=reason)
    return replace(
        decision,
        reason=reason,
        inputs=_merged_inputs(answers),
        rejected=_distinct(
            Rejected(value=r.value, rule=r.rule, reason=f"{named(layers)}: {r.reason}")
            for layers, answer in answers
            for r in answer.rejected
        ),
        notes=_distinct(Note(condition=n.condition, reason=n.reason) for _, answer in answers for n in answer.notes),
        checked=tuple(_checked(answers)),
    )


def _distinct(items: Iterable[T]) -> tuple[T, ...]:
    return tuple(dict.fromkeys(items))


def _merged_inputs(answers: Sequence[tuple[Sequence[int], Decision[Any]]]) -> dict[str, Any]:
    """Every fact that was read; one that differs by layer as a value per group of layers."""
    names = dict.fromkeys(name for _, answer in answers for name in answer.inputs)
    inputs: dict[str, Any] = {}
    for name in names:
        read = {spans(layers): answer.inputs[name] for layers, answer in answers if name in answer.inputs}
        same = len({repr(value) for value in read.values()}) == 1
        inputs[name] = next(iter(read.values())) if same else read
    return inputs


def _checked(answers: Sequence[tuple[Sequence[int], Decision[Any]]]) -> Iterator[Checked]:
    for layers, answer in answers:
        yield from (replace(check, value=f"{show(check.value)} in {named(layers)}") for check in answer.checked)


def named(layers: Sequence[int]) -> str:
    return f"layer {layers[0]}" if len(layers) == 1 else f"layers {spans(layers)}"


def spans(layers: Sequence[int]) -> str:
    """Ascending numbers in short: `1..3, 5`."""
    runs: list[list[int]] = []
    for index in layers:
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return ", ".join(str(first) if first == last else f"{first}..{last}" for first, last in runs)
