"""Multi-head latent attention: projections, latent cache, absorbed attention, and the indexer that thins it out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from proa.arch.blocks import IndexerSpec, MLASpec, RopeSpec
from proa.kernels.kernel_set import KernelSet
from proa.kernels.latent_seam import Absorbed, Chosen, IndexNorm, LatentKV, LatentShape
from proa.kernels.seam import RopeRows
from proa.layers.base import BuildContext, ForwardBatch, Layer, Weight
from proa.layers.linear import ColumnLinear, RowLinear, kept

Rotations = Mapping[RopeSpec, RopeRows]


class LatentUp(Layer):
    """The up-projection from latent rows to keys and values, absorbed into queries and results."""

    absorbed: Absorbed

    def __init__(self, ctx: BuildContext, shape: LatentShape) -> None:
        super().__init__()
        if ctx.blocks("weight") is not None or ctx.scale_columns("weight"):
            raise ValueError(f"{ctx.prefix} is used head by head, which its stored block format does not allow")
        self.weight = ctx.parameter("weight")
        self._shape = shape

    def finish(self, kernels: KernelSet) -> None:
        self.absorbed = kernels.absorb(self.weight, self._shape)
        self.weight = kept(self.weight, self.absorbed.key)

    def held(self) -> Iterable[tuple[torch.Tensor, int]]:
        """Both halves, as kernels/seam.py: Packed counts, without rows that fill the last panel."""
        yield self.absorbed.key, self.weight.nbytes


class KeyNorm(Layer):
    """Weight and bias [i] of the layer norm of index keys."""

    packed: IndexNorm

    def __init__(self, ctx: BuildContext) -> None:
        super().__init__()
        self.weight = ctx.parameter("weight")
        self.bias = ctx.parameter("bias")

    def finish(self, kernels: KernelSet) -> None:
        self.packed = IndexNorm(weight=self.weight.detach().float(), bias=self.bias.detach().float())


class Indexer(Layer):
    """Chooses the rows that each query attends to. Reads the normed input and the query's low-rank rows."""

    def __init__(self, ctx: BuildContext, spec: IndexerSpec) -> None:
        super().__init__()
        self.q = ColumnLinear(ctx.child("q"))
        self.k = ColumnLinear(ctx.child("k"))
        self.k_norm = KeyNorm(ctx.child("k_norm"))
        self.weights = ColumnLinear(ctx.child("weights"))
        self._spec = spec
        self._kernels = ctx.kernels

    def finish(self, kernels: KernelSet) -> None:
        """Its parts do that."""

    def forward(
        self, x: torch.Tensor, low_rank: torch.Tensor, batch: ForwardBatch, ropes: Rotations, kv: LatentKV
    ) -> Chosen:
        return self._kernels.index(
            self.q(low_rank),
            self.k(x),
            self.weights(x),
            self.k_norm.packed,
            self._spec,
            ropes[self._spec.rope],
            kv,
            batch.segments,
            batch.write_slots,
        )


class MLA(Layer):
    """Normed rows [T, D] -> [T, D]. Writes the rows' latents to the layer's cache, then attends over it."""

    def __init__(self, ctx: BuildContext, spec: MLASpec) -> None:
        super().__init__()
        shape = LatentShape(
            heads=spec.num_heads, nope=spec.nope_dim, rope=spec.rope_dim, value=spec.value_dim, rank=spec.kv_rank
        )
        self.qkv_a = ColumnLinear(ctx.child("qkv_a"))
        if spec.q_rank is not None:
            self.q_norm = Weight(ctx.child("q_norm"))
            self.q_b = ColumnLinear(ctx.child("q_b"))
        self.kv_norm = Weight(ctx.child("kv_norm"))
        self.kv_b = LatentUp(ctx.child("kv_b"), shape)
        self.o = RowLinear(ctx.child("o"))
        indexer = spec.indexer if spec.indexer is not None and spec.indexer.is_full else None
        self.indexer = None if indexer is None else Indexer(ctx.child("indexer"), indexer)
        self._spec, self._shape = spec, shape
        self._kernels = ctx.kernels

    def finish(self, kernels: KernelSet) -> None:
        offset = self._spec.norm.offset
        self._latent_scale = self.kv_norm.weight.detach().float() + offset
        if self._spec.q_rank is not None:
            self._query_scale = self.q_norm.weight.detach().float() + offset

    def forward(
        self, x: torch.Tensor, batch: ForwardBatch, ropes: Rotations, kv: LatentKV, chosen: Chosen | None
    ) -> tuple[torch.Tensor, Chosen | None]:
        """`chosen`: the selection of the last layer before that had a full indexer; returned is that of this layer, or
        of the last one still."""
        spec, kernels = self._spec, self._kernels
        merged = self.qkv_a(x)  # held until the end: what follows reads parts of it
        latent_from = merged.shape[1] - self._shape.rank - self._shape.rope
        first, latent = merged[:, :latent_from], merged[:, latent_from:]
        queries = first
        if spec.q_rank is not None:
            first = kernels.query_norm(first, self._query_scale, spec.norm.eps)
            queries = self.q_b(first)
        rope = None if spec.rope is None else ropes[spec.rope]
        queries = kernels.latent_write(
            queries, latent, self._latent_scale, spec.norm.eps, self._shape, rope, kv, batch.write_slots
        )
        if spec.query_scale is not None:
            queries = kernels.scale_queries(queries, batch.positions, spec.query_scale)
        if self.indexer is not None:
            chosen = self.indexer(x, first if spec.q_rank is not None else x, batch, ropes, kv)
        return self.o(self._attend(queries, batch, kv, chosen if spec.indexer is not None else None)), chosen

    def _attend(self, queries: torch.Tensor, batch: ForwardBatch, kv: LatentKV, chosen: Chosen | None) -> torch.Tensor:
        absorbed, scale = self.kv_b.absorbed, self._spec.scale
        parts = [
            self._kernels.latent_attention(
                queries[part.first : part.first + part.num_rows],
                absorbed,
                kv,
                part,
                scale=scale,
                visible=None if chosen is None else chosen.visible[number],
            )
            for number, part in enumerate(batch.segments)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)
