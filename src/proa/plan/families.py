"""Every target family, the drafts that can serve it, and the decisions that each answers. Generated from the tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from proa.arch.family import Family
from proa.plan.rules.speculative import LATER, REQUIRES
from proa.plan.runner_plan import PhasePlan, RunnerPlan
from proa.units import Algorithm, Phase


def families_json(families: Sequence[Family]) -> list[dict[str, Any]]:
    return [
        {
            "family": family.name,
            "architectures": list(family.architectures),
            "drafts": list(draft_algorithms()),
            "decisions": list(runner_knobs()),
        }
        for family in families
    ]


def families_table(families: Sequence[Family]) -> str:
    lines: list[str] = []
    for family in families:
        lines.append(f"{family.name}  ({', '.join(family.architectures)})")
        lines.append(f"  drafts     {', '.join(draft_algorithms())}")
        lines.append(f"  decisions  {', '.join(runner_knobs())}")
    return "\n".join(lines)


def draft_algorithms() -> tuple[str, ...]:
    """What can propose for a family without a draft of its own: any smaller model, and the request's own tokens."""
    return tuple(a.value for a, requires in REQUIRES.items() if a is not Algorithm.NONE and LATER not in requires)


def runner_knobs() -> tuple[str, ...]:
    """The knobs of a runner's plan, read off the plan's type."""
    knobs: list[str] = []
    for leaf in fields(RunnerPlan):
        if str(leaf.type) == PhasePlan.__name__:
            knobs += [f"{leaf.name}.{phase.value}" for phase in Phase]
        elif str(leaf.type).startswith("Decision"):
            knobs.append(leaf.name)
    return tuple(knobs)
