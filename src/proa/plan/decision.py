"""A decision is a value with a reason. Owns the record; the rules in plan/rules make them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from proa.choice import Choice
from proa.conditions import Blocks, Source

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """A value that was considered and not taken, the condition that said no, and why."""

    value: Any
    rule: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """An AUTO condition that an explicit ask overrode, or a remark that changes nothing."""

    condition: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """One condition as it was met for one value: what `explain --why` prints. `reason` None: it holds."""

    value: Any
    condition: str
    blocks: Blocks
    reason: str | None
    inputs: Mapping[str, Any]


# No slots: on Python 3.11 a frozen dataclass with slots and Generic fails when subscripted.
@dataclass(frozen=True, kw_only=True)
class Decision(Generic[T_co]):
    """One leaf of a plan: what was asked (`requested`), what will run (`value`), and why.

    `rule` is a stable id; `inputs` are exactly the facts read. `rejected` lists every blocker, not only the first;
    `checked` lists every condition that was asked, those that hold included.
    value None means "does not apply"; the reason says why.
    """

    knob: str
    value: T_co
    requested: Choice[T_co]
    source: Source
    rule: str
    reason: str
    inputs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    rejected: tuple[Rejected, ...] = ()
    notes: tuple[Note, ...] = ()
    checked: tuple[Checked, ...] = ()

    def __bool__(self) -> bool:
        raise TypeError(f"decision {self.knob} has no truth value: ask .value")
