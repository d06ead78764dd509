"""Kernels of attention, matmul and experts, and the numerics that they allow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from proa.choice import Choice
from proa.conditions import Blocked, Blocks, Condition, Facts, FactView, Source
from proa.kernels.catalog import CATALOG, MATMUL, MOE, SAMPLE, kernels_for
from proa.kernels.delta_catalog import DELTA
from proa.kernels.kernel_info import phase_op
from proa.plan.context import RunnerContext
from proa.plan.decision import Decision, Note
from proa.plan.footprint import copies_embedding
from proa.plan.rules import absent
from proa.plan.rules.linear_attention import mixed_phases
from proa.plan.rules.settle import Knob, Option, settle
from proa.plan.runner_plan import LinearAttentionPlan, PhasePlan
from proa.units import Numerics, Phase


def attention(ctx: RunnerContext, facts: Facts) -> PhasePlan:
    """One kernel per phase. Phases share the cache, so each also sees what was asked for the others."""
    ask = ctx.intent
    asks = (ask.attention_prefill, ask.attention_decode, ask.attention_verify)
    facts = facts | {"ask.attention": [choice.value for choice in asks if not choice.is_auto]}
    return PhasePlan(
        prefill=_kernel(ctx, facts, phase_op("attention", Phase.PREFILL), ask.attention_prefill),
        decode=_kernel(ctx, facts, phase_op("attention", Phase.DECODE), ask.attention_decode),
        verify=_kernel(ctx, facts, phase_op("attention", Phase.VERIFY), ask.attention_verify),
    )


def matmul(ctx: RunnerContext, facts: Mapping[str, Any]) -> Decision[str]:
    chosen = _kernel(ctx, facts, MATMUL, ctx.intent.matmul_kernel, knob="matmul_kernel")
    if not copies_embedding(chosen.value, facts["plan.head"]):
        return chosen
    copy = Note(condition="kernel.onednn.copy", reason="the tied head is a second copy of the embedding in memory")
    return replace(chosen, notes=(*chosen.notes, copy))


def moe(ctx: RunnerContext, facts: Mapping[str, Any]) -> Decision[str] | Decision[None]:
    if not ctx.spec.moe_layers:
        return absent.moe_kernel(ctx, facts)
    return _kernel(ctx, facts, MOE, ctx.intent.moe_kernel, knob="moe_kernel")


def sampling(ctx: RunnerContext, facts: Mapping[str, Any]) -> Decision[str]:
    """What draws tokens from the runner's own logits."""
    return _kernel(ctx, facts, SAMPLE, ctx.intent.sampling_kernel, knob="sampling_kernel")


def _kernel(
    ctx: RunnerContext, facts: Mapping[str, Any], op: str, ask: Choice[str], knob: str | None = None
) -> Decision[str]:
    """The best-ranked kernel of the catalogue that can run."""
    options = tuple(
        Option(
            value=kernel.backend,
            rule=f"kernel.{kernel.backend}",
            reason="best kernel that can run",
            source=Source.DEFAULT,
            requires=kernel.requires,
        )
        for kernel in kernels_for(op)
    )
    return settle(Knob(name=knob or op, role=ctx.role, ask=ask, is_capability=True), facts, options)


def _exact_kernels(facts: FactView) -> Blocked | None:
    lacking = facts["kernels.not_exact"]
    if not lacking:
        return None
    return Blocked("the chosen kernels are not row-invariant", Source.HARDWARE)


EXACT = Condition(id="numerics.exact_kernels", reads=("kernels.not_exact",), blocks=Blocks.ALWAYS, check=_exact_kernels)


def numerics(
    ctx: RunnerContext,
    facts: Facts,
    attention: PhasePlan,
    linear: LinearAttentionPlan,
    matmul: Decision[str],
    experts: Decision[str | None],
    sampling: Decision[str],
) -> Decision[Numerics]:
    """Exact where every chosen kernel is, else fast. All phases of linear attention must run on one: what was decoded
    may be verified, or prefilled again, and must get the same bits."""
    chosen: dict[str, str | None] = {MATMUL: matmul.value, MOE: experts.value, SAMPLE: sampling.value}
    for op, plan in (("attention", attention), (DELTA, linear)):
        leaves = {Phase.PREFILL: plan.prefill, Phase.DECODE: plan.decode, Phase.VERIFY: plan.verify}
        chosen |= {phase_op(op, phase): leaf.value for phase, leaf in leaves.items()}
    kernels = (*CATALOG, *(kernel for plugin in ctx.plugins for kernel in plugin.kernels))
    inexact = [k.op for k in kernels if chosen[k.op] == k.backend and not k.exact]
    inexact += [op for op in mixed_phases(linear) if op not in inexact]
    exact = Option(
        value=Numerics.EXACT, rule="numerics.exact", reason="all kernels are", source=Source.HARDWARE, requires=(EXACT,)
    )
    fast = Option(
        value=Numerics.FAST, rule="numerics.fast", reason="rounding may differ by batch", source=Source.DEFAULT
    )
    knob = Knob(name="numerics", role=ctx.role, ask=ctx.intent.numerics, is_capability=True)
    return settle(knob, facts | {"kernels.not_exact": inexact}, (exact, fast))
