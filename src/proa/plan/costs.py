"""Which cost tables stand beside a plan, as far as this host has measured them. No torch; measures nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from proa.kernels.cost import CostTable, cost_path, read_costs
from proa.plan.runner_plan import PlanSet


def cost_paths(plans: PlanSet, cache_dir: Path) -> dict[str, Path]:
    """By role, where the table of each runner lies, or would."""
    runners = (plans.target,) if plans.draft is None else (plans.target, plans.draft)
    threads = plans.host.threads.value
    return {plan.role.value: cost_path(cache_dir, plan.digest, threads) for plan in runners}


def known_costs(plans: PlanSet, cache_dir: Path, note: Callable[[str], None]) -> dict[str, CostTable]:
    """By role, the tables of an earlier start."""
    tables = {role: read_costs(path, note) for role, path in cost_paths(plans, cache_dir).items()}
    return {role: table for role, table in tables.items() if table is not None}
