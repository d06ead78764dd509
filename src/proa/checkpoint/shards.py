"""Several safetensors files as one checkpoint: the index, the files that are there, and who owns each tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from proa.checkpoint.header import ShardHeader, read_header
from proa.checkpoint.magic import PICKLE_SUFFIXES, refuse_pickle_name
from proa.checkpoint.strict_json import parse_object
from proa.checkpoint.types import FilesReport, TensorInfo
from proa.errors import CheckpointError

INDEX = "model.safetensors.index.json"
NATIVE_INDEX = "consolidated.safetensors.index.json"
MAX_INDEX_BYTES = 100_000_000
_COMPARED = 2**20  # bytes at once
_SHOWN = 5  # names printed before "and N more"


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    tensors: Mapping[str, TensorInfo]
    files: FilesReport


def read_weights(folder: Path) -> Weights:
    """All tensors of a hub directory, by its index or from its single file. Raises CheckpointError."""
    entries = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    present = [path for path in entries if path.suffix == ".safetensors" and path.is_file()]
    # Mistral's hub repositories keep a second copy of all weights in the native layout: listed, never read.
    native = [path for path in present if path.name.startswith("consolidated")]
    shards = [path for path in present if path not in native]
    index = folder / INDEX
    if not shards and not index.is_file():
        raise _no_weights(folder, entries, native)
    if index.is_file():
        headers, tensors, copies = _by_index(index, shards)
    else:
        headers, copies = [read_header(_only(folder, shards, index.name))], ()
        tensors = headers[0].tensors
    return Weights(tensors=tensors, files=_report(headers, copies, native))


def read_native_weights(folder: Path) -> Weights:
    """All tensors of a directory in Mistral's native layout, by its index or from its single file."""
    entries = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    shards = [path for path in entries if path.suffix == ".safetensors" and path.name.startswith("consolidated")]
    index = folder / NATIVE_INDEX
    if not shards and not index.is_file():
        raise _no_weights(folder, entries, [])
    if index.is_file():
        headers, tensors, copies = _by_index(index, shards)
    else:
        headers, copies = [read_header(_only(folder, shards, index.name))], ()
        tensors = headers[0].tensors
    return Weights(tensors=tensors, files=_report(headers, copies, ()))


def refuse_other_data(copy: TensorInfo, owner: TensorInfo) -> None:
    """Raises CheckpointError unless both hold the same bytes."""
    with copy.file.open("rb") as one, owner.file.open("rb") as other:
        one.seek(copy.offset)
        other.seek(owner.offset)
        for start in range(0, owner.nbytes, _COMPARED):
            count = min(_COMPARED, owner.nbytes - start)
            if one.read(count) != other.read(count):
                raise _copy_differs(copy, owner, "has other values here than in")


def _refuse_other_header(copy: TensorInfo, owner: TensorInfo) -> None:
    if (copy.dtype, copy.shape) != (owner.dtype, owner.shape):
        raise _copy_differs(copy, owner, f"is {_form(copy)} here, and {_form(owner)} in")


def _copy_differs(copy: TensorInfo, owner: TensorInfo, differs: str) -> CheckpointError:
    return CheckpointError(
        "checkpoint/copy-differs",
        f"{copy.file.name}: {copy.name} {differs} {owner.file.name}, which the index names for it",
        hint="fetch both files and the index from one revision, or take the tensor out of the file that is not named",
    )


def _form(info: TensorInfo) -> str:
    return f"{info.dtype.name} {list(info.shape)}"


def _report(headers: list[ShardHeader], copies: Sequence[TensorInfo], whole: Sequence[Path]) -> FilesReport:
    """`copies` of tensors and `whole` files that are not read."""
    damaged = tuple(f"{h.file.name}: header only, no tensor data" for h in headers if h.headers_only)
    return FilesReport(
        total_bytes=sum(h.size for h in headers),
        shards=len(headers),
        not_in_index=(
            *(f"{copy.file.name}: {copy.name}" for copy in copies),
            *(f"{path.name}: (whole file)" for path in whole),
        ),
        copies=tuple(copies),
        damaged=damaged,
    )


def _by_index(
    index: Path, shards: list[Path]
) -> tuple[list[ShardHeader], dict[str, TensorInfo], tuple[TensorInfo, ...]]:
    owners = _read_index(index)
    listed: dict[str, list[str]] = {}
    for tensor, shard in owners.items():
        listed.setdefault(shard, []).append(tensor)
    _same_files(index, listed, {path.name for path in shards})
    headers = [read_header(index.parent / name) for name in sorted(listed)]
    found: dict[str, TensorInfo] = {}
    copies: list[TensorInfo] = []
    for header in headers:
        _all_listed(header, owners, index.name)
        file = header.file.name
        for name, tensor in header.tensors.items():
            if owners[name] == file:
                found[name] = tensor
            else:
                copies.append(tensor)
    _all_found(owners, found, copies, index.name)
    for copy in copies:
        _refuse_other_header(copy, found[copy.name])
    return headers, found, tuple(copies)


