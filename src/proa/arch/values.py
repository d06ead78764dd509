"""Checked numbers of a config, for every parser in arch/. Owns no family and no spec but the norm's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from proa.arch.blocks import NormSpec
from proa.checkpoint.hf_config import HFView
from proa.errors import ConfigError

T = TypeVar("T")


def positive(c: HFView, key: str, *, at_most: int = 2**31) -> int:
    """The integer under `key`, which must lie in 1..at_most."""
    value = c.int(key)
    if not 1 <= value <= at_most:
        raise ConfigError("config/value", f"{c.where}: {key} = {value} is out of range (1..{at_most})")
    return value


def above(c: HFView, key: str, bound: float) -> float:
    """The number under `key`, which must be greater than `bound`."""
    value = c.float(key)
    if value <= bound:
        raise ConfigError("config/value", f"{c.where}: {key} = {value:g} must be greater than {bound:g}")
    return value


def norm(c: HFView, *, offset: float = 0.0) -> NormSpec:
    return NormSpec(eps=above(c, "rms_norm_eps", 0.0), offset=offset)


def named(c: HFView, key: str, table: Mapping[str, T], *, default: str) -> T:
    """What the table has for the config's word under `key`."""
    word = c.str(key, default=default)
    if word not in table:
        raise ConfigError(
            "config/unimplemented",
            f"{c.where}: {key} = {word!r} is not implemented",
            facts=(f"implemented: {', '.join(table)}",),
        )
    return table[word]
