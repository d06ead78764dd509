"""How many ranks a plan is for, and the refusal to run more than one: such plans can be looked at, not built."""

from __future__ import annotations

from proa.errors import KernelUnavailable
from proa.plan.runner_plan import RunnerPlan


def ranks(tensor: int, expert: int) -> str:
    """The value of the `parallel` decision."""
    return f"tp={tensor} ep={expert}"


def refuse_more_ranks(plan: RunnerPlan) -> None:
    """Raises KernelUnavailable `plan/more-ranks` for a plan over several ranks. Called before a runner is built."""
    decision = plan.parallel
    if decision.value == ranks(1, 1):
        return
    raise KernelUnavailable(
        "plan/more-ranks",
        f"the plan is for {decision.value}, but this version of Proa runs one rank.",
        role=plan.role.value,
        facts=(f"asked: {decision.requested.origin}",),
        hint="leave out --tensor-parallel and --expert-parallel; `proa explain` plans with them",
    )
