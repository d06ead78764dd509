"""A checkpoint's files as values: mmap, slice, dequantise, un-permute, and give the pages back. Owns no parameter."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from math import lcm, prod
from pathlib import Path

import torch

from proa.checkpoint.quant import Form
from proa.checkpoint.types import RopePermuted, TensorInfo, Transposed
from proa.errors import CheckpointError
from proa.kernels.reference.dequant import dequantize, dequantize_fp8_block, unpermute_rope
from proa.layers.base import torch_dtype
from proa.loading.groups import Group

Chunks = Iterator[tuple[int, torch.Tensor]]
"""First row and values of runs of rows; a stored tensor is a matrix here: all dimensions but the last are rows."""


class MappedFile:
    """One file, mapped privately (torch wants writable memory; nothing is written) and read in order."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> MappedFile:
        with self._path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return self

    def __exit__(self, *_: object) -> None:
        del self._map  # unmapped with the last tensor over it

    def raw(self, info: TensorInfo, rows: tuple[int, int]) -> torch.Tensor:
        """The bytes of a run of rows, uint8, flat."""
        end = info.offset + info.nbytes
        if end > len(self._map):
            past = f"{end - len(self._map)} bytes after the end of the file"
            raise CheckpointError("checkpoint/truncated", f"{info.file.name}: {info.stored_name} ends {past}")
        start, stop = self._span(info, rows)
        if start == stop:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._map, dtype=torch.uint8, count=stop - start, offset=start)

    def expect(self, info: TensorInfo) -> None:
        """Let the system read the tensor's pages now, while other work is done."""
        if hasattr(mmap, "MADV_WILLNEED"):
            self._advise(mmap.MADV_WILLNEED, info.offset, info.offset + info.nbytes)

    def forget(self, info: TensorInfo, rows: tuple[int, int]) -> None:
        """Give the pages of a run of rows back: read once, they only add to the process's size."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._advise(mmap.MADV_DONTNEED, *self._span(info, rows))

    def _advise(self, advice: int, start: int, stop: int) -> None:
        """Of all pages that hold some of the bytes [start, stop) of the file."""
        first, stop = start - start % mmap.PAGESIZE, min(stop, len(self._map))
        if first < stop:
            self._map.madvise(advice, first, stop - first)

    def _span(self, info: TensorInfo, rows: tuple[int, int]) -> tuple[int, int]:
        """Where in the file the bytes of a run of rows begin and end."""
        total = max(1, num_rows(info.shape))
        return info.offset + info.nbytes * rows[0] // total, info.offset + info.nbytes * rows[1] // total


class Reader:
    """The values of one weight, of which `info` holds the elements. If `is_raw`, they are the bytes of each row.

    `scale`: one factor per `block` of a block-FP8 weight. Values come in the stored type for plain types, else in
    float32.
    """

    def __init__(
        self, info: TensorInfo, file: MappedFile, *, is_raw: bool, scale: torch.Tensor | None, block: tuple[int, int]
    ) -> None:
        self._info, self._file, self._is_raw = info, file, is_raw
        self._scale, self._block = scale, block
        self._rows = num_rows(info.shape)

    def chunks(self, elements: int) -> Chunks:
        """All rows, about `elements` at once. What was yielded is given back when the next is asked for."""
        width = max(1, prod(self._info.shape) // max(1, self._rows))
        step = self._step(max(1, elements // width))
        for row in range(0, self._rows, step):
            stop = min(self._rows, row + step)
            yield row, self._read(row, stop)
            self._file.forget(self._info, (row, stop))

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop), whatever else must be read for them."""
        step = self._step(1)
        first, last = start - start % step, min(self._rows, stop + -stop % step)
        return self._read(first, last)[start - first : stop - first]

    def _step(self, wanted: int) -> int:
        """At most `wanted` rows, or the least that can be read together: whole blocks of scales, whole heads where
        rows are permuted within them, all rows where one is no whole block of a GGUF format."""
        info, unit = self._info, self._block[0]
        if info.dtype.is_block and not self._is_raw:
            width = info.shape[-1] if len(info.shape) > 1 else 1
            unit = unit if width % info.dtype.storage.elements == 0 else max(1, self._rows)
        if info.row_order is not None:
            unit = lcm(unit, self._rows // info.row_order.heads)
        return max(unit, wanted - wanted % unit)

    def _read(self, start: int, stop: int) -> torch.Tensor:
        info = self._info
        raw = self._file.raw(info, (start, stop))
        if self._is_raw:
            return _hub_order(raw.view(stop - start, -1), info)
        values = _values(raw, info, (stop - start, *info.shape[-1:]) if len(info.shape) > 1 else (stop - start,))
        if self._scale is not None:
            high = self._block[0]
            values = dequantize_fp8_block(values, self._scale[start // high : -(-stop // high)], self._block)
        return _hub_order(values, info)


def group_reader(group: Group, file: MappedFile, block: tuple[int, int] | None, *, is_raw: bool) -> Reader:
    """The values of a source group. `file` is that of its elements; its scales, far smaller, are read now.

    `block`: how many rows and columns a scale of this checkpoint's block FP8 covers. `is_raw`: a block format's bytes,
    or the codes of block FP8.
    """
    match group.form:
        case Form.PLAIN:
            return Reader(group.values, file, is_raw=is_raw, scale=None, block=(1, 1))
        case Form.FP8_BLOCK if is_raw:
            return Reader(group.values, file, is_raw=False, scale=None, block=(1, 1))
        case Form.FP8_BLOCK if block is not None:
            return Reader(group.values, file, is_raw=False, scale=group_scales(group), block=block)
        case _:
            raise RuntimeError(f"{group.place.group}: {group.form.value} cannot be read")


def group_scales(group: Group) -> torch.Tensor:
    """The scales of a block-FP8 group, as stored."""
    return _whole(group.members["weight_scale_inv"])


def num_rows(shape: tuple[int, ...]) -> int:
    """Rows of a stored tensor seen as a matrix, elements of a vector."""
    return prod(shape[:-1] or shape)


def _whole(info: TensorInfo) -> torch.Tensor:
    with info.file.open("rb") as file:
        file.seek(info.offset)
        data = bytearray(file.read(info.nbytes))
    if len(data) != info.nbytes:
        raise CheckpointError("checkpoint/truncated", f"{info.file.name}: {info.stored_name} ends after the file")
    return torch.frombuffer(data, dtype=torch_dtype(info.dtype)).view(info.shape)


def _values(raw: torch.Tensor, info: TensorInfo, shape: tuple[int, ...]) -> torch.Tensor:
    if info.dtype.is_block:
        return dequantize(raw, info.dtype, shape)
    dtype = torch_dtype(info.dtype)
    if raw.data_ptr() % dtype.itemsize:
        raw = raw.clone()  # a file may place a tensor at an odd offset
    return raw.view(dtype).view(shape)


def _hub_order(values: torch.Tensor, info: TensorInfo) -> torch.Tensor:
    """`values`: whole heads of a tensor whose rows GGUF ordered otherwise (checkpoint/types.py), or any rows."""
    match info.row_order:
        case None:
            return values
        case RopePermuted(heads=heads):
            return unpermute_rope(values, heads * len(values) // num_rows(info.shape))
        case Transposed():
            _, rows, columns = info.shape
            return values.reshape(-1, columns, rows).transpose(1, 2).reshape(values.shape)
