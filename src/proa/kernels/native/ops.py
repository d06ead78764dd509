"""The native backend: kernels/seam.py's ops over the compiled library. Thin: shapes in, pointers out, no arithmetic.

Native attention arranges the rows of a cache page as panels (csrc/attention.h), in the same bytes as the reference.
Every op has one accumulation order per output, whatever the number of rows, so all of them are exact.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch

from proa.arch.blocks import SILU, ActivationSpec, QueryScale
from proa.kernels.memory import Room
from proa.kernels.native.abi import CCache, CHeads, CLinear, COp, Form, Kind
from proa.kernels.native.sink import Sink
from proa.kernels.seam import Codes, HeadNorm, Heads, LayerKV, Packed, RopeRows, Segment
from proa.units import DType

PANEL = 16
FORMS: Mapping[torch.dtype, Form] = MappingProxyType(
    {torch.float32: Form.F32, torch.bfloat16: Form.BF16, torch.float8_e4m3fn: Form.F8}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NativePacked(Packed):
    """`weight` holds whole panels of 16 outputs; `linear` points to it and to `padded_bias`. `dtype` is that of the
    activations."""

    linear: CLinear
    padded_bias: torch.Tensor | None
    dtype: torch.dtype

    @property
    def is_quantised(self) -> bool:
        return self.weight.dtype == torch.uint8


class NativeDense:
    """DenseOps on the compiled library. `sink` says whether ops run or are recorded."""

    name = "native"

    def __init__(self, library: ctypes.CDLL, sink: Sink) -> None:
        self.library = library
        self.sink = sink
        self._room = Room()

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Packed:
        out, size = weight.shape
        panels = self._room.empty((whole(out), size), weight.dtype)
        form = FORMS[weight.dtype]
        self.library.proa_pack(form, weight.data_ptr(), out, size, panels.data_ptr())
        return _packed(panels, bias, form, out, size, weight.dtype)

    def unpacked(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self._room.empty(shape, dtype) if shape[0] % PANEL == 0 else torch.empty(shape, dtype=dtype)

    def pack_in_place(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Packed:
        out, size = weight.shape
        if out % PANEL or not weight.is_contiguous():
            return self.pack(weight, bias)
        panels, form = weight.detach(), FORMS[weight.dtype]
        self.library.proa_pack(form, panels.data_ptr(), out, size, panels.data_ptr())
        return _packed(panels, bias, form, out, size, weight.dtype)

    def pack_blocks(self, blocks: torch.Tensor, bias: torch.Tensor | None, format: DType, dtype: torch.dtype) -> Packed:
        out, row_bytes = blocks.shape
        size = row_bytes // format.storage.nbytes * format.storage.elements
        form = Form[format.name]
        panels = self._room.empty((whole(out), self.library.proa_row_bytes(form, size)), torch.uint8)
        self.library.proa_pack_blocks(form, blocks.data_ptr(), row_bytes, out, size, panels.data_ptr())
        return _packed(panels, bias, form, out, size, dtype)

    def pack_codes(self, weight: Codes, bias: torch.Tensor | None, dtype: torch.dtype) -> Packed:
        out, size = weight.codes.shape
        panels = self._room.empty((whole(out), size), weight.codes.dtype)
        self.library.proa_pack(Form.F8, weight.codes.data_ptr(), out, size, panels.data_ptr())
        scales = weight.scales.detach().contiguous()
        return _packed(panels, bias, Form.F8, out, size, dtype, scales=scales, columns=weight.columns)

    def table(self, weight: torch.Tensor) -> Packed:
        return Packed(weight=weight, bias=None, in_features=weight.shape[1], out_features=weight.shape[0])

    def lookup(self, packed: Packed, token_ids: torch.Tensor) -> torch.Tensor:
        out = self.sink.empty((len(token_ids), packed.in_features), torch.float32)
        if isinstance(packed, NativePacked):
            op = COp(kind=Kind.LOOKUP, b=ctypes.addressof(packed.linear), out=out.data_ptr())
            dtype = packed.dtype
        else:
            op = COp(kind=Kind.TABLE, n=packed.in_features, a=packed.weight.data_ptr(), out=out.data_ptr())
            dtype = packed.weight.dtype
        self.sink.emit(dtype, op, len(token_ids), (packed,), token_ids=token_ids)
        return out

    def select(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        out = self.sink.empty((len(rows), x.shape[1]), x.dtype)
        op = COp(kind=Kind.SELECT, n=x.shape[1] * x.itemsize, a=x.data_ptr(), out=out.data_ptr())
        self.sink.emit(torch.float32, op, len(rows), (), logits_rows=rows)
        return out

    def matmul(self, x: torch.Tensor, packed: Packed) -> torch.Tensor:
        out = self.sink.empty((len(x), packed.out_features), x.dtype)
        scratch = self._scratch(len(x), packed)
        op = COp(
            kind=Kind.MATMUL,
            m=x.stride(0),
            a=x.data_ptr(),
            b=_linear(packed),
            out=out.data_ptr(),
            scratch=address(scratch),
        )
        self.sink.emit(x.dtype, op, len(x), (packed,))
        return out

    def logits(self, x: torch.Tensor, packed: Packed) -> torch.Tensor:
        out = self.sink.logits(len(x), packed.out_features)
        scratch = self._scratch(len(x), packed)
        op = COp(kind=Kind.LOGITS, m=x.stride(0), a=x.data_ptr(), b=_linear(packed), scratch=address(scratch))
        self.sink.emit(x.dtype, op, len(x), (packed,), logits=out)
        return out

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype) -> torch.Tensor:
        return self._add_norm(x, None, weight, eps, dtype)

    def add_norm(
        self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype
    ) -> torch.Tensor:
        return self._add_norm(x, delta.data_ptr(), weight, eps, dtype)

    def _add_norm(
        self, x: torch.Tensor, delta: int | None, weight: torch.Tensor, eps: float, dtype: torch.dtype
    ) -> torch.Tensor:
        out = self.sink.empty(tuple(x.shape), dtype)
        op = COp(
            kind=Kind.ADD_NORM, n=x.shape[1], f=eps, a=x.data_ptr(), b=delta, c=weight.data_ptr(), out=out.data_ptr()
        )
        self.sink.emit(dtype, op, len(x), (weight,))
        return out

    def ffn(self, x: torch.Tensor, gate_up: Packed, down: Packed, activation: ActivationSpec = SILU) -> torch.Tensor:
        hidden = self.sink.empty((len(x), gate_up.out_features), x.dtype)
        out = self.sink.empty((len(x), down.out_features), x.dtype)
        scratch = self._scratch(len(x), gate_up, down)
        op = COp(
            kind=Kind.FFN,
            f=limit_of(activation),
            a=x.data_ptr(),
            b=_linear(gate_up),
            c=_linear(down),
            tmp=hidden.data_ptr(),
            out=out.data_ptr(),
            scratch=address(scratch),
        )
        self.sink.emit(x.dtype, op, len(x), (gate_up, down))
        return out

    def gate(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        out = self.sink.empty(tuple(x.shape), x.dtype)
        op = COp(kind=Kind.GATE, n=x.shape[1], m=gate.stride(0), a=x.data_ptr(), b=gate.data_ptr(), out=out.data_ptr())
        self.sink.emit(x.dtype, op, len(x), ())
        return out

    def scale_queries(self, queries: torch.Tensor, positions: torch.Tensor, spec: QueryScale) -> torch.Tensor:
        out = self.sink.empty(tuple(queries.shape), queries.dtype)
        op = COp(
            kind=Kind.SCALE,
            n=queries.shape[1] * queries.shape[2],
            m=spec.original,
            f=spec.beta,
            a=queries.data_ptr(),
            out=out.data_ptr(),
        )
        self.sink.emit(queries.dtype, op, len(queries), (), positions=positions)
        return out

    def rotation(
        self, positions: torch.Tensor, frequencies: torch.Tensor, signs: torch.Tensor, magnitude: float
    ) -> RopeRows:
        shape = (len(positions), 1, len(frequencies))
        cos, sin = (self.sink.empty(shape, torch.float32) for _ in range(2))
        op = COp(
            kind=Kind.ROTATION,
            n=len(frequencies),
            f=magnitude,
            a=frequencies.data_ptr(),
            b=signs.data_ptr(),
            out=cos.data_ptr(),
            tmp=sin.data_ptr(),
        )
        self.sink.emit(torch.float32, op, len(positions), (frequencies, signs), positions=positions)
        return RopeRows(cos=cos, sin=sin)

    def _scratch(self, rows: int, *maps: Packed) -> torch.Tensor | None:
        """Room for the quantised rows of an op's input, where one of its weights is quantised."""
        sizes = [one.in_features for one in maps if isinstance(one, NativePacked) and one.is_quantised]
        if not sizes:
            return None
        return self.sink.empty((self.library.proa_scratch_bytes(rows, max(sizes)),), torch.uint8)


