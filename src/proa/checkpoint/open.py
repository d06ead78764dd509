"""open_checkpoint: a directory in the hub's form or a GGUF file -> Checkpoint. Reads headers and JSON, no weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from proa.checkpoint import gguf_hub, mistral_native
from proa.checkpoint.gguf import is_gguf, read_gguf
from proa.checkpoint.hf_config import HFView
from proa.checkpoint.magic import refuse_foreign_magic, refuse_pickle_name
from proa.checkpoint.shards import read_native_weights, read_weights, refuse_other_data
from proa.checkpoint.strict_json import freeze, parse_object
from proa.checkpoint.types import Checkpoint, FilesReport, TokenizerSource
from proa.errors import CheckpointError

_MAX_JSON_BYTES = 16_000_000


def open_checkpoint(path: Path) -> Checkpoint:
    """Raises CheckpointError naming file and tensor.

    A safetensors file cut right after its header is accepted for planning and listed in `files.damaged`;
    `require_data` refuses it before loading.
    """
    try:
        return _open_hub(path) if path.is_dir() else _open_file(path)
    except OSError as error:
        what = f"{error.filename or path}: cannot be read: {error.strerror or error}"
        raise CheckpointError("checkpoint/unreadable", what) from error
    except CheckpointError as error:
        if str(path) in str(error):
            raise
        # Files of a target and of its draft have the same names.
        facts = (*error.facts, f"checkpoint: {path}")
        raise CheckpointError(error.slug, error.message, facts=facts, hint=error.hint) from error


def require_data(checkpoint: Checkpoint) -> None:
    """Raises CheckpointError when a file holds a header but none of its data, so that nothing can be loaded, and when a
    tensor lies in two files and is not the same in both: readers differ in which one they take."""
    if checkpoint.files.damaged:
        raise CheckpointError(
            "checkpoint/headers-only",
            f"{checkpoint.path}: has headers that can be planned with, but not the weights",
            facts=checkpoint.files.damaged,
            hint="fetch the whole checkpoint",
        )
    for copy in checkpoint.files.copies:
        refuse_other_data(copy, checkpoint.tensors[copy.name])


def _open_file(path: Path) -> Checkpoint:
    if not path.is_file():
        what = "is a link that leads nowhere" if path.is_symlink() else "is not there"
        raise CheckpointError("checkpoint/not-found", f"{path}: {what}")
    refuse_pickle_name(path)
    if not is_gguf(path):
        with path.open("rb") as file:
            refuse_foreign_magic(path, file.read(8), "a directory or a GGUF file")
        raise CheckpointError(
            "checkpoint/wrong-form",
            f"{path}: is neither a directory nor a GGUF file",
            hint=f"give the directory: {path.parent}" if path.suffix == ".safetensors" else None,
        )
    return _open_gguf(path)


def _open_hub(folder: Path) -> Checkpoint:
    config = _read_json(folder / "config.json")
    params = _read_json(folder / mistral_native.PARAMS) if config is None else None
    if params is not None:
        return _open_native(folder, params)
    if config is None:
        ggufs = sorted(folder.glob("*.gguf"))
        hint = f"give the file itself: {ggufs[0]}" if ggufs else None
        raise CheckpointError("checkpoint/no-config", f"{folder}: has no config.json", hint=hint)
    weights = read_weights(folder)
    view = HFView(config, where=str(folder / "config.json"))
    return Checkpoint(
        path=folder,
        form="hub",
        config=view,
        tensors=MappingProxyType(dict(weights.tensors)),
        generation=freeze(_read_json(folder / "generation_config.json") or {}),
        tokenizer=_hub_tokenizer(folder),
        files=weights.files,
    )


def _open_native(folder: Path, params: Mapping[str, Any]) -> Checkpoint:
    weights, where = read_native_weights(folder), str(folder / mistral_native.PARAMS)
    view = HFView(mistral_native.hub_config(params, weights.tensors, where), where=where)
    tensors = mistral_native.hub_tensors(weights.tensors.values(), vision=mistral_native.has_vision(params))
    return Checkpoint(
        path=folder,
        form="hub",
        config=view,
        tensors=MappingProxyType(tensors),
        generation=freeze(_read_json(folder / "generation_config.json") or {}),
        tokenizer=_hub_tokenizer(folder),
        files=weights.files,
    )


def _hub_tokenizer(folder: Path) -> TokenizerSource | None:
    """None without a tokenizer.json. The template: own .jinja file, else own .json file, else tokenizer_config.json."""
    json_file = folder / "tokenizer.json"
    if not json_file.is_file():
        return None
    config = _read_json(folder / "tokenizer_config.json") or {}
    jinja = _read_text(folder / "chat_template.jinja")
    own = _read_json(folder / "chat_template.json") or {}
    template = jinja if jinja is not None else _template(own) or _template(config)
    return TokenizerSource(json_file=json_file, gguf=None, config=freeze(config), chat_template=template)


def _template(config: Mapping[str, Any]) -> str | None:
    """`chat_template` as text, or the entry called default of a list of named ones."""
    found = config.get("chat_template")
    if isinstance(found, list):
        entries = cast("list[dict[str, Any]]", [entry for entry in cast("list[Any]", found) if isinstance(entry, dict)])
        found = next((entry.get("template") for entry in entries if entry.get("name") == "default"), None)
    return found if isinstance(found, str) else None


def _open_gguf(path: Path) -> Checkpoint:
    gguf = read_gguf(path)
    config = gguf_hub.hub_config(gguf)
    tokenizer = gguf_hub.tokenizer_metadata(gguf)
    template = gguf.metadata.get("tokenizer.chat_template")
    # GGUF has no place for sampling defaults; a file beside it may give them, as in a hub repository.
    beside = _read_json(path.parent / "generation_config.json") or {}
    return Checkpoint(
        path=path,
        form="gguf",
        config=HFView(config, where=str(path)),
        tensors=MappingProxyType(gguf_hub.hub_tensors(gguf, config)),
        generation=freeze({**beside, **gguf_hub.hub_generation(gguf)}),
        tokenizer=TokenizerSource(
            json_file=None,
            gguf=MappingProxyType(tokenizer),
            config=MappingProxyType({}),
            chat_template=template if isinstance(template, str) else None,
        )
        if tokenizer
        else None,
        files=FilesReport(total_bytes=gguf.size, shards=1, not_in_index=(), copies=(), damaged=()),
    )


def _read_json(path: Path) -> dict[str, Any] | None:
    text = _read_bytes(path)
    return None if text is None else parse_object(text, path.name)


def _read_text(path: Path) -> str | None:
    data = _read_bytes(path)
    try:
        return None if data is None else data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError("checkpoint/bad-text", f"{path.name}: is not UTF-8: {error}") from error


def _read_bytes(path: Path) -> bytes | None:
    """The file's bytes, None when it is not there. Links (as in the hub's cache) are followed."""
    if not path.is_file():
        if path.is_symlink():
            raise CheckpointError("checkpoint/not-found", f"{path}: is a link that leads nowhere")
        return None
    if path.stat().st_size > _MAX_JSON_BYTES:
        raise CheckpointError("checkpoint/bad-json", f"{path.name}: is larger than {_MAX_JSON_BYTES} bytes")
    return path.read_bytes()
