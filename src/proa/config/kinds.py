"""What a setting's value may be: how each kind is read from text, TOML or Python. Owns no settings.

The word `auto` is every setting's and is dealt with before, in load.py.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, cast

from proa.units import parse_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """How a value is shown (`metavar`), which words it can be (empty where they cannot be listed), how it is read.

    `parse` takes what the source holds: text from flags and environment, typed values from TOML and Python. It raises
    ValueError that says no more than what is wrong.
    """

    metavar: str
    parse: Callable[[object], object]
    choices: tuple[str, ...] = ()


def members(*options: Enum) -> Kind:
    """Members of an enum, by value; Python may give the member itself."""

    def parse(raw: object) -> Enum:
        for option in options:
            if raw is option or raw == option.value:
                return option
        raise ValueError("not one of the choices")

    return _listed(parse, tuple(str(option.value) for option in options))


def words(*options: str) -> Kind:
    """Fixed words that no enum stands for."""

    def parse(raw: object) -> str:
        if isinstance(raw, str) and raw in options:
            return raw
        raise ValueError("not one of the choices")

    return _listed(parse, options)


def _listed(parse: Callable[[object], object], choices: tuple[str, ...]) -> Kind:
    return Kind(metavar="|".join(("auto", *choices)), choices=choices, parse=parse)


def count(least: int, most: int) -> Kind:
    """A whole number. The upper bound only catches slips of the finger."""

    def parse(raw: object) -> int:
        value = int(raw) if isinstance(raw, str) and re.fullmatch(r"-?[0-9]{1,18}", raw) else raw
        if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
            return value
        raise ValueError(f"not a whole number from {least} to {most}")

    return Kind(metavar="N", parse=parse)


def word(metavar: str) -> Kind:
    """A free word, a kernel or a weight format: the plan knows which exist."""

    def parse(raw: object) -> str:
        if isinstance(raw, str) and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.+-]*", raw):
            return raw
        raise ValueError("not a name (letters, digits, '_', '.', '+', '-')")

    return Kind(metavar=metavar, parse=parse)


def _parse_size(raw: object) -> int:
    try:
        value = parse_bytes(raw) if isinstance(raw, str) else raw
    except (ValueError, OverflowError):
        value = None
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**63:
        return value
    raise ValueError("not a size in bytes (like 8GiB, 500MB, 4096)")


def _parse_path(raw: object) -> str:
    text = os.fspath(cast("os.PathLike[Any]", raw)) if isinstance(raw, os.PathLike) else raw
    if isinstance(text, str) and text and "\0" not in text:
        return text
    raise ValueError("not a path")


def _parse_globs(raw: object) -> tuple[str, ...]:
    """Text holds several patterns with commas between them; a list is taken as it is."""
    items = raw.split(",") if isinstance(raw, str) else raw
    if isinstance(items, list | tuple):
        globs = [item for item in cast("list[object]", items) if isinstance(item, str) and item]
        if globs and len(globs) == len(cast("list[object]", items)):
            return tuple(globs)
    raise ValueError("not a list of patterns")


SIZE = Kind(metavar="SIZE", parse=_parse_size)
# Kept as text: what a name stands for is found when the checkpoint is opened.
PATH = Kind(metavar="PATH", parse=_parse_path)
GLOBS = Kind(metavar="GLOB", parse=_parse_globs)
