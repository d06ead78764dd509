"""The plan of one runner: its rules in their fixed order, its weight layout, and the proof that its rules fill it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, replace
from fnmatch import fnmatchcase
from types import MappingProxyType

from proa.arch.parameters import decoder_parameters
from proa.arch.weights import NameMap, Place, Unknown, WeightLayout
from proa.errors import WeightError
from proa.kernels.catalog import BLOCK_FORMATS
from proa.plan.context import RunnerContext, runner_facts
from proa.plan.digest import digest_of, stable
from proa.plan.footprint import weights_bytes
from proa.plan.planned import Planned
from proa.plan.rules import absent, host, kernels, layout, quant
from proa.plan.rules.memory import RunnerSize
from proa.plan.runner_plan import RunnerPlan
from proa.units import DType


def plan_runner(ctx: RunnerContext, allow_unexpected: tuple[str, ...]) -> Planned:
    """Every decision of one runner, from its own context only.

    Raises PlanError for an ask that cannot be met, WeightError for a glob that would hide a tensor in use.
    """
    plan = _decide(ctx)
    names = NameMap(ctx.family.weights(ctx.spec, plan.layout))
    parameters = decoder_parameters(ctx.spec, plan.layout)
    names.check(parameters)
    return Planned(
        checkpoint=ctx.checkpoint,
        family=ctx.family,
        spec=ctx.spec,
        plan=plan,
        names=names.allowing(_allowed(ctx, names, plan.layout, allow_unexpected)),
        parameters=MappingProxyType(parameters),
    )


def _decide(ctx: RunnerContext) -> RunnerPlan:
    facts = dict(runner_facts(ctx))
    device = host.device(ctx, facts)
    facts["plan.device"] = device.value
    dtype = quant.dtype(ctx, facts)
    facts["plan.dtype"] = dtype.value.value
    kv_dtype, page_size = quant.kv_dtype(ctx, facts), layout.page_size(ctx, facts)
    facts |= {"plan.kv_dtype": kv_dtype.value.value, "plan.page_size": page_size.value}
    head = layout.head(ctx, facts)
    facts["plan.head"] = head.value
    attention, matmul = kernels.attention(ctx, facts), kernels.matmul(ctx, facts)
    tied = head.value == layout.TIED
    blocks = stored_blocks(ctx, tied)
    facts |= {"plan.matmul_kernel": matmul.value, "stored.blocks": [[name, dtype.value] for name, dtype in blocks]}
    quantization = quant.quantization(ctx, facts)
    plan = RunnerPlan(
        role=ctx.role,
        family=ctx.family.name,
        checkpoint=str(ctx.checkpoint.path),
        num_layers=len(ctx.spec.layers),
        device=device,
        dtype=dtype,
        kv_dtype=kv_dtype,
        quantization=quantization,
        attention=attention,
        linear_attention=absent.linear_attention(ctx, facts),
        matmul_kernel=matmul,
        moe_kernel=absent.moe_kernel(ctx, facts),
        shared_experts=absent.shared_experts(ctx, facts),
        numerics=kernels.numerics(ctx, facts, attention, matmul),
        parallel=layout.parallel(ctx, facts),
        page_size=page_size,
        head=head,
        layout=WeightLayout(tied_head=tied, blocks=blocks if quantization.value != quant.NONE else ()),
        digest="",
    )
    return replace(plan, digest=_digest(ctx, plan))


def stored_blocks(ctx: RunnerContext, tied_head: bool) -> tuple[tuple[str, DType], ...]:
    """Linear maps all of whose stored parts are blocks of one format that kernels compute on, with that format."""
    layout = WeightLayout(tied_head=tied_head)
    stored: dict[str, set[DType]] = {}
    for source, place in NameMap(ctx.family.weights(ctx.spec, layout)).expected().items():
        if source in ctx.checkpoint.tensors:
            stored.setdefault(place.parameter, set()).add(ctx.checkpoint.tensors[source].dtype)
    kept: list[tuple[str, DType]] = []
    for name, info in decoder_parameters(ctx.spec, layout).items():
        is_linear = len(info.shape) == 2 and (tied_head or name != "embed.weight")
        formats = stored.get(name, set())
        if is_linear and len(formats) == 1 and formats <= BLOCK_FORMATS.keys():
            kept += [(name, format) for format in formats]
    return tuple(kept)


def _digest(ctx: RunnerContext, plan: RunnerPlan) -> str:
    """Covers what the model is and every decision; where the files lie and what is measured are not in it."""
    decisions = {knob: stable(decision) for knob, decision in plan.decisions().items()}
    return digest_of([plan.role, asdict(ctx.spec), decisions, asdict(plan.layout)])


def _allowed(ctx: RunnerContext, names: NameMap, chosen: WeightLayout, globs: Iterable[str]) -> dict[str, str]:
    """Unknown tensors that a glob allows to be left out, with that glob.

    Raises WeightError `weights/glob-hides-tensor` for a glob over a tensor that another layout would place: it is in
    use, only not by this plan, and allowing it would hide a wrong layout.
    """
    others = [
        NameMap(ctx.family.weights(ctx.spec, other))
        for other in (WeightLayout(tied_head=True), WeightLayout(tied_head=False))
        if other != chosen
    ]
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
                    facts=(f"plan: tied_head = {chosen.tied_head}",),
                    hint="narrow the glob",
                )
            if isinstance(names.claim(name), Unknown):
                allowed[name] = glob
    return allowed


def runner_size(planned: Planned, *, slack: int) -> RunnerSize:
    """Bytes of one runner's resident weights and of one of its cache pages."""
    plan = planned.plan
    row = sum(layer.state.kv_width for layer in planned.spec.layers) * plan.kv_dtype.value.nbytes(1)
    return RunnerSize(
        role=plan.role,
        weights_bytes=weights_bytes(planned.parameters, plan),
        page_bytes=row * plan.page_size.value,
        page_size=plan.page_size.value,
        slack=slack,
    )
