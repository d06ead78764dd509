"""Own bounded reader of GGUF files (version 2 and 3, little endian): metadata and tensor table. Reads no tensor data.

Nothing in the file is believed: each count, length and offset is compared with the file's size, and with a budget,
before anything is allocated for it. What the values mean is gguf_hub.py's.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from proa.checkpoint.header import misplaced, refuse_huge_empty
from proa.checkpoint.magic import refuse_foreign_magic, refuse_pickle_name
from proa.checkpoint.types import TensorInfo
from proa.errors import CheckpointError
from proa.units import DType

_STRING, _ARRAY = 8, 9
_SCALARS = MappingProxyType({0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"})
_DTYPES = MappingProxyType(
    {0: DType.F32, 1: DType.F16, 30: DType.BF16}
    | {2: DType.Q4_0, 3: DType.Q4_1, 6: DType.Q5_0, 7: DType.Q5_1, 8: DType.Q8_0}
    | {12: DType.Q4_K, 13: DType.Q5_K, 14: DType.Q6_K}
)
_OTHER_TYPES = MappingProxyType(
    {9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0"}
    | {16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S"}
    | {23: "IQ4_XS", 29: "IQ1_M", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64"}
)
# Far above any real file (tokens, scores, types and merges of the largest vocabularies together are 1.3 million
# items), low enough that a crafted one costs little.
_MAX_HEADER = 100_000_000
_MAX_ITEMS = 1 << 21
_MAX_STRING = 1 << 22
_MAX_NAME = 1024
_MAX_DIMS = 4
_MAX_ALIGNMENT = 1 << 16
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFile:
    """Metadata values are int, float, bool, str, or a tuple of one of these; tensors carry their stored names."""

    path: Path
    size: int
    metadata: Mapping[str, Any]
    tensors: tuple[TensorInfo, ...]


def read_gguf(path: Path) -> GgufFile:
    """Raises CheckpointError, and nothing else, for a file that is damaged, hostile or of a form that Proa lacks."""
    refuse_pickle_name(path)
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(24)
        tensors, pairs = _counts(path, head, size)
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            cursor = _Cursor(path, data, size)
            metadata = _metadata(cursor, pairs)
            stored = _tensor_table(cursor, tensors)
            at = cursor.at
    alignment = _alignment(path, metadata)
    start = -(-at // alignment) * alignment
    placed = tuple(_tensor_info(path, entry, start, alignment) for entry in stored)
    _check_spans(path, placed, start, alignment, size)
    return GgufFile(path=path, size=size, metadata=MappingProxyType(metadata), tensors=placed)


def is_gguf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


@dataclass(frozen=True, slots=True)
class _Stored:
    """One entry of the tensor table as stored: `dims` are fastest first, `offset` counts from the data section."""

    name: str
    dims: tuple[int, ...]
    kind: int
    offset: int


class _Cursor:
    """A position in the header. Every read is checked against the file's end first."""

    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self.path = path
        self.at = 24
        self._data = data
        self._size = size
        self._items = 0

    def bad(self, what: str) -> CheckpointError:
        return CheckpointError("checkpoint/bad-gguf", f"{self.path.name}: {what} (at byte {self.at} of {self._size})")

    def need(self, nbytes: int, what: str) -> None:
        """Raises unless `nbytes` more bytes are there."""
        if nbytes > self._size - self.at:
            raise CheckpointError(
                "checkpoint/truncated",
                f"{self.path.name}: is truncated or damaged: {what} needs {nbytes} bytes at byte {self.at},"
                f" the file has {self._size}",
            )
        if self.at + nbytes > _MAX_HEADER:
            raise self.bad(f"{what} would make the header larger than {_MAX_HEADER} bytes")

    def scalar(self, code: str, what: str) -> Any:
        return self.scalars(code, 1, what)[0]

    def scalars(self, code: str, count: int, what: str) -> tuple[Any, ...]:
        """`count` values of one struct code. Booleans must be 0 or 1."""
        nbytes = count * struct.calcsize("<" + code)
        self.need(nbytes, what)
        stop = self.at + nbytes
        if code == "?" and max(self._data[self.at : stop], default=0) > 1:
            raise self.bad(f"{what} has a boolean that is neither 0 nor 1")
        values = struct.unpack_from(f"<{count}{code}", self._data, self.at)
        self.at = stop
        return values

    def string(self, what: str, limit: int) -> str:
        return self.strings(1, what, limit)[0]

    def strings(self, count: int, what: str, limit: int) -> tuple[str, ...]:
        """`count` texts, each a length and its UTF-8 bytes. One tight loop: vocabularies have 10^5 of them."""
        data, at, end = self._data, self.at, min(self._size, _MAX_HEADER)
        length_at, found = struct.Struct("<Q").unpack_from, list[str]()
        try:
            for _ in range(count):
                stop = at + 8
                if stop <= end:
                    stop += length_at(data, at)[0]
                if stop > end or stop - at > limit + 8:
                    self.at = at
                    self.need(stop - at, what)
                    raise self.bad(f"{what} is a text of {stop - at - 8} bytes, more than {limit}")
                found.append(data[at + 8 : stop].decode("utf-8"))
                at = stop
        except UnicodeDecodeError as error:
            raise self.bad(f"{what} is not UTF-8") from error
        self.at = at
        return tuple(found)

    def spend(self, items: int, what: str) -> None:
        """Take `items` from the budget of array elements of the whole file."""
        self._items += items
        if self._items > _MAX_ITEMS:
            raise self.bad(f"{what} has {items} elements; all arrays together may have {_MAX_ITEMS}")


