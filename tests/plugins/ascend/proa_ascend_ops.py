"""The ops of the fake Ascend backend: the reference's arithmetic, with its runner's plan in hand."""

from __future__ import annotations

from collections.abc import Mapping

from proa.kernels.reference.delta import ReferenceDelta
from proa.units import Phase


class AscendDelta(ReferenceDelta):
    name = "ascend"

    def __init__(self, plan: Mapping[Phase, str]) -> None:
        self.plan = dict(plan)
