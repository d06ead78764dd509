"""Grouped-query attention: projections, optional q/k norm, rotation, cache, gate, output. Kernels do the arithmetic."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from proa.arch.blocks import AttentionSpec, RopeSpec
from proa.kernels.kernel_set import KernelSet
from proa.kernels.latent_seam import Chosen
from proa.kernels.seam import HeadNorm, Heads, LayerKV, RopeRows
from proa.layers.base import BuildContext, ForwardBatch, Layer, Weight
from proa.layers.linear import ColumnLinear, RowLinear


class Attention(Layer):
    """Normed rows [T, D] -> [T, D]. Writes the rows' keys and values to the layer's cache, then attends over it."""

    def __init__(self, ctx: BuildContext, spec: AttentionSpec) -> None:
        super().__init__()
        self.qkv = ColumnLinear(ctx.child("qkv"))
        self.o = RowLinear(ctx.child("o"))
        if spec.qk_norm is not None:
            self.q_norm = Weight(ctx.child("q_norm"))
            self.k_norm = Weight(ctx.child("k_norm"))
        self._spec = spec
        self._heads = Heads(query=spec.num_heads, key_value=spec.num_kv_heads, size=spec.head_dim)
        self._head_norm: HeadNorm | None = None
        self._kernels = ctx.kernels

    def finish(self, kernels: KernelSet) -> None:
        norm = self._spec.qk_norm
        if norm is not None:
            query = self.q_norm.weight.float().view(-1, self._heads.size).expand(self._heads.query, -1)
            key = self.k_norm.weight.float().view(-1, self._heads.size).expand(self._heads.key_value, -1)
            weight = torch.cat((query, key)) + norm.offset
            self._head_norm = HeadNorm(weight=weight, eps=norm.eps, is_whole=norm.is_whole)

    def forward(
        self,
        x: torch.Tensor,
        batch: ForwardBatch,
        ropes: Mapping[RopeSpec, RopeRows],
        kv: LayerKV,
        chosen: Chosen | None,
    ) -> tuple[torch.Tensor, Chosen | None]:
        """`chosen` is for latent layers only, and handed on."""
        rope, scaling = ropes[self._spec.rope], self._spec.query_scale
        queries, rest = self._kernels.attn_in(
            x, self.qkv.packed, self._heads, self._head_norm, rope, kv, batch.write_slots
        )
        if scaling is not None:
            queries = self._kernels.scale_queries(queries, batch.positions, scaling)
        window, scale = self._spec.window, self._spec.scale
        parts = [
            self._kernels.attention(
                queries[segment.first : segment.first + segment.num_rows], kv, segment, window=window, scale=scale
            )
            for segment in batch.segments
        ]
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self.o(self._kernels.gate(out, rest) if self._spec.is_gated else out), chosen
