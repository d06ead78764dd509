"""Stored bytes -> float32 values in the hub's row order: GGUF's block formats, plain float types, block FP8.

GGUF's formats are written from ggml's block definitions. Per format: `blocks` uint8 [n, bytes of a block] -> float32
[n, elements of a block]. `d` is a block's scale, `m` its minimum, both stored as float16.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import MappingProxyType

import torch
from torch import Tensor

from proa.arch.layout import ROWS_PER_SCALE
from proa.errors import CheckpointError, WeightError
from proa.kernels.seam import Codes
from proa.units import DType

# Elements decoded at a time: keeps every temporary in the cache and far below the size of a large embedding.
_CHUNK_ELEMENTS = 1 << 18


def dequantize(raw: Tensor, dtype: DType, shape: tuple[int, ...]) -> Tensor:
    """`raw`: uint8 [nbytes], the stored bytes of a tensor (or of some of its rows) of `shape` -> float32 `shape`."""
    count = math.prod(shape)
    if count % dtype.storage.elements or raw.numel() != dtype.nbytes(count):
        raise CheckpointError(
            "checkpoint/wrong-size", f"{raw.numel()} bytes are not {dtype.value} values of shape {list(shape)}"
        )
    if dtype in _PLAIN:
        return _aligned(raw.contiguous(), dtype.storage.nbytes).view(_PLAIN[dtype]).to(torch.float32).reshape(shape)
    if dtype not in _BLOCKS:
        raise CheckpointError("checkpoint/unknown-dtype", f"{dtype.value} has no float32 values of its own")
    blocks, decode = raw.reshape(-1, dtype.storage.nbytes), _BLOCKS[dtype]
    values = torch.empty(len(blocks), dtype.storage.elements, dtype=torch.float32, device=raw.device)
    step = _CHUNK_ELEMENTS // dtype.storage.elements
    for start in range(0, len(blocks), step):
        values[start : start + step] = decode(blocks[start : start + step])
    return values.reshape(shape)


def dequantize_fp8_block(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """Block FP8 -> float32: each rectangle of `block` elements times its scale; the last ones may be cut short.

    `weight` [rows, columns] float8_e4m3, whole block rows from the first one on (the last may be cut). `scale` of any
    float type [rows / block[0], columns / block[1]], rounded up.
    """
    (rows, columns), (high, wide) = weight.shape, block
    grid = (-(-rows // high), -(-columns // wide))
    if tuple(scale.shape) != grid:
        raise WeightError(
            "weights/shape", f"scales {list(scale.shape)} are not one per {high} x {wide} block of {list(weight.shape)}"
        )
    values = weight.to(torch.float32)
    factors = scale.to(torch.float32).repeat_interleave(wide, dim=1)[:, :columns]
    whole = rows - rows % high
    values[:whole].view(-1, high, columns).mul_(factors[: whole // high, None])
    values[whole:].mul_(factors[whole // high :])
    return values


def values_of(weight: Codes) -> Tensor:
    """Kept block FP8 -> float32 [..., out, in]."""
    rows, columns = weight.codes.shape[-2:]
    factors = weight.scales.repeat_interleave(ROWS_PER_SCALE, dim=-2).repeat_interleave(weight.columns, dim=-1)
    return weight.codes.to(torch.float32).mul_(factors[..., :rows, :columns])


def unpermute_rope(rows: Tensor, heads: int) -> Tensor:
    """Undo GGUF's llama row order (RopePermuted): per head, stored row 2i + h becomes row h * head_dim/2 + i.

    `rows` [heads * head_dim, ...], weight or bias of a q or k projection.
    """
    if heads < 1 or len(rows) % (2 * heads):
        raise WeightError("weights/row-order", f"{len(rows)} rows are not {heads} heads of an even size")
    half = len(rows) // heads // 2
    return rows.reshape(heads, half, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _q4_0(blocks: Tensor) -> Tensor:
    d, quants = _half(blocks[:, :2]), _nibbles(blocks[:, 2:], run=16)
    return d * (quants.to(torch.float32) - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    d, m, quants = _half(blocks[:, :2]), _half(blocks[:, 2:4]), _nibbles(blocks[:, 4:], run=16)
    return d * quants.to(torch.float32) + m


def _q5_0(blocks: Tensor) -> Tensor:
    d, high, quants = _half(blocks[:, :2]), _bits(blocks[:, 2:6]), _nibbles(blocks[:, 6:], run=16)
    return d * ((quants | (high << 4)).to(torch.float32) - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    d, m, high, quants = _half(blocks[:, :2]), _half(blocks[:, 2:4]), _bits(blocks[:, 4:8]), _nibbles(blocks[:, 8:], 16)
    return d * (quants | (high << 4)).to(torch.float32) + m


def _q8_0(blocks: Tensor) -> Tensor:
    return _half(blocks[:, :2]) * blocks[:, 2:].view(torch.int8).to(torch.float32)


def _q4_k(blocks: Tensor) -> Tensor:
    scale, minimum = _k_scales(blocks[:, :16])
    return _by_32(scale, _nibbles(blocks[:, 16:], run=32), minimum)


def _q5_k(blocks: Tensor) -> Tensor:
    """The fifth bit of element l of sub-block s is bit s of byte l of `high`."""
    scale, minimum = _k_scales(blocks[:, :16])
    high = (blocks[:, None, 16:48] >> _shifts(8, 1, blocks)[:, None]) & 1
    quants = _nibbles(blocks[:, 48:], run=32) | (high.flatten(1) << 4)
    return _by_32(scale, quants, minimum)


def _q6_k(blocks: Tensor) -> Tensor:
    """Each half of 128 elements: 64 bytes of low nibbles, 32 bytes that hold two upper bits of four elements each."""
    low = _nibbles(blocks[:, :128], run=64)
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> _shifts(4, 2, blocks)[:, None]) & 3
    scale = _half(blocks[:, 208:]) * blocks[:, 192:208].view(torch.int8).to(torch.float32)
    quants = (low | (high.flatten(1) << 4)).to(torch.float32) - 32
    return (scale[:, :, None] * quants.reshape(-1, 16, 16)).flatten(1)


def _k_scales(head: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and minimum of the 8 sub-blocks, [n, 8, 1] each. `head`: d, m, then 8 + 8 numbers of 6 bits in 12 bytes.

    Bytes 0-3 and 4-7 hold the first four scales and minima in their low 6 bits. Byte 8+i holds the low nibbles of scale
    and minimum 4+i, whose two upper bits are the upper bits of bytes i and 4+i.
    """
    first, second, third = head[:, 4:8], head[:, 8:12], head[:, 12:16]
    scales = torch.cat((first & 63, (third & 15) | (first >> 6 << 4)), dim=1)
    minima = torch.cat((second & 63, (third >> 4) | (second >> 6 << 4)), dim=1)
    d, m = _half(head[:, :2]), _half(head[:, 2:4])
    return (d * scales.to(torch.float32))[:, :, None], (m * minima.to(torch.float32))[:, :, None]


