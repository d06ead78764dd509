"""Gated MLP."""

from __future__ import annotations

import torch
from torch import nn

from proa.arch.blocks import ActivationSpec
from proa.layers.base import BuildContext
from proa.layers.linear import ColumnLinear, RowLinear


class FFN(nn.Module):
    """Normed rows [T, D] -> down(activation(gate(x), up(x))) [T, D]."""

    def __init__(self, ctx: BuildContext, activation: ActivationSpec) -> None:
        super().__init__()
        self.gate_up = ColumnLinear(ctx.child("gate_up"))
        self.down = RowLinear(ctx.child("down"))
        self._activation = activation
        self._kernels = ctx.kernels
        self._mesh = ctx.mesh

    def forward(self, x: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """As layers/moe.py: MoE. `token_ids` make no difference here."""
        del token_ids
        return self._mesh.sum(self.share(x))

    def share(self, x: torch.Tensor) -> torch.Tensor:
        """The part of the sum that lies on this rank."""
        return self._kernels.ffn(x, self.gate_up.packed, self.down.packed, self._activation)
