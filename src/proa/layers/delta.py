"""Linear attention by the gated delta rule (GDN, KDA): projections, the rule, output. Kernels do the arithmetic."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from proa.arch.blocks import RopeSpec
from proa.arch.delta_blocks import DeltaSpec
from proa.kernels.delta import DeltaRows, DeltaState, DeltaWeights, StateSlots
from proa.kernels.kernel_set import KernelSet
from proa.kernels.latent_seam import Chosen
from proa.kernels.seam import RopeRows, Segment
from proa.layers.base import BuildContext, ForwardBatch, Layer, Weight
from proa.layers.linear import ColumnLinear, RowLinear
from proa.units import Phase


class Delta(Layer):
    """Normed rows [T, D] -> [T, D]. Reads and writes the states that the batch names for each segment."""

    weights: DeltaWeights

    def __init__(self, ctx: BuildContext, spec: DeltaSpec) -> None:
        """Raises TypeError where the runner's plan names no kernel of linear attention for a phase."""
        super().__init__()
        missing = [phase.value for phase in Phase if phase not in ctx.kernels.names.delta]
        if missing:
            raise TypeError(f"{ctx.prefix} is linear attention, and its plan has no kernel for {', '.join(missing)}")
        self.proj = ColumnLinear(ctx.child("proj"))
        if spec.rank is not None:
            self.a_down, self.a_up = ColumnLinear(ctx.child("a_down")), ColumnLinear(ctx.child("a_up"))
            self.z_down, self.z_up = ColumnLinear(ctx.child("z_down")), ColumnLinear(ctx.child("z_up"))
        self.conv = Weight(ctx.child("conv"))
        self.a_log = ctx.parameter("a_log")
        self.dt_bias = ctx.parameter("dt_bias")
        self.norm = Weight(ctx.child("norm"))
        self.o = RowLinear(ctx.child("o"))
        self._spec, self._kernels = spec, ctx.kernels

    def finish(self, kernels: KernelSet) -> None:
        self.weights = DeltaWeights(
            conv=self.conv.weight.detach().float().squeeze(1).T.contiguous(),
            rate=self.a_log.detach().float().exp(),
            bias=self.dt_bias.detach().float(),
            norm=self.norm.weight.detach().float() + self._spec.norm.offset,
        )

    def forward(
        self,
        x: torch.Tensor,
        batch: ForwardBatch,
        ropes: Mapping[RopeSpec, RopeRows],
        state: DeltaState,
        chosen: Chosen | None,
    ) -> tuple[torch.Tensor, Chosen | None]:
        """`ropes` and `chosen` are for other kinds of attention, and the latter is handed on."""
        rows = self._rows(x)
        parts = [
            self._kernels.delta(_of(rows, segment), self.weights, self._spec, state, segment, slots)
            for segment, slots in zip(batch.segments, batch.states, strict=True)
        ]
        return self.o(parts[0] if len(parts) == 1 else torch.cat(parts)), chosen

    def replay(self, state: DeltaState, counts: np.ndarray, slots: StateSlots) -> None:
        """As kernels/delta.py: DeltaOps.replay."""
        self._kernels.replay(self.weights, self._spec, state, counts, slots)

    def _rows(self, x: torch.Tensor) -> DeltaRows:
        mixed = self.proj(x)
        if self._spec.rank is None:
            return DeltaRows.merged(mixed, self._spec)
        return DeltaRows(mixed=mixed, decay=self.a_up(self.a_down(x)), gate=self.z_up(self.z_down(x)))


def _of(rows: DeltaRows, segment: Segment) -> DeltaRows:
    """The segment's rows of the batch's."""
    if segment.num_rows == len(rows.mixed):
        return rows
    part = slice(segment.first, segment.first + segment.num_rows)
    return DeltaRows(mixed=rows.mixed[part], decay=rows.decay[part], gate=rows.gate[part])
