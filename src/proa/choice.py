"""One leaf of the intent: what was asked, and by whom. Owns no defaults: those live in plans only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, TypeVar

T_co = TypeVar("T_co", covariant=True)


class OriginSource(Enum):
    DEFAULT = "default"
    FILE = "file"
    ENV = "environment"
    FLAG = "flag"
    API = "api"


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a value came from: the source and the name there (`--draft.dtype`, `PROA_DTYPE`, `run.toml: dtype`).

    `is_base`: that name sets several phases at once (`--attention`), and none of them by its own.
    """

    source: OriginSource
    where: str = ""
    is_base: bool = False

    def __str__(self) -> str:
        return f"{self.source.value} {self.where}".strip()


# No slots: on Python 3.11 a frozen dataclass with slots and Generic fails when subscripted.
@dataclass(frozen=True, kw_only=True)
class Choice(Generic[T_co]):
    """Either `auto` (value is None) or a value that somebody asked for, with its origin."""

    value: T_co | None
    origin: Origin

    @property
    def is_auto(self) -> bool:
        return self.value is None

    def __bool__(self) -> bool:
        raise TypeError("a Choice has no truth value: ask .is_auto or .value")


AUTO: Choice[Any] = Choice(value=None, origin=Origin(source=OriginSource.DEFAULT))
