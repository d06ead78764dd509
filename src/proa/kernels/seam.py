"""The seam between layers and kernel backends: the values that cross it and the two protocols a backend implements.

Owns no arithmetic. A backend is one file or folder beside `reference`, which defines what every op means.

Legend: T rows (tokens) of a forward, B requests of a segment, Q most rows of one request in it, L most cached rows that
one request sees, D hidden, H query heads, K key/value heads, G = H / K, d head size, S rows of the cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from proa.units import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """One linear map in the arrangement of the backend that made it. Only that backend may read `weight`."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    in_features: int
    out_features: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """How the rows of a merged projection divide: `query` heads, `key_value` key heads, then as many value heads."""

    query: int
    key_value: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNorm:
    """RMS norm of each query and key head. `weight` [H + K, d] float32: the query's weight per head, then the key's."""

    weight: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeRows:
    """Rotation of each row, float32 [T, 1, r] for the first r of d elements.

    Halves, not neighbours, are pairs: out = x * cos + swap(x) * sin, where swap exchanges the halves; the first half
    of `sin` carries the minus sign.
    """

    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKV:
    """One layer's cache: `keys` and `values` [S, K, d]; row = page * page_size + offset."""

    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What a segment's requests see through one window.

    `slots` [B * L] are cache rows, each request's own from its first visible position on, padded with its first one:
    a request reads no row of another. `visible` [B, Q, L] bool; None when every query sees every row.
    `memo` holds what a backend derives from the view, so that it is made once per forward and not once per layer.
    """

    slots: torch.Tensor
    visible: torch.Tensor | None
    memo: dict[Any, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Rows [first, first + num_rows) of the batch: one phase, B `requests` of at most Q `queries` rows each.

    Where requests differ in rows, `pad` [B * Q] names for each query its row of the segment (the request's last one
    where it has fewer) and `unpad` [num_rows] the query of each row; else both are None and rows are queries.
    `views` has one entry per window of the model (None: all earlier rows).
    """

    phase: Phase
    first: int
    num_rows: int
    requests: int
    queries: int
    pad: torch.Tensor | None
    unpad: torch.Tensor | None
    views: Mapping[int | None, View]


class DenseOps(Protocol):
    """Linear maps, norms and what is fused with them. Chosen by the plan's `matmul_kernel`."""

    name: str

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Packed:
        """Arrange a weight [out, in] (and bias [out]) for `matmul`, once, at load."""
        ...

    def matmul(self, x: torch.Tensor, packed: Packed) -> torch.Tensor:
        """X [T, in] -> [T, out] in x's dtype."""
        ...

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype) -> torch.Tensor:
        """RMS norm of x [T, D] in float32, by weight [D] float32; the result in `dtype`."""
        ...

    def add_norm(
        self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype
    ) -> torch.Tensor:
        """Add `delta` to the float32 residual `x` in place, then as `norm`."""
        ...

    def attn_in(
        self,
        x: torch.Tensor,
        qkv: Packed,
        heads: Heads,
        norm: HeadNorm | None,
        rope: RopeRows,
        kv: LayerKV,
        write_slots: torch.Tensor,
    ) -> torch.Tensor:
        """Project x [T, D], norm and rotate queries and keys, write keys and values to the cache rows `write_slots`
        [T]; return the queries [T, H, d]."""
        ...

    def ffn(self, x: torch.Tensor, gate_up: Packed, down: Packed) -> torch.Tensor:
        """down(silu(gate) * up): x [T, D] -> [T, D]."""
        ...


class AttentionOps(Protocol):
    """Softmax attention over the paged cache. Chosen by the plan's `attention.<phase>`, one per phase."""

    name: str

    def attention(
        self, queries: torch.Tensor, kv: LayerKV, segment: Segment, *, window: int | None, scale: float
    ) -> torch.Tensor:
        """Queries [num_rows, H, d] of the segment -> [num_rows, H * d]."""
        ...