class NativeAttention:
    """AttentionOps on the compiled library: one routine for prefill, decode and verify."""

    name = "native"

    def __init__(self, sink: Sink) -> None:
        self.sink = sink

    def write(
        self,
        projected: torch.Tensor,
        heads: Heads,
        norm: HeadNorm | None,
        rope: RopeRows,
        kv: LayerKV,
        write_slots: torch.Tensor,
    ) -> torch.Tensor:
        rows = len(projected)
        out = self.sink.empty((rows, heads.query, heads.size), projected.dtype)
        is_whole, eps, weight = (
            (False, 0.0, None) if norm is None else (norm.is_whole, norm.eps, norm.weight.data_ptr())
        )
        turned = rope.cos.shape[-1]
        shape = CHeads(heads.query, heads.key_value, heads.size, turned, rope.is_interleaved, is_whole, eps, weight)
        cache = _cache(kv)
        op = COp(
            kind=Kind.WRITE,
            m=projected.stride(0),
            a=projected.data_ptr(),
            b=ctypes.addressof(shape),
            c=ctypes.addressof(cache),
            d=rope.cos.data_ptr(),
            e=rope.sin.data_ptr(),
            out=out.data_ptr(),
        )
        self.sink.emit(projected.dtype, op, rows, (shape, cache, norm), slots=write_slots)
        return out

    def attention(
        self, queries: torch.Tensor, kv: LayerKV, segment: Segment, *, window: int | None, scale: float
    ) -> torch.Tensor:
        rows, heads, size = queries.shape
        out = self.sink.empty((rows, heads * size), queries.dtype)
        cache = _cache(kv)
        op = COp(
            kind=Kind.ATTENTION,
            n=heads,
            m=window or 0,
            f=scale,
            a=queries.data_ptr(),
            b=ctypes.addressof(cache),
            out=out.data_ptr(),
        )
        self.sink.emit(queries.dtype, op, rows, (cache,), requests=request_rows([segment], 0))
        return out


