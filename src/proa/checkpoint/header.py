"""Own reader of safetensors headers: one file's bytes -> TensorInfo. Owns the bounds; reads no tensor data."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any

from proa.checkpoint.magic import refuse_foreign_magic
from proa.checkpoint.strict_json import parse_object
from proa.checkpoint.types import TensorInfo
from proa.errors import CheckpointError
from proa.units import DType

MAX_HEADER_BYTES = 100_000_000
MAX_DIM_OF_EMPTY = 1 << 24  # a tensor without elements may still not have a dimension that nothing could hold
_DTYPES = MappingProxyType(
    {
        dtype.name: dtype
        for dtype in (
            *(DType.F64, DType.F32, DType.F16, DType.BF16, DType.F8_E4M3, DType.F8_E5M2, DType.F8_E8M0),
            *(DType.I64, DType.I32, DType.I16, DType.I8, DType.U64, DType.U32, DType.U16, DType.U8, DType.BOOL),
        )
    }
)


_BYTES = MappingProxyType({name: dtype.nbytes(1) for name, dtype in _DTYPES.items()})
_FIELDS = frozenset({"dtype", "shape", "data_offsets"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardHeader:
    """Header of one file of `size` bytes. `headers_only`: the file ends right after a header that promises data."""

    file: Path
    size: int
    tensors: Mapping[str, TensorInfo]
    headers_only: bool


def read_header(path: Path) -> ShardHeader:
    """The tensors of one safetensors file, in order of their data. Raises CheckpointError naming file and tensor."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(9)
        length = int.from_bytes(head[:8], "little")
        if len(head) < 9 or head[8:] != b"{" or length > MAX_HEADER_BYTES:
            refuse_foreign_magic(path, head, "safetensors")
        if len(head) < 9:
            raise _truncated(path, size, 9)
        if length > MAX_HEADER_BYTES:
            raise CheckpointError(
                "checkpoint/bad-header",
                f"{path.name}: is not safetensors, or damaged: its header would have {length} bytes",
                facts=[f"at most {MAX_HEADER_BYTES} are read"],
            )
        if 8 + length > size:
            raise _truncated(path, size, 8 + length)
        header = _parsed(head[8:] + file.read(length - 1) if length else b"", path)
    start = 8 + length
    tensors = [_tensor_info(path, name, entry, start) for name, entry in header.items() if name != "__metadata__"]
    tensors.sort(key=attrgetter("offset", "nbytes"))
    end = _end_of_data(tensors, start)
    headers_only = size == start < end
    if size < end and not headers_only:
        raise _truncated(path, size, end)
    if size > end:
        raise CheckpointError(
            "checkpoint/trailing-bytes",
            f"{path.name}: has {size} bytes, but its header accounts for {end}",
            facts=[f"{size - end} bytes belong to no tensor"],
        )
    found = {tensor.name: tensor for tensor in tensors}
    return ShardHeader(file=path, size=size, tensors=found, headers_only=headers_only)


def _parsed(text: bytes, path: Path) -> Mapping[str, Any]:
    """Looking for keys that appear twice costs as much as parsing, and the quotes tell: a tensor has five strings (its
    name, three keys and its dtype), an entry of the metadata two. json.loads drops a key that appears twice, its quotes
    stay; then, and wherever else they do not add up, the strict parser says what is wrong."""
    try:
        header: dict[str, Any] = json.loads(text)
        metadata: dict[str, Any] = header.get("__metadata__", {})
        has_metadata = "__metadata__" in header
        quotes = 10 * (len(header) - has_metadata) + 2 * has_metadata + 4 * len(metadata)
        is_plain = b"\\" not in text and all(isinstance(value, str) for value in metadata.values())
        if is_plain and text.count(b'"') == quotes:
            return header
    except (ValueError, TypeError, AttributeError, RecursionError):
        pass
    return parse_object(text, f"{path.name} (header)")


def _tensor_info(path: Path, name: str, entry: dict[str, Any], start: int) -> TensorInfo:
    if type(entry) is not dict or entry.keys() != _FIELDS:
        raise _bad(path, name, "its header entry must have exactly dtype, shape and data_offsets")
    kind, shape, offsets = entry["dtype"], _naturals(entry["shape"]), _naturals(entry["data_offsets"])
    dtype = _DTYPES.get(kind) if isinstance(kind, str) else None
    if dtype is None:
        raise CheckpointError(
            "checkpoint/unknown-dtype",
            f"{path.name}: {name}: the dtype {kind!r} is not known",
            facts=[f"known: {' '.join(_DTYPES)}"],
        )
    if shape is None:
        raise _bad(path, name, "its shape is not a list of integers >= 0")
    if offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _bad(path, name, "its data_offsets are not [begin, end] with 0 <= begin <= end")
    nbytes, span = math.prod(shape) * _BYTES[kind], offsets[1] - offsets[0]
    if nbytes != span:
        raise _bad(path, name, f"{kind} of shape {list(shape)} has {nbytes} bytes, but its offsets span {span}")
    refuse_huge_empty(path, name, shape)
    return TensorInfo(name, name, dtype, shape, nbytes, path, start + offsets[0])


def _bad(path: Path, name: str, what: str) -> CheckpointError:
    return CheckpointError("checkpoint/bad-header", f"{path.name}: {name}: {what}")


def refuse_huge_empty(path: Path, name: str, shape: tuple[int, ...]) -> None:
    """A zero-element shape passes every byte check whatever its other dimensions say, so these are bounded here."""
    if 0 in shape and max(shape) > MAX_DIM_OF_EMPTY:
        raise CheckpointError(
            "checkpoint/huge-empty-tensor",
            f"{path.name}: {name}: has no element, but a dimension beyond {MAX_DIM_OF_EMPTY}",
            facts=[f"shape {list(shape)}"],
        )


def misplaced(tensor: TensorInfo, before: str, expected: int) -> CheckpointError:
    """The error of a tensor that does not begin where `before`, the one stored before it, lets it begin."""
    where, facts = tensor.file.name, [f"{tensor.name} begins at byte {tensor.offset}, and should at {expected}"]
    if tensor.offset < expected:
        return CheckpointError("checkpoint/overlap", f"{where}: {tensor.name} overlaps {before}", facts=facts)
    return CheckpointError("checkpoint/hole", f"{where}: {tensor.name} leaves a hole after {before}", facts=facts)


def _end_of_data(tensors: list[TensorInfo], start: int) -> int:
    """Where the last tensor ends; tensors must follow each other without overlap or hole."""
    at, before = start, "the header"
    for tensor in tensors:
        if tensor.offset != at:
            raise misplaced(tensor, before, at)
        at, before = tensor.offset + tensor.nbytes, tensor.name
    return at


def _naturals(value: list[Any]) -> tuple[int, ...] | None:
    if type(value) is not list:
        return None
    for item in value:
        if type(item) is not int or item < 0:
            return None
    return tuple(value)


def _truncated(path: Path, size: int, expected: int) -> CheckpointError:
    return CheckpointError(
        "checkpoint/truncated",
        f"{path.name}: is truncated: it has {size} bytes and must have {expected}",
        hint="fetch the file again",
    )
