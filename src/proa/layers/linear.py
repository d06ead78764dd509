"""Linear layers over a mesh. Own their parameters and packing; the arithmetic is the kernel set's."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from proa.kernels.kernel_set import KernelSet
from proa.kernels.seam import Codes, Packed
from proa.layers.base import BuildContext, Layer
from proa.units import DType


class Linear(Layer):
    """A weight [out, in] with an optional bias, packed once it is loaded."""

    packed: Packed

    def __init__(self, ctx: BuildContext) -> None:
        super().__init__()
        self.weight = ctx.parameter("weight")
        self.weight_scale = ctx.scales("weight")
        self.bias = ctx.optional("bias")
        self._blocks, self._columns, self._dtype = ctx.blocks("weight"), ctx.scale_columns("weight"), ctx.dtype
        self._kernels = ctx.kernels

    def finish(self, kernels: KernelSet) -> None:
        if self.weight_scale is None:
            self.packed = packed(kernels, self.weight, self.bias, self._blocks, self._dtype)
        else:
            codes = Codes(codes=self.weight, scales=self.weight_scale, columns=self._columns)
            self.packed = kernels.pack_codes(codes, self.bias, self._dtype)
        self.weight = given_up(self.weight, self.packed)

    def held(self) -> Iterable[tuple[torch.Tensor, int]]:
        yield self.packed.weight, self.packed.nbytes
        if self.bias is not None:
            yield self.bias, self.bias.nbytes


def packed(
    kernels: KernelSet, weight: torch.Tensor, bias: torch.Tensor | None, blocks: DType | None, dtype: torch.dtype
) -> Packed:
    """A loaded weight as its backend wants it; `dtype` is that of the activations."""
    return kernels.pack(weight, bias) if blocks is None else kernels.pack_blocks(weight, bias, blocks, dtype)


def given_up(weight: nn.Parameter, packed: Packed) -> nn.Parameter:
    """The parameter, or where the backend packed a copy a placeholder of its shape without memory."""
    return weight if packed.weight is weight else _placeholder(weight)


def kept(weight: nn.Parameter, packed: torch.Tensor) -> nn.Parameter:
    """As `given_up`, for weights that a backend may also pack in place or in parts of them."""
    is_same = packed.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
    return weight if is_same else _placeholder(weight)


def _placeholder(weight: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(weight, device="meta"), requires_grad=False)


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