def request_rows(segments: Sequence[Segment], first: int) -> np.ndarray:
    """Struct Rows of csrc/attention.h for every request of `segments`, int64 [B, 4]: first row (the segments' own first
    row counts from `first`), rows, position of the first, address of the block table, which the segment holds."""
    parts = []
    for segment in segments:
        tables = segment.tables
        where = np.empty((len(tables), 4), dtype=np.int64)
        where[:, :3] = segment.rows
        where[:, 0] += first
        where[:, 3] = tables.ctypes.data + np.arange(len(tables)) * tables.strides[0]
        parts.append(where)
        first += segment.num_rows
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def limit_of(activation: ActivationSpec) -> float:
    """As csrc/simd.h: activate wants it."""
    return math.inf if activation.limit is None else activation.limit


def whole(out: int) -> int:
    """Rows of whole panels."""
    return -(-out // PANEL) * PANEL


def _packed(
    panels: torch.Tensor,
    bias: torch.Tensor | None,
    form: Form,
    out: int,
    size: int,
    dtype: torch.dtype,
    *,
    scales: torch.Tensor | None = None,
    columns: int = 0,
) -> NativePacked:
    padded = None
    if bias is not None:
        padded = torch.zeros(len(panels))
        padded[:out] = bias
    linear = CLinear(panels.data_ptr(), address(padded), form, out, size, address(scales), columns)
    return NativePacked(
        weight=panels,
        bias=bias,
        in_features=size,
        out_features=out,
        scales=scales,
        linear=linear,
        padded_bias=padded,
        dtype=dtype,
    )


def address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _linear(packed: Packed) -> int:
    if not isinstance(packed, NativePacked):
        raise TypeError("a weight that another backend packed was given to a native op")
    return ctypes.addressof(packed.linear)


def _cache(kv: LayerKV) -> CCache:
    _, heads, size = kv.keys.shape
    return CCache(kv.keys.data_ptr(), kv.values.data_ptr(), kv.page_size, heads, size)
