"""What is measured at start: the cost tables of built runners, and what undoing a proposal costs a plan's kernels.

Those of an earlier start hold; what is missing is measured now and kept. Owns no decision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from proa.kernels.bind import bind
from proa.kernels.cost import CostTable, write_costs
from proa.kernels.probing.rollback import measure_rollback
from proa.kernels.rollback import add_rollbacks, rollback_path
from proa.layers.base import kernel_names, torch_dtype
from proa.plan.costs import cost_paths, known_costs, open_rollbacks
from proa.plan.planned import Resolved
from proa.runner.runner import Runner
from proa.speculative.costs import measure


def start_costs(
    resolved: Resolved, runners: Mapping[str, Runner], cache_dir: Path, note: Callable[[str], None]
) -> dict[str, CostTable]:
    """By role. Measured where draft lengths wait for them; else what is known."""
    plans = resolved.plans
    tables = known_costs(plans, cache_dir, note)
    if plans.contract is None or not plans.contract.measures_length:
        return tables
    paths = cost_paths(plans, cache_dir)
    for planned in resolved.runners:
        role = planned.plan.role.value
        if role not in tables:
            spec, dtype = planned.spec, torch_dtype(planned.plan.dtype.value)
            tables[role] = measure(
                runners[role],
                vocab=spec.vocab,
                max_positions=min(plans.schedule.max_model_len.value, spec.max_positions),
                hidden=None if spec.entry is None else (spec.hidden, dtype),
            )
            write_costs(paths[role], tables[role], note)
    return tables


def start_rollbacks(resolved: Resolved, library: Path | None, cache_dir: Path, note: Callable[[str], None]) -> bool:
    """Measure what the plans left open of rollbacks, with their own kernels; True where they did, so that a plan made
    now knows more. `library` is the compiled one of the native kernels."""
    measured = {
        str(case): measure_rollback(
            case,
            bind(kernel_names(planned.plan, planned.spec), library, resolved.plugins),
            (torch_dtype(case.dtype), torch_dtype(case.state_dtype)),
        )
        for planned in resolved.runners
        if (case := open_rollbacks(resolved).get(planned.plan.role)) is not None
    }
    if measured:
        add_rollbacks(rollback_path(cache_dir), measured, note)
    return bool(measured)
