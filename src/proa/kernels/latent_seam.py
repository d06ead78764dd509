"""The seam of latent attention (MLA), as kernels/seam.py: the values that cross it and the protocol.

Legend: as there, and n plain, r rotated elements of a query head, v elements of a value, R of a latent row, h index
heads of i elements each. Rows handed to an op may be a part of longer ones: `stride(0)` apart, each without gaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from proa.arch.blocks import IndexerSpec
from proa.kernels.seam import RopeRows, Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentKV:
    """One layer's cache: `latent` [S, R + r] (R normed latent elements, then the rotated key of r that all heads
    share), and `index` [S, i], the index keys of a layer with a full indexer, else None. Rows as in LayerKV."""

    latent: torch.Tensor
    index: torch.Tensor | None
    page_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentShape:
    """Sizes of a layer: H `heads`, n `nope` and r `rope` elements of a query, v `value` of a value, R `rank`."""

    heads: int
    nope: int
    rope: int
    value: int
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Absorbed:
    """The two halves of the up-projection, applied to queries and results instead of to cached rows, in the arrangement
    of the backend that made them.

    `key` [H, n, R] takes a query's plain part to the latent: q . (W c) = (W^T q) . c. `value` [H, v, R] takes an
    attended latent row to the head's value. In the compute dtype.
    """

    key: torch.Tensor
    value: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexNorm:
    """Layer norm of index keys: `weight` and `bias` [i] float32. Its eps stands in the IndexerSpec."""

    weight: torch.Tensor
    bias: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Rows that each query may attend to, one entry per segment of the batch, in order, as the backend that chose them
    arranges them. The reference: `visible` [B, Q, L] bool over the segment's View without a window, already causal."""

    visible: tuple[torch.Tensor, ...]


class LatentOps(Protocol):
    """MLA over the paged cache, in the absorbed form. Chosen by the plan's `attention.<phase>`; phases of one runner
    share a cache arrangement."""

    name: str

    def absorb(self, weight: torch.Tensor, shape: LatentShape) -> Absorbed:
        """Arrange the up-projection [H (n + v), R], whose rows are, head by head, those of the key's plain part and
        those of the value, once, at load."""
        ...

    def query_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """RMS norm of x [T, C] in float32, by weight [C] float32; the result in x's dtype, without gaps."""
        ...

    def latent_write(
        self,
        queries: torch.Tensor,
        latent: torch.Tensor,
        norm: torch.Tensor,
        eps: float,
        shape: LatentShape,
        rope: RopeRows | None,
        kv: LatentKV,
        write_slots: torch.Tensor,
    ) -> torch.Tensor:
        """Rotate the last r elements of each query head of `queries` [T, H (n + r)]; return them [T, H, n + r].

        `latent` [T, R + r]: the first R elements are RMS-normed by `norm` [R] float32, the others rotated, and the row
        goes to the cache rows `write_slots` [T].
        """
        ...

    def latent_attention(
        self,
        queries: torch.Tensor,
        absorbed: Absorbed,
        kv: LatentKV,
        segment: Segment,
        *,
        scale: float,
        visible: torch.Tensor | None,
    ) -> torch.Tensor:
        """Queries [num_rows, H, n + r] of the segment -> [num_rows, H * v]. `visible`: the segment's entry of Chosen,
        None where all earlier rows are seen."""
        ...

    def index(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        weights: torch.Tensor,
        norm: IndexNorm,
        spec: IndexerSpec,
        rope: RopeRows,
        kv: LatentKV,
        segments: Sequence[Segment],
        write_slots: torch.Tensor,
    ) -> Chosen:
        """Choose each row's `spec.top_k` best earlier rows (itself included), equal ones by position; all of them where
        there are no more.

        `queries` [T, h * i] and the layer-normed `keys` [T, i] are rotated; keys go to the index cache. A row scores
        sum over heads of weight * relu(query . key), in float32, with `weights` [T, h] / sqrt(h * i).
        """
        ...