def _by_32(scale: Tensor, quants: Tensor, minimum: Tensor) -> Tensor:
    return (scale * quants.to(torch.float32).reshape(-1, 8, 32) - minimum).flatten(1)


def _nibbles(packed: Tensor, run: int) -> Tensor:
    """uint8 [n, b] -> [n, 2b]: of each `run` bytes first all low nibbles, then all high ones."""
    runs = packed.reshape(len(packed), -1, 1, run)
    return ((runs >> _shifts(2, 4, packed)[:, None]) & 15).flatten(1)


def _bits(packed: Tensor) -> Tensor:
    """uint8 [n, b] -> [n, 8b] of 0 and 1, lowest bit first."""
    return ((packed[:, :, None] >> _shifts(8, 1, packed)) & 1).flatten(1)


def _shifts(count: int, width: int, like: Tensor) -> Tensor:
    return torch.arange(0, count * width, width, dtype=torch.uint8, device=like.device)


def _half(two: Tensor) -> Tensor:
    """uint8 [n, 2], a float16 -> float32 [n, 1]."""
    return two.contiguous().view(torch.float16).to(torch.float32)


def _aligned(raw: Tensor, itemsize: int) -> Tensor:
    """A view as a wider type must start at a multiple of that type within its storage; a copy does."""
    return raw.clone() if raw.storage_offset() % itemsize else raw


_PLAIN = MappingProxyType({DType.F32: torch.float32, DType.F16: torch.float16, DType.BF16: torch.bfloat16})
_BLOCKS: MappingProxyType[DType, Callable[[Tensor], Tensor]] = MappingProxyType(
    {DType.Q4_0: _q4_0, DType.Q4_1: _q4_1, DType.Q5_0: _q5_0, DType.Q5_1: _q5_1, DType.Q8_0: _q8_0}
    | {DType.Q4_K: _q4_k, DType.Q5_K: _q5_k, DType.Q6_K: _q6_k}
)
