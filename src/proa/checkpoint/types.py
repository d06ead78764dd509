"""What a checkpoint is, once its headers are read: tensors, config view, tokenizer material. Owns no parsing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from proa.checkpoint.hf_config import HFView
from proa.units import DType


@dataclass(frozen=True, slots=True, kw_only=True)
class RopePermuted:
    """Rows of a q or k projection stored by GGUF's llama converter: per head, the two rope halves are interleaved.

    Stored row 2i of a head is hub row i, stored row 2i+1 is hub row i + head_dim/2.
    """

    heads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Transposed:
    """A stack of matrices, one per head, each stored as its transpose. `shape` is the hub's: [heads, rows, columns]."""

    heads: int


class TensorInfo(NamedTuple):  # a checkpoint has up to hundreds of thousands: tuples are made fastest
    """One stored tensor. `shape` is the hub's (row-major) shape in elements; `offset` is absolute within `file`.

    `name` is the hub name under which the weight rules know it, `stored_name` the name in the file; they differ only
    for GGUF.
    """

    name: str
    stored_name: str
    dtype: DType
    shape: tuple[int, ...]
    nbytes: int
    file: Path
    offset: int
    row_order: RopePermuted | Transposed | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerSource:
    """Where the tokenizer comes from: exactly one of a tokenizer.json path or GGUF metadata.

    `gguf` maps `tokenizer.ggml.*` keys (without that prefix) to values. `config` is tokenizer_config.json, `{}` if
    absent. `chat_template` is the template text, from whichever place the checkpoint keeps it.
    """

    json_file: Path | None
    gguf: Mapping[str, Any] | None
    config: Mapping[str, Any]
    chat_template: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesReport:
    """Facts about the files: `not_in_index` lists what is not loaded (`file: tensor`, or a whole file), because the
    index names another file for it. `copies` are the tensors among that; before loading they are compared with those
    that the index names (checkpoint.open.require_data). `damaged` lists files that hold a header but none of its data:
    good for planning, refused before loading.
    """

    total_bytes: int
    shards: int
    not_in_index: tuple[str, ...]
    copies: tuple[TensorInfo, ...]
    damaged: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One opened checkpoint: headers and config only.

    `generation` is generation_config.json (or what GGUF metadata says: eos and bos ids), `{}` if absent.
    """

    path: Path
    form: str  # "hub" or "gguf"
    config: HFView
    tensors: Mapping[str, TensorInfo]
    generation: Mapping[str, Any]
    tokenizer: TokenizerSource | None
    files: FilesReport
