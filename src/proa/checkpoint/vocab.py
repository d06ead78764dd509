"""The id -> token text list of a tokenizer, read without building it, for comparing vocabularies id by id."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

from proa.checkpoint.strict_json import parse_object
from proa.checkpoint.types import TokenizerSource
from proa.errors import CheckpointError

_MAX_BYTES = 200_000_000
_MAX_ID = 1 << 22
_GGUF_UNUSED = 5  # token_type of the rows that only pad the embedding matrix


def token_texts(source: TokenizerSource) -> tuple[str | None, ...]:
    """Token text by id, as stored (byte-level BPE stays encoded); None where no token has the id.

    Raises CheckpointError naming the file when the list cannot be read.
    """
    if source.json_file is not None:
        return _json_texts(source.json_file)
    return _gguf_texts(source.gguf or {})


def _gguf_texts(metadata: Any) -> tuple[str | None, ...]:
    tokens = metadata.get("tokens")
    if not isinstance(tokens, tuple) or not all(isinstance(text, str) for text in cast("tuple[Any, ...]", tokens)):
        raise CheckpointError("checkpoint/bad-tokenizer", "the GGUF has no tokenizer.ggml.tokens")
    texts = cast("tuple[str, ...]", tokens)
    types = cast("tuple[int, ...]", metadata.get("token_type") or (0,) * len(texts))
    if len(types) != len(texts):
        raise CheckpointError(
            "checkpoint/bad-tokenizer", f"the GGUF has {len(texts)} tokens, but {len(types)} token types"
        )
    return tuple(None if kind == _GGUF_UNUSED else text for text, kind in zip(texts, types, strict=True))


def _json_texts(path: Path) -> tuple[str | None, ...]:
    if path.stat().st_size > _MAX_BYTES:
        raise CheckpointError("checkpoint/bad-tokenizer", f"{path.name}: is larger than {_MAX_BYTES} bytes")
    content = parse_object(path.read_bytes(), path.name)
    found: dict[int, str] = {}
    for text, index in _model_tokens(path, content.get("model")):
        if found.setdefault(_token_id(path, text, index), text) != text:
            raise _bad(path, f"the id {index} belongs to two tokens: {found[index]!r} and {text!r}")
    # An added token takes its id from the model's token, as the tokenizers library does.
    found |= {_token_id(path, text, index): text for text, index in _added_tokens(path, content.get("added_tokens"))}
    return tuple(found.get(index) for index in range(max(found, default=-1) + 1))


def _model_tokens(path: Path, model: Any) -> Iterator[tuple[Any, Any]]:
    """BPE, WordPiece and WordLevel map text to id; Unigram lists [text, score] in id order."""
    vocab: Any = cast("dict[str, Any]", model).get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, dict):
        yield from cast("dict[str, Any]", vocab).items()
    elif isinstance(vocab, list):
        for index, entry in enumerate(cast("list[Any]", vocab)):
            if not isinstance(entry, list) or not entry:
                raise _bad(path, f"model.vocab: entry {index} is not [token, score]")
            yield cast("list[Any]", entry)[0], index
    else:
        raise _bad(path, "has no model.vocab that is an object or a list")


def _added_tokens(path: Path, entries: Any) -> Iterator[tuple[Any, Any]]:
    if not isinstance(entries, list | None):
        raise _bad(path, "added_tokens is not a list")
    for entry in cast("Iterable[Any]", entries or ()):
        if not isinstance(entry, dict) or not {"id", "content"} <= set(cast("dict[str, Any]", entry)):
            raise _bad(path, "an added token has no id or no content")
        yield cast("dict[str, Any]", entry)["content"], cast("dict[str, Any]", entry)["id"]


def _token_id(path: Path, text: Any, index: Any) -> int:
    if not isinstance(text, str) or type(index) is not int or not 0 <= index < _MAX_ID:
        raise _bad(path, f"{text!r} has the id {index!r}, not an integer from 0 to {_MAX_ID - 1}")
    return index


def _bad(path: Path, what: str) -> CheckpointError:
    return CheckpointError("checkpoint/bad-tokenizer", f"{path.name}: {what}")
