"""Fill parameters from a checkpoint's files, and compare the copies that files hold. Owns the data path.

What goes where, and whether all of it went, is the ledger's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch

from proa.arch.layout import ROWS_PER_SCALE
from proa.arch.weights import Borrowed, Fill, Tied
from proa.layers.base import torch_dtype
from proa.loading.files import Chunks, MappedFile, Reader, group_reader, group_scales, num_rows
from proa.loading.groups import Group
from proa.loading.ledger import Entry, LoadLedger
from proa.loading.progress import Advance, Progress
from proa.units import DType

READ_AHEAD = 64 * 2**20  # bytes that the system is asked to read beyond the weight that is being packed
CHUNK_ELEMENTS = 4 * 2**20  # elements converted at once: 16 MiB of float32, so that peak memory is the model's own


def _nothing(_: str) -> None:
    """For those who take the filled parameters when all is done."""


def load_weights(
    parameters: Mapping[str, torch.Tensor],
    ledger: LoadLedger,
    progress: Progress,
    filled: Callable[[str], None] = _nothing,
) -> None:
    """Compare tied and borrowed copies, then fill `parameters` with every placed weight. Records all in `ledger`.

    A weight is read once, also where it fills several places. `filled` is told of each parameter that has all its
    values; nothing here reads it afterwards, so that its memory may be put to another use.
    """
    groups = list(ledger.groups.values())
    copies = [entry for entry in ledger.entries.values() if isinstance(entry.claim, Tied | Borrowed)]
    total = sum(group.nbytes for group in groups) + sum(entry.info.nbytes for entry in copies)
    with progress.phase(f"loading {ledger.role} weights", total) as advance:
        for entry in copies:  # first, while memory is empty: both sides are read from their files
            ledger.compare(entry.info.name, _compare(entry, ledger))
            advance(entry.info.nbytes)
        rows_left = {fill.parameter: 0 for group in groups for fill in group.place.fills}
        for name in rows_left:
            rows_left[name] = num_rows(tuple(parameters[name].shape))
        for group, chunks in _read(groups, ledger, advance):
            form = group.values.dtype if _is_raw(group, ledger) and group.values.dtype.is_block else None
            targets = [_Target(fill, parameters[fill.parameter], form) for fill in group.place.fills]
            _copy(chunks, targets)
            _copy_scales(group, parameters, ledger)
            ledger.fill(group.place.group)
            for fill in group.place.fills:
                first, last = fill.rows or (0, rows_left[fill.parameter])
                rows_left[fill.parameter] -= last - first
                if rows_left[fill.parameter] == 0:
                    filled(fill.parameter)


class _Target:
    """Where a part of a weight goes: rows of a parameter seen as a matrix, in bytes of `form` where that is kept."""

    def __init__(self, fill: Fill, parameter: torch.Tensor, form: DType | None) -> None:
        rows = parameter.view(num_rows(tuple(parameter.shape)), *parameter.shape[1:][-1:])
        self._rows = rows if fill.rows is None else rows[fill.rows[0] : fill.rows[1]]
        self._part = (0, None) if fill.part is None or fill.part.rows is None else fill.part.rows
        columns = None if fill.part is None else fill.part.columns
        self._columns = columns if columns is None or form is None else tuple(map(form.nbytes, columns))

    def take(self, row: int, values: torch.Tensor) -> None:
        """Copy what of the stored rows from `row` on belongs here."""
        start, stop = self._part[0], self._part[0] + len(self._rows)
        first, last = max(row, start), min(row + len(values), stop)
        if first < last:
            source = values[first - row : last - row]
            if self._columns is not None:
                source = source[:, self._columns[0] : self._columns[1]]
            rows = self._rows[first - start : last - start]
            rows.copy_(source.reshape(rows.shape))  # a vector may be stored as a column


def _copy(chunks: Chunks, targets: Iterable[_Target]) -> None:
    with torch.no_grad():
        for row, values in chunks:
            for target in targets:
                target.take(row, values)


def _copy_scales(group: Group, parameters: Mapping[str, torch.Tensor], ledger: LoadLedger) -> None:
    """Beside codes that were kept: the scale of each ROWS_PER_SCALE rows. A part begins where a block does."""
    kept = [fill for fill in group.place.fills if f"{fill.parameter}_scale" in parameters]
    if not kept or ledger.fp8_block is None:
        return
    high, wide = ledger.fp8_block
    stored = group_scales(group)
    for fill in kept:
        scales = parameters[f"{fill.parameter}_scale"]
        whole = scales.view(-1, scales.shape[-1])
        first, last = fill.rows or (0, num_rows(tuple(parameters[fill.parameter].shape)))
        start, column = _origin(fill)
        panels = torch.arange(-(-(last - first) // ROWS_PER_SCALE))
        taken = stored[(start + panels * ROWS_PER_SCALE) // high, column // wide : column // wide + whole.shape[1]]
        whole[first // ROWS_PER_SCALE :][: len(panels)].copy_(taken)


def _origin(fill: Fill) -> tuple[int, int]:
    """Row and column of the stored tensor from which `fill` takes its part."""
    rows, columns = (None, None) if fill.part is None else (fill.part.rows, fill.part.columns)
    return (rows or (0,))[0], (columns or (0,))[0]


def _compare(entry: Entry, ledger: LoadLedger) -> int | None:
    """The first row in which a stored copy is not equal to what it is a copy of, in the type that is computed with; in
    the stored bytes where the original is kept in its blocks."""
    info, claim = entry.info, entry.claim
    source = ledger.original(info.name)
    is_raw = isinstance(claim, Tied) and claim.parameter in ledger.blocks and info.dtype is source.values.dtype
    dtype = torch.uint8 if is_raw else torch_dtype(ledger.dtype)
    with MappedFile(info.file) as file, MappedFile(source.values.file) as other:
        own = Reader(info, file, is_raw=is_raw, scale=None, block=(1, 1))
        theirs = group_reader(source, other, ledger.fp8_block, is_raw=is_raw)
        for row, values in own.chunks(CHUNK_ELEMENTS):
            rows = (row, row + len(values))
            same = values.to(dtype) == theirs.rows(*rows).to(dtype)
            if not bool(same.all()):
                return row + int(same.flatten(1).all(dim=1).logical_not().nonzero()[0])
            other.forget(source.values, rows)
    return None


def _read(groups: Iterable[Group], ledger: LoadLedger, advance: Advance) -> Iterator[tuple[Group, Chunks]]:
    """Each weight with its chunks, in file order. Parameters in the ledger's `blocks` get the stored bytes or codes."""
    by_file: dict[Path, list[Group]] = {}
    for group in sorted(groups, key=lambda group: group.values.offset):
        by_file.setdefault(group.values.file, []).append(group)
    for path, members in by_file.items():
        with MappedFile(path) as file:
            coming, expected = iter(members), 0
            for group in members:
                while expected < READ_AHEAD and (ahead := next(coming, None)) is not None:
                    file.expect(ahead.values)
                    expected += ahead.values.nbytes
                expected -= group.values.nbytes
                reader = group_reader(group, file, ledger.fp8_block, is_raw=_is_raw(group, ledger))
                yield group, reader.chunks(CHUNK_ELEMENTS)
                advance(group.nbytes)


def _is_raw(group: Group, ledger: LoadLedger) -> bool:
    return any(fill.parameter in ledger.blocks for fill in group.place.fills)
