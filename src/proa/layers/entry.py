"""How the rows of a draft begin: from the embedding of a token and a hidden row of the position before it."""

from __future__ import annotations

import torch
from torch import nn

from proa.arch.decoder import EntrySpec
from proa.layers.base import BuildContext
from proa.layers.linear import ColumnLinear
from proa.layers.norm import RMSNorm


class Entry(nn.Module):
    """proj([norm(embedding) ; norm(hidden)]): float32 [T, D] and [T, D] of any type -> the float32 residual [T, D]."""

    def __init__(self, ctx: BuildContext, spec: EntrySpec) -> None:
        super().__init__()
        self.embed_norm = RMSNorm(ctx.child("embed_norm"), spec.norm)
        self.hidden_norm = RMSNorm(ctx.child("hidden_norm"), spec.norm)
        self.proj = ColumnLinear(ctx.child("proj"))

    def forward(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        both = torch.cat((self.embed_norm(embedded, None), self.hidden_norm(hidden.float(), None)), dim=-1)
        return self.proj(both).float()
