"""Fill parameters from a checkpoint's files: mmap, slice, dequantise, un-permute, convert, copy, give the pages back.

Owns the data path. What goes where, and whether all of it went, is the ledger's.
"""

from __future__ import annotations

import mmap
from collections.abc import Collection, Iterator, Mapping
from math import prod
from pathlib import Path

import torch

from proa.arch.weights import Place, Tied
from proa.checkpoint.types import RopePermuted, TensorInfo
from proa.errors import CheckpointError
from proa.kernels.reference.dequant import dequantize, unpermute_rope
from proa.layers.base import torch_dtype
from proa.loading.ledger import Entry, LoadLedger
from proa.loading.progress import Advance, Progress

CHUNK_ELEMENTS = 4 * 2**20  # elements converted at once: 16 MiB of float32, so that peak memory is the model's own


def load_weights(parameters: Mapping[str, torch.Tensor], ledger: LoadLedger, progress: Progress) -> None:
    """Fill `parameters` with every placed tensor, then compare the tied copies. Records both in `ledger`."""
    entries = ledger.entries.values()
    places = [entry for entry in entries if isinstance(entry.claim, Place)]
    copies = [entry for entry in entries if isinstance(entry.claim, Tied)]
    total = sum(entry.info.nbytes for entry in places + copies)
    with progress.phase(f"loading {ledger.role} weights", total) as advance:
        for entry, chunks in _read(places, ledger.blocks, advance):
            _fill(_destination(entry, parameters), chunks)
            ledger.fill(entry.info.name)
        for entry, chunks in _read(copies, ledger.blocks, advance):
            ledger.compare(entry.info.name, _first_difference(_destination(entry, parameters), chunks))


def _parameter(entry: Entry) -> str | None:
    return entry.claim.parameter if isinstance(entry.claim, Place | Tied) else None


def _destination(entry: Entry, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
    match entry.claim:
        case Place(parameter=name, rows=rows) if rows is not None:
            return parameters[name][rows[0] : rows[1]]
        case Place(parameter=name) | Tied(parameter=name):
            return parameters[name]
        case _:
            raise RuntimeError(f"{entry.info.name} has no parameter")


def _fill(destination: torch.Tensor, chunks: Iterator[tuple[int, torch.Tensor]]) -> None:
    with torch.no_grad():
        for row, values in chunks:
            destination[row : row + len(values)].copy_(values)


def _first_difference(parameter: torch.Tensor, chunks: Iterator[tuple[int, torch.Tensor]]) -> int | None:
    """The first row in which the stored copy, in the parameter's type, is not equal to it."""
    for row, values in chunks:
        same = values.to(parameter) == parameter[row : row + len(values)]
        if not bool(same.all()):
            return row + int(same.flatten(1).all(dim=1).logical_not().nonzero()[0])
    return None


def _read(
    entries: list[Entry], blocks: Collection[str], advance: Advance
) -> Iterator[tuple[Entry, Iterator[tuple[int, torch.Tensor]]]]:
    """Each entry with its chunks (first row, values), in file order. Parameters in `blocks` get the stored bytes."""
    by_file: dict[Path, list[Entry]] = {}
    for entry in sorted(entries, key=lambda entry: entry.info.offset):
        by_file.setdefault(entry.info.file, []).append(entry)
    for path, members in by_file.items():
        with _Mapped(path) as mapped:
            for entry in members:
                yield entry, mapped.chunks(entry.info, is_raw=_parameter(entry) in blocks)
                mapped.forget(entry.info)
                advance(entry.info.nbytes)


class _Mapped:
    """One file, mapped privately (torch wants writable memory; nothing is written) and read in order."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> _Mapped:
        with self._path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return self

    def __exit__(self, *_: object) -> None:
        del self._map  # unmapped with the last tensor over it

    def chunks(self, info: TensorInfo, *, is_raw: bool) -> Iterator[tuple[int, torch.Tensor]]:
        """Values of `info` in runs of whole rows: in the stored type for plain types, float32 for block formats; or, if
        `is_raw`, the bytes of each row."""
        if info.offset + info.nbytes > len(self._map):
            raise CheckpointError(
                "checkpoint/truncated",
                f"{info.file.name}: {info.stored_name} ends {info.offset + info.nbytes - len(self._map)} bytes after"
                " the end of the file",
            )
        rows, width = info.shape[0], prod(info.shape[1:])
        step = _rows_per_chunk(info, width)
        row_bytes = info.nbytes // rows if rows else 0
        for row in range(0, rows, step):
            count = min(step, rows - row)
            raw = torch.frombuffer(
                self._map, dtype=torch.uint8, count=count * row_bytes, offset=info.offset + row * row_bytes
            )
            values = raw.view(count, row_bytes) if is_raw else _values(raw, info, (count, *info.shape[1:]))
            yield row, _hub_order(values, info)

    def forget(self, info: TensorInfo) -> None:
        """Let the system take back the tensor's pages: read once, they only add to the process's size."""
        if hasattr(mmap, "MADV_DONTNEED"):
            start = info.offset - info.offset % mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, start, info.offset + info.nbytes - start)


def _rows_per_chunk(info: TensorInfo, width: int) -> int:
    """Rows read at once: whole heads where rows are permuted within them, all where one row is no whole block."""
    if info.dtype.is_block and width % info.dtype.storage.elements:
        return info.shape[0]
    step = max(1, CHUNK_ELEMENTS // max(1, width))
    if info.row_order is None:
        return step
    per_head = info.shape[0] // info.row_order.heads
    return max(per_head, step - step % per_head)


def _values(raw: torch.Tensor, info: TensorInfo, shape: tuple[int, ...]) -> torch.Tensor:
    if info.dtype.is_block:
        return dequantize(raw, info.dtype, shape)
    dtype = torch_dtype(info.dtype)
    if raw.data_ptr() % dtype.itemsize:
        raw = raw.clone()  # a file may place a tensor at an odd offset
    return raw.view(dtype).view(shape)


def _hub_order(values: torch.Tensor, info: TensorInfo) -> torch.Tensor:
    """`values`: whole heads of a tensor whose rows GGUF permuted (checkpoint/types.py: RopePermuted), or any rows."""
    match info.row_order:
        case None:
            return values
        case RopePermuted(heads=heads):
            return unpermute_rope(values, heads * len(values) // info.shape[0])
