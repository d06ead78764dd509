"""Tables of ids in a checkpoint: each must name something that the model has. Owns no other check of values."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from proa.errors import WeightError
from proa.plan.planned import Planned


def bounds(planned: Planned) -> dict[str, int]:
    """Of every parameter that holds ids: what all of them are below (arch/layout.py: ParameterInfo.below)."""
    return {name: info.below for name, info in planned.parameters.items() if info.below is not None}


def check_tables(planned: Planned, tables: Mapping[str, torch.Tensor]) -> None:
    """Raises WeightError `weights/bad-id` for a loaded id outside its bounds, naming the stored tensor: a kernel would
    read past its experts. `tables` are the parameters that `bounds` names."""
    below = bounds(planned)
    if not below or planned.plan.device.value == "meta":
        return
    for place in planned.names.expected().values():
        name = place.fills[0].parameter
        if name in below:
            _check(planned.plan.role.value, place.group, name, tables[name], below[name])


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
