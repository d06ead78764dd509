"""The plan of one runner: its rules in their fixed order, its weight layout, and the proof that its rules fill it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, replace
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

from proa.arch.layout import WeightLayout
from proa.arch.parameters import decoder_parameters
from proa.arch.weights import NameMap, Place, Unknown
from proa.errors import WeightError
from proa.plan.context import RunnerContext, runner_facts
from proa.plan.digest import digest_of, plain, stable
from proa.plan.footprint import kept_bytes, state_bytes, step_bytes, weights_bytes
from proa.plan.kept import kept_forms
from proa.plan.planned import Planned
from proa.plan.rules import host, kernels, layout, linear_attention, moe, quant, rollback
from proa.plan.rules.memory import RunnerSize
from proa.plan.rules.states import StateSize
from proa.plan.runner_plan import RunnerPlan
from proa.units import Role


def decide(ctx: RunnerContext) -> RunnerPlan:
    """Every decision of one runner, from its own context only. Raises PlanError for an ask that cannot be met."""
    decided: dict[str, Any] = {}
    facts = runner_facts(ctx) | decided
    device = host.device(ctx, facts)
    decided["plan.device"] = device.value
    dtype = quant.dtype(ctx, facts)
    decided["plan.dtype"] = dtype.value.value
    kv_dtype, page_size = quant.kv_dtype(ctx, facts), layout.page_size(ctx, facts)
    decided |= {"plan.kv_dtype": kv_dtype.value.value, "plan.page_size": page_size.value}
    head, states = layout.head(ctx, facts), linear_attention.state_dtype(ctx, facts)
    decided |= {"plan.head": head.value, "plan.state_dtype": plain(states.value)}
    attention, matmul, experts = kernels.attention(ctx, facts), kernels.matmul(ctx, facts), kernels.moe(ctx, facts)
    sampling = kernels.sampling(ctx, facts)
    linear = linear_attention.linear_attention(ctx, facts)
    decided |= {"plan.matmul_kernel": matmul.value, "plan.moe_kernel": experts.value}
    shared = moe.shared_experts(ctx, facts)
    arrangement = WeightLayout(tied_head=head.value == layout.TIED, moe=shared.layouts)
    kept = kept_forms(ctx, arrangement)
    decided |= kept.facts()
    quantization = quant.quantization(ctx, facts)
    if quantization.value != quant.NONE:
        arrangement = replace(arrangement, blocks=kept.parameters, scale_columns=kept.scale_columns)
    plan = RunnerPlan(
        role=ctx.role,
        family=ctx.name,
        checkpoint=str(ctx.checkpoint.path),
        num_layers=len(ctx.spec.layers),
        device=device,
        dtype=dtype,
        kv_dtype=kv_dtype,
        quantization=quantization,
        attention=attention,
        linear_attention=linear,
        state_dtype=states,
        rollback=rollback.rollback(ctx, facts, linear, dtype.value, states.value),
        matmul_kernel=matmul,
        moe_kernel=experts,
        sampling_kernel=sampling,
        shared_experts=shared.decision,
        numerics=kernels.numerics(ctx, facts, attention, linear, matmul, experts, sampling),
        parallel=layout.parallel(ctx, facts),
        page_size=page_size,
        head=head,
        layout=arrangement,
        digest="",
    )
    return replace(plan, digest=_digest(ctx, plan))


def planned(ctx: RunnerContext, plan: RunnerPlan, names: NameMap, allow_unexpected: tuple[str, ...]) -> Planned:
    """What loading needs of a runner. `names` is the map of its rules in the plan's layout, with what its checkpoint
    holds beside them.

    Raises WeightError for rules that do not fill the model, and for a glob that would hide a tensor in use.
    """
    parameters = decoder_parameters(ctx.spec, plan.layout)
    names.check(parameters)
    return Planned(
        checkpoint=ctx.checkpoint,
        family=ctx.family,
        spec=ctx.spec,
        plan=plan,
        weights=ctx.weights,
        quant=ctx.quant,
        names=names.allowing(_allowed(ctx, names, plan.layout, allow_unexpected)),
        parameters=MappingProxyType(parameters),
    )


def _digest(ctx: RunnerContext, plan: RunnerPlan) -> str:
    """Covers what the model is and every decision; where the files lie and what is measured are not in it."""
    decisions = {knob: stable(decision) for knob, decision in plan.decisions().items()}
    draft = None if ctx.draft is None else asdict(ctx.draft)
    return digest_of([plan.role, draft or asdict(ctx.spec), decisions, asdict(plan.layout)])


def _allowed(ctx: RunnerContext, names: NameMap, chosen: WeightLayout, globs: Iterable[str]) -> dict[str, str]:
    """Unknown tensors that a glob allows to be left out, with that glob.

    Raises WeightError `weights/glob-hides-tensor` for a glob over a tensor that another layout would place: it is in
    use, only not by this plan, and allowing it would hide a wrong layout.
    """
    others = _every_map(ctx) if globs else ()
    allowed: dict[str, str] = {}
    for glob in globs:
        for name in ctx.checkpoint.tensors:
            if not fnmatchcase(name, glob) or isinstance(names.claim(name), Place):
                continue
            if any(isinstance(other.claim(name), Place) for other in others):
                raise WeightError(
                    "weights/glob-hides-tensor",
                    f"--allow-unexpected {glob!r} covers {name}, which another layout of this model would place.",
                    role=ctx.role.value,
                    facts=(f"plan: head = {'tied' if chosen.tied_head else 'own'}",),
                    hint="narrow the glob",
                )
            if isinstance(names.claim(name), Unknown):
                allowed[name] = glob
    return allowed


def _every_map(ctx: RunnerContext) -> tuple[NameMap, ...]:
    """The rules in every layout: tied or own head, shared experts fused or separate."""
    return tuple(
        NameMap(ctx.weights(ctx.spec, WeightLayout(tied_head=tied, moe=moe_layout)))
        for tied in (True, False)
        for moe_layout in moe.both_layouts(ctx)
    )


def runner_size(planned: Planned, *, draft_tokens: int) -> RunnerSize:
    """Bytes of one runner's resident weights, of one of its cache pages and of a request's states, where up to
    `draft_tokens` are proposed."""
    plan, spec = planned.plan, planned.spec
    row = sum(layer.state.kv_width for layer in spec.layers) * plan.kv_dtype.value.nbytes(1)
    return RunnerSize(
        role=plan.role,
        weights_bytes=weights_bytes(planned.parameters, plan),
        step_bytes=step_bytes(spec, planned.parameters, plan),
        page_bytes=row * plan.page_size.value,
        page_size=plan.page_size.value,
        slack=draft_tokens if plan.role is Role.DRAFT else 0,
        states=StateSize.of(
            state_bytes(spec, plan.dtype.value, plan.state_dtype.value),
            kept_bytes(spec, plan),
            plan.rollback.value,
            draft_tokens,
        ),
    )
