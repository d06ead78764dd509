"""A check with an id, the facts that it declares, and what it blocks. Owns no facts.

Families, the kernel catalogue and the plan rules all state their requirements as Conditions, so that one function
can run them, `explain --why` can print them and a test can prove that each of them matters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Blocks(Enum):
    """AUTO: only steers the automatic choice, an explicit ask overrides it. ALWAYS: an explicit ask is an error."""

    AUTO = "auto"
    ALWAYS = "always"


class Source(Enum):
    """Why a decision has its value."""

    ASKED = "asked"
    CHECKPOINT = "checkpoint"
    HARDWARE = "hardware"
    CONSTRAINT = "constraint"
    DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Blocked:
    reason: str
    source: Source


class Facts(Mapping[str, Any]):
    """Facts by name, in layers of which the first that has a name answers. No other layer is looked at, nor any fact
    that nobody asks for, so a layer may make its facts as they are read."""

    def __init__(self, *layers: Mapping[str, Any]) -> None:
        self._layers = layers

    def __getitem__(self, name: str) -> Any:
        for layer in self._layers:
            if name in layer:
                return layer[name]
        raise KeyError(name)

    def __or__(self, more: Mapping[str, Any]) -> Facts:
        """These facts, with others before them."""
        return Facts(more, *self._layers)

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(name for layer in self._layers for name in layer))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class FactView:
    """The only view of facts that a check gets; it records what was read.

    A check reads `facts["caps.device"]`. Reading a fact that its Condition does not declare raises KeyError: an
    undeclared read would make `explain` lie about what a decision rests on.
    """

    def __init__(self, facts: Mapping[str, Any], allowed: Iterable[str] | None = None) -> None:
        self._facts = facts
        self._allowed = None if allowed is None else frozenset(allowed)
        self._read: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if self._allowed is not None and name not in self._allowed:
            raise KeyError(f"fact {name!r} is read but not declared (declared: {sorted(self._allowed)})")
        value = self._facts[name]
        self._read[name] = value
        return value

    @property
    def read(self) -> dict[str, Any]:
        """The facts read so far, by name."""
        return dict(self._read)

    def only(self, names: Iterable[str]) -> FactView:
        return FactView(self._facts, names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """`check` returns None when fine, else what blocks and where that comes from."""

    id: str
    reads: tuple[str, ...]
    blocks: Blocks
    check: Callable[[FactView], Blocked | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One condition's outcome with the facts that it read."""

    condition: Condition
    blocked: Blocked | None
    inputs: Mapping[str, Any]


def evaluate(conditions: Iterable[Condition], facts: Mapping[str, Any]) -> tuple[Verdict, ...]:
    """Run every condition on its declared facts only; ALWAYS conditions come first, order is otherwise kept."""
    ordered = sorted(conditions, key=lambda c: c.blocks is not Blocks.ALWAYS)
    verdicts: list[Verdict] = []
    for condition in ordered:
        view = FactView(facts, condition.reads)
        blocked = condition.check(view)
        verdicts.append(Verdict(condition=condition, blocked=blocked, inputs=view.read))
    return tuple(verdicts)
