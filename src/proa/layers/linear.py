"""Linear layers over a mesh. Own their parameters and packing; the arithmetic is the kernel set's."""

from __future__ import annotations

import torch
from torch import nn

from proa.kernels.bind import KernelSet
from proa.kernels.seam import Packed
from proa.layers.base import BuildContext, Layer


class Linear(Layer):
    """A weight [out, in] with an optional bias, packed once it is loaded."""

    packed: Packed

    def __init__(self, ctx: BuildContext) -> None:
        super().__init__()
        self.weight = ctx.parameter("weight")
        self.bias = ctx.optional("bias")
        self._kernels = ctx.kernels

    def finish(self, kernels: KernelSet) -> None:
        """Pack. Where the backend made a copy, the parameter keeps its shape and gives up its memory."""
        self.packed = kernels.pack(self.weight, self.bias)
        if self.packed.weight is not self.weight:
            self.weight = nn.Parameter(torch.empty_like(self.weight, device="meta"), requires_grad=False)


class ColumnLinear(Linear):
    """x [T, in] -> [T, out / size]: each rank holds a share of the output features."""

    def __init__(self, ctx: BuildContext) -> None:
        super().__init__(ctx)
        ctx.mesh.split(self.weight.shape[0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._kernels.matmul(x, self.packed)


class RowLinear(Linear):
    """x [T, in / size] -> [T, out]: each rank holds a share of the input features, and the results are summed."""

    def __init__(self, ctx: BuildContext) -> None:
        super().__init__(ctx)
        ctx.mesh.split(self.weight.shape[1])
        self._mesh = ctx.mesh

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._mesh.sum(self._kernels.matmul(x, self.packed))
