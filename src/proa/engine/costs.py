"""The cost tables of built runners: those of an earlier start, else measured now and kept. Owns no decision."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from proa.kernels.cost import CostTable, write_costs
from proa.layers.base import torch_dtype
from proa.plan.costs import cost_paths, known_costs
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
