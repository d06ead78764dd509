"""Native latent attention and its indexer: kernels/latent_seam.py's LatentOps on the compiled library.

Chosen rows are a list per row: int32 [num_rows, 1 + top_k], how many, then positions in ascending order. Cached rows
lie as the reference has them. Conditions on sizes (kernels/catalog.py): the rank, and the query's, are whole vectors of
16, the former at most MAX_RANK; plain and rotated parts are pairs. Every op is exact (csrc/latent.h, csrc/sparse.h).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from proa.arch.blocks import IndexerSpec
from proa.kernels.latent_seam import Absorbed, Chosen, IndexNorm, LatentKV, LatentShape
from proa.kernels.native.abi import CIndex, CLatent, COp, Kind
from proa.kernels.native.ops import address, request_rows, whole
from proa.kernels.native.sink import Sink
from proa.kernels.seam import RopeRows, Segment

MAX_RANK = 512  # of csrc/latent.h: elements that a row's sum keeps on the stack
MAX_HEAD = 256  # of csrc/attention.h: elements of an index key on the stack
WIDEST = 32  # elements of the widest vector: absorbed queries are padded to whole ones


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeAbsorbed(Absorbed):
    """Panels per head: `key` [H, R, n] and `value` [H, v to whole panels, R]."""

    shape: LatentShape


class NativeLatent:
    """LatentOps on the compiled library: one routine for prefill, decode and verify."""

    name = "native"

    def __init__(self, library: ctypes.CDLL, sink: Sink) -> None:
        self.library = library
        self.sink = sink

    def absorb(self, weight: torch.Tensor, shape: LatentShape) -> Absorbed:
        if shape.rank % 16 or shape.rank > MAX_RANK or shape.nope % 2 or shape.rope % 2:
            raise ValueError(f"native latent attention has no form for {shape}")
        by_head = weight.detach().view(shape.heads, shape.nope + shape.value, shape.rank)
        key = by_head[:, : shape.nope].transpose(1, 2).contiguous()
        value = weight.new_zeros((shape.heads, whole(shape.value), shape.rank))
        value[:, : shape.value] = by_head[:, shape.nope :]
        for panels in (key, value):
            is_bf16 = panels.dtype == torch.bfloat16
            self.library.proa_pack_slots(is_bf16, panels.data_ptr(), *panels.shape, 1)
        return NativeAbsorbed(key=key, value=value, shape=shape)

    def query_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out = self.sink.empty(tuple(x.shape), x.dtype)
        op = COp(
            kind=Kind.NORM,
            n=x.shape[1],
            m=x.stride(0),
            f=eps,
            a=x.data_ptr(),
            c=weight.data_ptr(),
            out=out.data_ptr(),
        )
        self.sink.emit(x.dtype, op, len(x), (weight,))
        return out

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
        rows = len(queries)
        out = self.sink.empty((rows, shape.heads, shape.nope + shape.rope), queries.dtype)
        call = _call(shape, kv)
        call.norm, call.eps = norm.data_ptr(), eps
        call.is_interleaved = rope is not None and rope.is_interleaved
        op = COp(
            kind=Kind.LATENT_WRITE,
            n=queries.stride(0),
            m=latent.stride(0),
            a=queries.data_ptr(),
            b=ctypes.addressof(call),
            c=latent.data_ptr(),
            d=address(None if rope is None else rope.cos),
            e=address(None if rope is None else rope.sin),
            out=out.data_ptr(),
        )
        self.sink.emit(queries.dtype, op, rows, (call, norm, kv), slots=write_slots)
        return out

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
        if not isinstance(absorbed, NativeAbsorbed):
            raise TypeError("an up-projection that another backend arranged was given to a native op")
        if visible is not None and visible.dtype != torch.int32:
            raise TypeError("rows that another backend chose were given to a native op")
        rows, shape = len(queries), absorbed.shape
        out = self.sink.empty((rows, shape.heads * shape.value), queries.dtype)
        padded = -(-(shape.rank + shape.rope) // WIDEST) * WIDEST
        absorbing = self.sink.empty((rows, shape.heads, padded), queries.dtype)
        call = _call(shape, kv)
        call.key, call.value = absorbed.key.data_ptr(), absorbed.value.data_ptr()
        op = COp(
            kind=Kind.LATENT_ATTENTION,
            m=0 if visible is None else visible.stride(0),
            f=scale,
            a=queries.data_ptr(),
            b=ctypes.addressof(call),
            e=address(visible),
            out=out.data_ptr(),
            tmp=absorbing.data_ptr(),
        )
        self.sink.emit(queries.dtype, op, rows, (call, absorbed, kv), requests=request_rows([segment], 0))
        return out

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
        if kv.index is None:
            raise ValueError("a layer with an indexer has no cache of index keys")
        if spec.head_dim > MAX_HEAD or spec.rope.dim % 2:
            raise ValueError(f"native index keys have at most {MAX_HEAD} elements, not {spec.head_dim}")
        rows, buffers, capacity = len(queries), torch.get_num_threads(), len(kv.index)
        lists = self.sink.empty((rows, 1 + spec.top_k), torch.int32)
        padded = -(-spec.head_dim // WIDEST) * WIDEST
        turned = self.sink.empty((rows, spec.num_heads, padded), queries.dtype)
        scores = self.sink.empty((buffers, 2, capacity), torch.float32)
        call = CIndex(
            rows=kv.index.data_ptr(),
            norm=norm.weight.data_ptr(),
            bias=norm.bias.data_ptr(),
            weights=weights.data_ptr(),
            next=weights.stride(0),
            page_size=kv.page_size,
            heads=spec.num_heads,
            size=spec.head_dim,
            rope=spec.rope.dim,
            is_interleaved=rope.is_interleaved,
            top_k=spec.top_k,
            buffers=buffers,
            capacity=capacity,
            eps=spec.norm_eps,
        )
        op = COp(
            kind=Kind.INDEX,
            n=queries.stride(0),
            m=keys.stride(0),
            a=queries.data_ptr(),
            b=ctypes.addressof(call),
            c=keys.data_ptr(),
            d=rope.cos.data_ptr(),
            e=rope.sin.data_ptr(),
            out=lists.data_ptr(),
            tmp=turned.data_ptr(),
            scratch=scores.data_ptr(),
        )
        requests = request_rows(segments, 0)
        self.sink.emit(queries.dtype, op, rows, (call, norm, kv), slots=write_slots, requests=requests)
        return Chosen(visible=tuple(lists[part.first : part.first + part.num_rows] for part in segments))


def _call(shape: LatentShape, kv: LatentKV) -> CLatent:
    return CLatent(
        rows=kv.latent.data_ptr(),
        page_size=kv.page_size,
        heads=shape.heads,
        nope=shape.nope,
        rope=shape.rope,
        value_size=shape.value,
        rank=shape.rank,
    )
