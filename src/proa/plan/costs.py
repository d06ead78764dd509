"""What is measured beside a plan: where it lies, what is known, what is still open. No torch; measures nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from proa.arch.decoder import DecoderSpec
from proa.arch.delta_blocks import DeltaSpec
from proa.kernels.cost import CostTable, cost_path, read_costs
from proa.kernels.rollback import RollbackCase
from proa.plan.planned import Resolved
from proa.plan.runner_plan import LinearAttentionPlan, PlanSet, RunnerPlan
from proa.units import DType, Role


def cost_paths(plans: PlanSet, cache_dir: Path) -> dict[str, Path]:
    """By role, where the table of each runner lies, or would."""
    runners = (plans.target,) if plans.draft is None else (plans.target, plans.draft)
    threads = plans.host.threads.value
    return {plan.role.value: cost_path(cache_dir, _timed(plan), threads) for plan in runners}


def known_costs(plans: PlanSet, cache_dir: Path, note: Callable[[str], None]) -> dict[str, CostTable]:
    """By role, the tables of an earlier start."""
    tables = {role: read_costs(path, note) for role, path in cost_paths(plans, cache_dir).items()}
    return {role: table for role, table in tables.items() if table is not None}


def rollback_case(
    role: Role,
    spec: DecoderSpec,
    linear: LinearAttentionPlan,
    dtype: DType,
    state_dtype: DType | None,
    draft_tokens: int,
    threads: int,
) -> RollbackCase | None:
    """What there is to measure of a runner's rollback; None without linear attention, or without proposals."""
    decode, verify = linear.decode.value, linear.verify.value
    if decode is None or verify is None or state_dtype is None or not draft_tokens:
        return None
    return RollbackCase(
        decode=decode,
        verify=verify,
        dtype=dtype,
        state_dtype=state_dtype,
        layers=tuple(layer.mixer for layer in spec.delta_layers if isinstance(layer.mixer, DeltaSpec)),
        draft_tokens=draft_tokens,
        is_draft=role is Role.DRAFT,
        threads=threads,
    )


def open_rollbacks(resolved: Resolved) -> dict[Role, RollbackCase]:
    """By role, what a plan on this host wanted to know and nobody has measured."""
    plans = resolved.plans
    found: dict[Role, RollbackCase] = {}
    for planned in resolved.runners:
        plan, contract = planned.plan, plans.contract
        if contract is None or plan.device.value != "cpu" or not plan.rollback.requested.is_auto:
            continue
        case = rollback_case(
            plan.role,
            planned.spec,
            plan.linear_attention,
            plan.dtype.value,
            plan.state_dtype.value,
            contract.num_draft_tokens.value,
            plans.host.threads.value,
        )
        if case is not None and plan.rollback.inputs.get("measured.rollback") is None:
            found[plan.role] = case
    return found


def _timed(plan: RunnerPlan) -> str:
    """What of a plan decides how long a forward takes. The way of rollback is measured, hence not in the digest."""
    return plan.digest if plan.rollback.value is None else f"{plan.digest} {plan.rollback.value.value}"
