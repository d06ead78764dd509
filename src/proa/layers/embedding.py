"""Token embedding and output head, tied or not. Both split over the vocabulary when ranks exist."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from proa.kernels.bind import KernelSet
from proa.kernels.seam import Packed
from proa.layers.base import BuildContext, Layer
from proa.layers.linear import ColumnLinear


class Embedding(nn.Module):
    """token ids [T] -> the float32 residual stream [T, D]."""

    def __init__(self, ctx: BuildContext) -> None:
        super().__init__()
        self.weight = ctx.parameter("weight")
        ctx.mesh.split(self.weight.shape[0])

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(token_ids, self.weight).float()


class Head(ColumnLinear):
    """rows [R, D] -> float32 logits [R, V]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).float()


class TiedHead(Layer):
    """As Head, with the embedding's matrix, which stays unpacked too where packing makes a copy: rows are looked up in
    it."""

    packed: Packed

    def __init__(self, ctx: BuildContext, embedding: Embedding) -> None:
        super().__init__()
        self._embedding = (embedding,)  # in a tuple: its parameter belongs to the embedding, not here
        self._kernels = ctx.kernels

    def finish(self, kernels: KernelSet) -> None:
        self.packed = kernels.pack(self._embedding[0].weight, None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._kernels.matmul(x, self.packed).float()
