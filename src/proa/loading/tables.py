"""Tables of ids in a checkpoint: each must name something that the model has. Owns no other check of values."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from proa.errors import WeightError
from proa.plan.planned import Planned


def check_tables(planned: Planned, parameters: Mapping[str, torch.Tensor]) -> None:
    """Raises WeightError `weights/bad-id` for a loaded id outside its bounds (arch/layout.py: ParameterInfo.below),
    naming the stored tensor: a kernel would read past its experts."""
    bounds = {name: info.below for name, info in planned.parameters.items() if info.below is not None}
    if not bounds or planned.plan.device.value == "meta":
        return
    for place in planned.names.expected().values():
        name = place.fills[0].parameter
        if name in bounds:
            _check(planned.plan.role.value, place.group, name, parameters[name], bounds[name])


def _check(role: str, tensor: str, name: str, table: torch.Tensor, below: int) -> None:
    wrong = ((table < 0) | (table >= below)).nonzero()
    if len(wrong) == 0:
        return
    row, column = wrong[0].tolist()
    raise WeightError(
        "weights/bad-id",
        f"{tensor}: names what the model does not have: {int(table[row, column])} in row {row}.",
        role=role,
        facts=(f"{name} lists numbers from 0 to {below - 1}; {len(wrong)} are others",),
        hint="fetch the file again, or see whether config.json belongs to it",
    )
