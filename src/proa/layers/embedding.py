"""Token embedding and output head, tied or not. Both split over the vocabulary when ranks exist."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from proa.kernels.kernel_set import KernelSet
from proa.kernels.seam import Packed
from proa.layers.base import BuildContext, Layer
from proa.layers.linear import ColumnLinear, given_up, packed


class Embedding(Layer):
    """token ids [T] -> the float32 residual stream [T, D]."""

    rows: Packed

    def __init__(self, ctx: BuildContext) -> None:
        super().__init__()
        self.weight = ctx.parameter("weight")
        self.blocks, self.dtype = ctx.blocks("weight"), ctx.dtype
        ctx.mesh.split(self.weight.shape[0])
        self._kernels = ctx.kernels

    def finish(self, kernels: KernelSet) -> None:
        """Blocks are read through the head, which is tied to them: a plan keeps no other table in blocks."""
        if self.blocks is None:
            self.rows = kernels.table(self.weight)

    def read_from(self, packed: Packed) -> None:
        """Look rows up in the head's packed form of the same matrix, and give up the unpacked one."""
        self.rows = packed
        self.weight = given_up(self.weight, packed)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._kernels.lookup(self.rows, token_ids)


class Head(ColumnLinear):
    """rows [R, D] -> float32 logits [R, V]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._kernels.logits(x, self.packed)


class TiedHead(Layer):
    """As Head, with the embedding's matrix. Where packing makes a copy, the embedding reads its rows from that copy if
    its backend can, else both stay."""

    packed: Packed

    def __init__(self, ctx: BuildContext, embedding: Embedding) -> None:
        super().__init__()
        self._embedding = (embedding,)  # in a tuple: its parameter belongs to the embedding, not here
        self._kernels = ctx.kernels

    def reads(self) -> Iterable[nn.Parameter]:
        return self._embedding[0].parameters()

    def finish(self, kernels: KernelSet) -> None:
        embedding = self._embedding[0]
        self.packed = packed(kernels, embedding.weight, None, embedding.blocks, embedding.dtype)
        if kernels.has_rows(self.packed):
            embedding.read_from(self.packed)

    def held(self) -> Iterable[tuple[torch.Tensor, int]]:
        yield self.packed.weight, self.packed.nbytes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._kernels.logits(x, self.packed)
