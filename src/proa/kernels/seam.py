"""The seam between layers and kernel backends: the values that cross it and the protocols that a backend implements.

Owns no arithmetic. A backend is one file or folder beside `reference`, which defines what every op means. Latent
attention has a seam of its own (kernels/latent_seam.py).

Legend: T rows (tokens) of a forward, B requests of a segment, Q most rows of one request in it, L most cached rows that
one request sees, D hidden, H query heads, K key/value heads, G = H / K, d head size, S rows of the cache (of experts:
slots), E routed experts, k experts of one row, W width of an expert.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from proa.arch.blocks import SILU, ActivationSpec, QueryScale, RouterSpec
from proa.units import DType, Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Codes:
    """Block FP8 as it is kept: `codes` [..., out, in] float8_e4m3 and `scales` [..., out / 16, in / columns] float32,
    both rounded up. A value is its code times the scale of its 16 rows and `columns` columns."""

    codes: torch.Tensor
    scales: torch.Tensor
    columns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """A weight in a stored block format: uint8 [..., out, bytes of a row]."""

    data: torch.Tensor
    format: DType

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the values, [..., out, in]."""
        *outer, nbytes = self.data.shape
        return (*outer, nbytes // self.format.storage.nbytes * self.format.storage.elements)


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """One linear map in the arrangement of the backend that made it. Only that backend may read `weight`, and `scales`
    where it keeps some beside it."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    in_features: int
    out_features: int
    scales: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Of the weight; rows that fill the last panel (at most 15) are not counted."""
        beside = 0 if self.scales is None else self.scales.nbytes
        return self.weight.nbytes // len(self.weight) * self.out_features + beside


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """How the rows of a merged projection divide: `query` heads, `key_value` key heads, then as many value heads."""

    query: int
    key_value: int
    size: int

    @property
    def width(self) -> int:
        """Elements of all heads of a row."""
        return (self.query + 2 * self.key_value) * self.size


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNorm:
    """RMS norm of queries and keys. `weight` [H + K, d] float32: the query's weight per head, then the key's.

    Each head is normed by itself, or, if `is_whole`, all query heads of a row as one vector, and all key heads.
    """

    weight: torch.Tensor
    eps: float
    is_whole: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeRows:
    """Rotation of each row, float32 [T, 1, r] for the first r of d elements.

    out = x * cos + swap(x) * sin, where swap exchanges the halves; the first half of `sin` carries the minus sign.
    `is_interleaved`: pairs are neighbours in x; they are first brought to halves (even elements, then odd ones), and
    stay there, which no product of queries and keys can see.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    is_interleaved: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKV:
    """One layer's cache: `keys` and `values` [S, K, d]; row = page * page_size + offset.

    That is how the reference reads them. A backend may arrange the rows of a page otherwise; then all phases are its
    own, because only it can read what it wrote.
    """

    keys: torch.Tensor
    values: torch.Tensor
    page_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRouter:
    """A router [E, D] and its correction bias [E] float32 (None: none) as the backend that made it wants them, and
    the experts of each token id, [ids, k] int64, where they are not chosen."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    table: torch.Tensor | None = None

    def ids(self, token_ids: torch.Tensor | None) -> torch.Tensor:
        """The rows of the table that are wanted. TypeError for a batch that has none."""
        if token_ids is None:
            raise TypeError("a router with a table of experts was given no token ids")
        return token_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Routed:
    """Each row's experts: `slots` [T, k] int32 and `weights` [T, k] float32, in the order in which results are summed:
    routed ones by falling choice score (equal ones by index), then fused shared ones."""

    slots: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedExperts:
    """Gated MLPs of S slots in the arrangement of the backend that made them. Only that backend may read the tensors.
    `width` is that of one expert; `scales` are those of `gate_up` and `down`, where it keeps some beside them."""

    gate_up: torch.Tensor
    down: torch.Tensor
    slots: int
    width: int
    hidden: int
    scales: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.gate_up, self.down, *(self.scales or ())))


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

    `rows` [B, 3] int64 says for each request: its first row in the segment, how many, and the position of the first;
    `tables` [B, P] int32 are the pages of its positions from 0 on. Both lie in host memory.

    For backends that gather instead of walking pages: where requests differ in rows, `pad` [B * Q] names for each
    query its row of the segment (the request's last one where it has fewer) and `unpad` [num_rows] the query of each
    row; else both are None and rows are queries. `views` has one entry per window of the model (None: all earlier
    rows), made when it is first read.
    """

    phase: Phase
    first: int
    num_rows: int
    requests: int
    queries: int
    rows: np.ndarray
    tables: np.ndarray
    pad: torch.Tensor | None
    unpad: torch.Tensor | None
    views: Mapping[int | None, View]


class Draw(NamedTuple):
    """How one token is drawn from row `row` of the logits (kernels/reference/sample.py: the steps and their order).

    `key` are the 64 bits of its noise, unused at `temperature` 0: the argmax. `top_k` 0: no limit. `floor`: the lowest
    value that is kept, relative to the largest and divided by the temperature (the logarithm of min-p); -inf: all.
    """

    row: int
    key: int
    top_k: int
    temperature: float
    top_p: float
    floor: float


class Sampler(Protocol):
    """Whatever draws tokens: a kernel set, or one of its backends."""

    def sample(self, logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
        """One token per draw. `logits` [R, V] float32, values of a row contiguous; they stay as they are."""
        ...


class SampleOps(Sampler, Protocol):
    """Tokens from logits. Chosen by the plan's `sampling_kernel`. All backends give the same tokens."""

    name: str


class DenseOps(Protocol):
    """Linear maps, norms and what is fused with them. Chosen by the plan's `matmul_kernel`."""

    name: str

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Packed:
        """Arrange a weight [out, in] (and bias [out]) for `matmul`, once, at load."""
        ...

    def unpacked(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised host memory for a weight that `pack_in_place` will be given."""
        ...

    def pack_in_place(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Packed:
        """As `pack`, for a weight that nobody reads afterwards: its memory may become that of the packed form."""
        ...

    def pack_blocks(self, blocks: torch.Tensor, bias: torch.Tensor | None, format: DType, dtype: torch.dtype) -> Packed:
        """As `pack`, for a weight in a stored block format: uint8 [out, bytes of a row]; activations are `dtype`."""
        ...

    def pack_codes(self, weight: Codes, bias: torch.Tensor | None, dtype: torch.dtype) -> Packed:
        """As `pack`, for a block-FP8 weight; activations are `dtype`, and stay it."""
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

    def logits(self, x: torch.Tensor, packed: Packed) -> torch.Tensor:
        """As matmul, in float32."""
        ...

    def select(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Rows `rows` [R] of x [T, D]."""
        ...

    def lookup(self, packed: Packed, token_ids: torch.Tensor) -> torch.Tensor:
        """Rows `token_ids` [T] of a matrix that `pack` or `table` made, float32 [T, in]."""
        ...

    def table(self, weight: torch.Tensor) -> Packed:
        """A matrix [rows, in] for `lookup` only: it is never multiplied with."""
        ...

    def ffn(self, x: torch.Tensor, gate_up: Packed, down: Packed, activation: ActivationSpec = SILU) -> torch.Tensor:
        """down(activation(gate, up)): x [T, D] -> [T, D]."""
        ...

    def gate(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """X [T, N] * sigmoid(gate [T, N]), in float32 and rounded once; rows of `gate` may be a part of longer ones."""
        ...

    def scale_queries(self, queries: torch.Tensor, positions: torch.Tensor, spec: QueryScale) -> torch.Tensor:
        """Queries [T, H, d] times the factor of their position (arch/blocks.py: QueryScale), in their dtype."""
        ...

    def rotation(
        self, positions: torch.Tensor, frequencies: torch.Tensor, signs: torch.Tensor, magnitude: float
    ) -> RopeRows:
        """Each row's rotation, once per forward for all layers.

        `positions` [T]; `frequencies` and `signs` [r] float32; `magnitude` multiplies cosines and sines.
        """
        ...


class MoEOps(Protocol):
    """Routing and expert MLPs. Chosen by the plan's `moe_kernel`."""

    name: str

    def pack_router(
        self, weight: torch.Tensor, bias: torch.Tensor | None, table: torch.Tensor | None = None
    ) -> PackedRouter:
        """Arrange a router's weight [E, D] (compute dtype) and bias [E] (float32). `table` [ids, k] int64 stays as it
        is."""
        ...

    def pack_experts(self, gate_up: torch.Tensor, down: torch.Tensor) -> PackedExperts:
        """Arrange `gate_up` [S, 2W, D] and `down` [S, D, W], once, at load. May free the given tensors' memory slot by
        slot, so that there is no second copy of all experts."""
        ...

    def pack_expert_codes(self, gate_up: Codes, down: Codes, dtype: torch.dtype) -> PackedExperts:
        """As `pack_experts`, for block-FP8 experts; activations are `dtype`, and stay it."""
        ...

    def pack_expert_blocks(self, gate_up: Blocks, down: Blocks, dtype: torch.dtype) -> PackedExperts:
        """As `pack_experts`, for experts in stored blocks; activations are `dtype`."""
        ...

    def route(
        self,
        x: torch.Tensor,
        router: PackedRouter,
        spec: RouterSpec,
        top_k: int,
        shared: Sequence[int],
        shared_weight: float,
        gate: torch.Tensor | None,
        token_ids: torch.Tensor | None = None,
    ) -> Routed:
        """The experts of x [T, D]: scores in float32, choice and weights as arch/blocks.py: RouterSpec says.

        The slots of `shared` follow with weight `shared_weight`, or with sigmoid(x . gate) where `gate` [1, D] is
        given. Weights are not scaled where `spec.scale` is 1: the plan's layout says where the scale is applied. A
        router with a table takes the experts of `token_ids` [T] int64 in the table's order; TypeError without them.
        """
        ...

    def experts(
        self,
        x: torch.Tensor,
        routed: Routed,
        packed: PackedExperts,
        *,
        scale: float,
        shared: torch.Tensor | None,
        gate: torch.Tensor | None,
        activation: ActivationSpec = SILU,
    ) -> torch.Tensor:
        """The sum over the row's slots of weight * down(activation(gate(x), up(x))), times `scale`, plus the shared
        experts.

        x [T, D] -> [T, D] in x's dtype. Products as in DenseOps.ffn; weights and sums in float32, in the order of
        `routed`. `shared` [T, D] enters as it is, or times sigmoid(x . gate) for `gate` [1, D].
        """
        ...


class AttentionOps(Protocol):
    """Softmax attention over the paged cache. Chosen by the plan's `attention.<phase>`, one per phase; phases of one
    runner share a cache arrangement."""

    name: str

    def write(
        self,
        projected: torch.Tensor,
        heads: Heads,
        norm: HeadNorm | None,
        rope: RopeRows,
        kv: LayerKV,
        write_slots: torch.Tensor,
    ) -> torch.Tensor:
        """Norm and rotate the queries and keys of `projected` [T, W]; return the queries [T, H, d].

        A row begins with its heads, (H + 2K) * d elements. Keys and values go to the cache rows `write_slots` [T].
        """
        ...

    def attention(
        self, queries: torch.Tensor, kv: LayerKV, segment: Segment, *, window: int | None, scale: float
    ) -> torch.Tensor:
        """Queries [num_rows, H, d] of the segment -> [num_rows, H * d]."""
        ...