def _counts(path: Path, head: bytes, size: int) -> tuple[int, int]:
    """Tensor and metadata counts from the first 24 bytes."""
    if head[:4] != b"GGUF":
        refuse_foreign_magic(path, head, "GGUF")
        raise CheckpointError("checkpoint/bad-gguf", f"{path.name}: is not a GGUF file")
    if len(head) < 24:
        raise CheckpointError(
            "checkpoint/truncated", f"{path.name}: is truncated: it has {size} bytes, at least 24 needed"
        )
    version, tensors, pairs = struct.unpack_from("<IQQ", head, 4)
    if version not in (2, 3):
        swapped = int.from_bytes(head[4:8], "big")
        kind = f"big endian (version {swapped})" if swapped in (1, 2, 3) else f"version {version}"
        raise CheckpointError(
            "checkpoint/gguf-version", f"{path.name}: GGUF {kind} is not read; version 2 and 3, little endian, are"
        )
    # The smallest tensor entry has 32 bytes, the smallest metadata pair 13.
    if tensors * 32 + pairs * 13 > min(size, _MAX_HEADER) - 24:
        raise CheckpointError(
            "checkpoint/bad-gguf",
            f"{path.name}: claims {tensors} tensors and {pairs} metadata pairs, more than {size} bytes can hold",
        )
    return tensors, pairs


