"""RMSNorm over the residual stream, which is float32 in every model."""

from __future__ import annotations

import torch

from proa.arch.blocks import NormSpec
from proa.kernels.kernel_set import KernelSet
from proa.layers.base import BuildContext, Layer


class RMSNorm(Layer):
    """float32 residual [T, D] -> normed rows in the compute dtype."""

    scale: torch.Tensor  # the weight in float32, its offset added, once it is loaded

    def __init__(self, ctx: BuildContext, spec: NormSpec) -> None:
        super().__init__()
        self.weight = ctx.parameter("weight")
        self._eps, self._offset = spec.eps, spec.offset
        self._dtype = ctx.dtype
        self._kernels = ctx.kernels

    def finish(self, kernels: KernelSet) -> None:
        self.scale = self.weight.detach().float() + self._offset

    def forward(self, residual: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
        """Normed residual; `delta`, the output of the block before, is first added to `residual` in place."""
        if delta is None:
            return self._kernels.norm(residual, self.scale, self._eps, self._dtype)
        return self._kernels.add_norm(residual, delta, self.scale, self._eps, self._dtype)
