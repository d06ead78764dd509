"""Checkpoint files byte by byte, so that a test can write one that no library would: safetensors, its index, GGUF."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

STRING, ARRAY, U32, F32, BOOL, U64 = 8, 9, 4, 6, 7, 10
_CODES = {0: "B", 1: "b", 2: "H", 3: "h", U32: "I", 5: "i", F32: "f", BOOL: "?", U64: "Q", 11: "q", 12: "d"}


def entry(dtype: str, shape: Sequence[Any], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def safetensors(header: Mapping[str, Any] | str, data: bytes) -> bytes:
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    return struct.pack("<Q", len(text)) + text + data


def shard(names: Sequence[str]) -> bytes:
    """Each name as one float32 tensor [2]."""
    header = {name: entry("F32", [2], 8 * i, 8 * i + 8) for i, name in enumerate(names)}
    return safetensors(header, bytes(8 * len(names)))


def hub(folder: Path, files: Mapping[str, bytes], owners: Mapping[str, Any] | None) -> Path:
    """A directory with a small config.json, `files`, and an index when `owners` (tensor -> file) are given."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    for name, content in files.items():
        (folder / name).write_bytes(content)
    if owners is not None:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": dict(owners)}))
    return folder


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str, kind: int, value: Any) -> bytes:
    """One GGUF metadata pair of a scalar or a text."""
    return text(key) + struct.pack("<I", kind) + (text(value) if kind == STRING else scalar(kind, value))


def array(key: str, kind: int, count: int, payload: bytes) -> bytes:
    """A metadata pair that claims `count` elements of `kind`, whatever the payload holds."""
    return text(key) + struct.pack("<IIQ", ARRAY, kind, count) + payload


def scalar(kind: int, value: Any) -> bytes:
    return struct.pack("<" + _CODES[kind], value)


def tensor(name: str, dims: Sequence[int], kind: int, offset: int) -> bytes:
    """One entry of the GGUF tensor table; `dims` fastest first."""
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def gguf(
    pairs: Sequence[bytes],
    tensors: Sequence[bytes],
    data: bytes,
    *,
    version: int = 3,
    counts: tuple[int, int] | None = None,
    alignment: int = 32,
) -> bytes:
    """A GGUF file. `counts` (tensors, pairs) overrides what the header claims."""
    claimed = counts or (len(tensors), len(pairs))
    head = b"GGUF" + struct.pack("<IQQ", version, *claimed) + b"".join(pairs) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + data