def _metadata(cursor: _Cursor, pairs: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(pairs):
        key = cursor.string("a metadata key", _MAX_NAME)
        if key in found:
            raise CheckpointError(
                "checkpoint/duplicate-key", f"{cursor.path.name}: the metadata key {key!r} appears twice"
            )
        found[key] = _value(cursor, key)
    return found


def _value(cursor: _Cursor, key: str) -> Any:
    kind = cursor.scalar("I", key)
    if kind == _STRING:
        return cursor.string(key, _MAX_STRING)
    if kind == _ARRAY:
        return _array(cursor, key)
    if kind not in _SCALARS:
        raise cursor.bad(f"{key} has the unknown value type {kind}")
    value = cursor.scalar(_SCALARS[kind], key)
    if isinstance(value, float) and not math.isfinite(value):
        raise cursor.bad(f"{key} is {value}")
    return value


def _array(cursor: _Cursor, key: str) -> tuple[Any, ...]:
    kind, count = cursor.scalars("I", 1, key)[0], cursor.scalar("Q", key)
    if kind == _ARRAY:
        raise cursor.bad(f"{key} is an array of arrays, which is not read")
    if kind != _STRING and kind not in _SCALARS:
        raise cursor.bad(f"{key} is an array of the unknown value type {kind}")
    smallest = 8 if kind == _STRING else struct.calcsize("<" + _SCALARS[kind])
    cursor.need(count * smallest, key)
    cursor.spend(count, key)
    if kind == _STRING:
        return cursor.strings(count, key, _MAX_STRING)
    return cursor.scalars(_SCALARS[kind], count, key)


def _tensor_table(cursor: _Cursor, count: int) -> list[_Stored]:
    table: dict[str, _Stored] = {}
    for _ in range(count):
        name = cursor.string("a tensor name", _MAX_NAME)
        if name in table:
            raise CheckpointError("checkpoint/duplicate-tensor", f"{cursor.path.name}: {name}: appears twice")
        rank = cursor.scalar("I", name)
        if not 1 <= rank <= _MAX_DIMS:
            raise cursor.bad(f"{name}: has {rank} dimensions, not 1 to {_MAX_DIMS}")
        dims = cursor.scalars("Q", rank, name)
        table[name] = _Stored(name, dims, cursor.scalar("I", name), cursor.scalar("Q", name))
    return list(table.values())


def _alignment(path: Path, metadata: Mapping[str, Any]) -> int:
    value = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    good = type(value) is int and 8 <= value <= _MAX_ALIGNMENT and value & (value - 1) == 0
    if not good:
        raise CheckpointError(
            "checkpoint/bad-gguf",
            f"{path.name}: general.alignment is {value!r}, not a power of two from 8 to {_MAX_ALIGNMENT}",
        )
    return value


def _tensor_info(path: Path, entry: _Stored, start: int, alignment: int) -> TensorInfo:
    dtype = _DTYPES.get(entry.kind)
    if dtype is None:
        kind = _OTHER_TYPES.get(entry.kind, f"type {entry.kind}")
        raise CheckpointError(
            "checkpoint/unknown-dtype",
            f"{path.name}: {entry.name}: {kind} tensors are not read",
            facts=[f"read: {' '.join(t.name for t in _DTYPES.values())}"],
        )
    shape = tuple(reversed(entry.dims))
    refuse_huge_empty(path, entry.name, shape)
    if entry.dims[0] % dtype.storage.elements:
        what = f"rows of {entry.dims[0]} are not whole {dtype.name} blocks of {dtype.storage.elements}"
        raise CheckpointError("checkpoint/bad-gguf", f"{path.name}: {entry.name}: {what}")
    if entry.offset % alignment:
        what = f"its offset {entry.offset} is not a multiple of the alignment {alignment}"
        raise CheckpointError("checkpoint/bad-gguf", f"{path.name}: {entry.name}: {what}")
    return TensorInfo(
        name=entry.name,
        stored_name=entry.name,
        dtype=dtype,
        shape=shape,
        nbytes=dtype.nbytes(math.prod(shape)),
        file=path,
        offset=start + entry.offset,
    )


def _check_spans(path: Path, tensors: tuple[TensorInfo, ...], start: int, alignment: int, size: int) -> None:
    """Tensors lie in the file and follow each other; between and after them there is only padding."""
    end, before = start, "the header"
    for tensor in sorted(tensors, key=lambda t: (t.offset, t.nbytes)):
        expected = -(-end // alignment) * alignment
        if tensor.offset != expected and tensor.offset + tensor.nbytes <= size:
            raise misplaced(tensor, before, expected)
        end, before = tensor.offset + tensor.nbytes, tensor.name
        if end > size:
            raise CheckpointError(
                "checkpoint/truncated",
                f"{path.name}: is truncated or damaged: {tensor.name} ends at byte {end}, the file has {size}",
            )
    if size - end >= alignment:
        raise CheckpointError(
            "checkpoint/trailing-bytes", f"{path.name}: has {size} bytes, but its tensors end at {end}"
        )
