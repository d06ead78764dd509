"""Grouped-query attention: projections, optional q/k norm, rotation, cache, output. Kernels do the arithmetic."""

from __future__ import annotations

import torch

from proa.arch.blocks import AttentionSpec
from proa.kernels.bind import KernelSet
from proa.kernels.seam import HeadNorm, Heads, LayerKV, RopeRows
from proa.layers.base import BuildContext, ForwardBatch, Layer
from proa.layers.linear import ColumnLinear, RowLinear


class HeadScale(torch.nn.Module):
    """The weight [d] of a norm over each head."""

    def __init__(self, ctx: BuildContext) -> None:
        super().__init__()
        self.weight = ctx.parameter("weight")


class Attention(Layer):
    """Normed rows [T, D] -> [T, D]. Writes the rows' keys and values to the layer's cache, then attends over it."""

    def __init__(self, ctx: BuildContext, spec: AttentionSpec) -> None:
        super().__init__()
        self.qkv = ColumnLinear(ctx.child("qkv"))
        self.o = RowLinear(ctx.child("o"))
        if spec.qk_norm is not None:
            self.q_norm = HeadScale(ctx.child("q_norm"))
            self.k_norm = HeadScale(ctx.child("k_norm"))
        self._spec = spec
        self._heads = Heads(query=spec.num_heads, key_value=spec.num_kv_heads, size=spec.head_dim)
        self._head_norm: HeadNorm | None = None
        self._kernels = ctx.kernels

    def finish(self, kernels: KernelSet) -> None:
        norm = self._spec.qk_norm
        if norm is not None:
            query = self.q_norm.weight.float().expand(self._heads.query, -1)
            key = self.k_norm.weight.float().expand(self._heads.key_value, -1)
            self._head_norm = HeadNorm(weight=torch.cat((query, key)), eps=norm.eps)

    def forward(self, x: torch.Tensor, batch: ForwardBatch, rope: RopeRows, kv: LayerKV) -> torch.Tensor:
        queries = self._kernels.attn_in(x, self.qkv.packed, self._heads, self._head_norm, rope, kv, batch.write_slots)
        window, scale = self._spec.window, self._spec.scale
        parts = [
            self._kernels.attention(
                queries[segment.first : segment.first + segment.num_rows], kv, segment, window=window, scale=scale
            )
            for segment in batch.segments
        ]
        return self.o(parts[0] if len(parts) == 1 else torch.cat(parts))