def _read_index(index: Path) -> dict[str, str]:
    """weight_map: tensor -> file name. A file name may not lead out of the folder."""
    if index.stat().st_size > MAX_INDEX_BYTES:
        raise CheckpointError("checkpoint/bad-index", f"{index.name}: is larger than {MAX_INDEX_BYTES} bytes")
    owners: object = parse_object(index.read_bytes(), index.name).get("weight_map")
    if not isinstance(owners, dict) or not owners:
        raise CheckpointError("checkpoint/bad-index", f"{index.name}: has no weight_map that names a tensor")
    checked: set[str] = set()
    for tensor, shard in cast("dict[str, Any]", owners).items():
        if not isinstance(shard, str) or shard not in checked:
            checked.add(_shard_name(index, tensor, shard))
    return cast("dict[str, str]", owners)


def _shard_name(index: Path, tensor: str, shard: object) -> str:
    """What the index says is a tensor's file, if it can be one."""
    if not isinstance(shard, str) or Path(shard).name != shard:
        raise CheckpointError(
            "checkpoint/bad-index", f"{index.name}: {tensor}: {shard!r} is not the name of a file in this folder"
        )
    refuse_pickle_name(Path(shard))
    if Path(shard).suffix != ".safetensors":
        raise CheckpointError(
            "checkpoint/bad-index", f"{index.name}: {tensor}: {shard!r} is not the name of a .safetensors file"
        )
    return shard


def _same_files(index: Path, listed: Mapping[str, list[str]], present: set[str]) -> None:
    missing, extra = sorted(set(listed) - present), sorted(present - set(listed))
    if missing:
        facts = [f"{shard}: {len(listed[shard])} tensors: {_some(listed[shard])}" for shard in missing]
        if extra:
            facts.append(f"there, but not in {index.name}: {_some(extra)}")
        raise CheckpointError(
            "checkpoint/missing-shard",
            f"{missing[0]}: is named by {index.name} but is not there"
            + (f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""),
            facts=facts,
            hint="fetch the missing files again; if shards were renamed, the index must be written anew",
        )
    if extra:
        raise CheckpointError(
            "checkpoint/unlisted-shard",
            f"{extra[0]}: is there, but {index.name} does not name it"
            + (f" (and {len(extra) - 1} more)" if len(extra) > 1 else ""),
            facts=[f"not in the index: {_some(extra)}"],
            hint="move files that do not belong to this checkpoint elsewhere, or write the index anew",
        )


def _all_listed(header: ShardHeader, owners: Mapping[str, str], index: str) -> None:
    unknown = [name for name in header.tensors if name not in owners]
    if unknown:
        raise CheckpointError(
            "checkpoint/unlisted-tensor",
            f"{header.file.name}: {unknown[0]} is in this file, but {index} does not list it",
            facts=[f"{len(unknown)} such tensors: {_some(unknown)}"],
        )


def _all_found(
    owners: Mapping[str, str], found: Mapping[str, TensorInfo], copies: Sequence[TensorInfo], index: str
) -> None:
    lost = [name for name in owners if name not in found]
    if lost:
        elsewhere = [f"{copy.file.name}: {copy.name}" for copy in copies if copy.name in set(lost)]
        raise CheckpointError(
            "checkpoint/missing-tensor",
            f"{owners[lost[0]]}: {lost[0]} is not in this file, though {index} says so",
            facts=[f"{len(lost)} such tensors: {_some(f'{owners[name]}: {name}' for name in lost)}"]
            + ([f"found elsewhere: {_some(elsewhere)}"] if elsewhere else []),
            hint="the index is stale or the file is another one: fetch both again",
        )


def _only(folder: Path, shards: list[Path], index: str) -> Path:
    if len(shards) > 1:
        raise CheckpointError(
            "checkpoint/no-index",
            f"{folder.name}: has {len(shards)} weight files, but no {index}",
            facts=[_some(path.name for path in shards)],
        )
    name = shards[0].stem
    if "-of-" in name and name.rsplit("-of-", 1)[1].lstrip("0") != "1":
        raise CheckpointError(
            "checkpoint/no-index", f"{shards[0].name}: is one shard of several, but there is no {index}"
        )
    return shards[0]


def _no_weights(folder: Path, entries: list[Path], native: list[Path]) -> CheckpointError:
    pickles = [path for path in entries if path.suffix.lower() in PICKLE_SUFFIXES]
    if pickles:
        refuse_pickle_name(pickles[0], others=[path.name for path in pickles[1:]])
    broken = [path.name for path in entries if path.suffix == ".safetensors" and path.is_symlink()]
    facts = [f"links that lead nowhere: {_some(broken)}"] if broken else []
    if native:
        facts.append(f"only the native layout, which is not read: {_some(path.name for path in native)}")
    ggufs = [path.name for path in entries if path.suffix == ".gguf"]
    hint = f"give the file itself: {folder / ggufs[0]}" if ggufs else None
    return CheckpointError("checkpoint/no-weights", f"{folder}: has no .safetensors file", facts=facts, hint=hint)


def _some(names: Iterable[str]) -> str:
    every = list(names)
    rest = f" and {len(every) - _SHOWN} more" if len(every) > _SHOWN else ""
    return ", ".join(every[:_SHOWN]) + rest
