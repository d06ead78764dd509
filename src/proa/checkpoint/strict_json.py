"""JSON objects from files that nobody vouches for: duplicate keys, NaN and Infinity are refused. Owns no meaning."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NoReturn, cast

from proa.errors import CheckpointError


class _DuplicateKey(ValueError):
    pass


def parse_object(data: bytes, where: str) -> dict[str, Any]:
    """The JSON object in `data`. Raises CheckpointError naming `where` for anything else, never another exception."""
    try:
        value = json.loads(
            data.decode("utf-8"), object_pairs_hook=_pairs, parse_constant=_no_constant, parse_float=_finite
        )
    except _DuplicateKey as error:
        raise CheckpointError("checkpoint/duplicate-key", f"{where}: {error}") from error
    except RecursionError as error:
        raise CheckpointError("checkpoint/bad-json", f"{where}: not readable as JSON: nested too deeply") from error
    except ValueError as error:  # covers UnicodeDecodeError, JSONDecodeError and integers with too many digits
        raise CheckpointError("checkpoint/bad-json", f"{where}: not readable as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError("checkpoint/bad-json", f"{where}: holds a {type(value).__name__}, not a JSON object")
    return cast("dict[str, Any]", value)


def freeze(value: object) -> Any:
    """A deep copy in which lists are tuples and objects are read-only mappings."""
    if isinstance(value, Mapping):
        items = cast("Mapping[str, object]", value).items()
        return MappingProxyType({key: freeze(item) for key, item in items})
    if isinstance(value, list | tuple):
        return tuple(freeze(item) for item in cast("list[object]", value))
    return value


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise _DuplicateKey(f"the key {twice!r} appears twice")
    return result


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:40]} is out of range")
    return value
