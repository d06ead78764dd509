"""Plain values of plan parts, for JSON and for digests: one canonical form, so that equal plans have equal digests."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any, cast

from proa.choice import Choice
from proa.plan.decision import Decision

MEASURED = frozenset({"caps.memory_available", "measured.rollback"})
"""Facts that change from one minute to the next, or when somebody measures. A decision that reads one enters a digest
by its ask alone."""


def plain(value: Any) -> Any:
    """What JSON can hold: enums by their word, tuples as lists, a Choice as its value or `auto`."""
    match value:
        case Enum():
            return value.value
        case Choice():
            choice = cast("Choice[Any]", value)
            return "auto" if choice.is_auto else plain(choice.value)
        case Mapping():
            return {str(key): plain(item) for key, item in cast("Mapping[Any, Any]", value).items()}
        case tuple() | list():
            return [plain(item) for item in cast("Iterable[Any]", value)]
        case None | str() | int() | float():
            return value
        case _:
            return repr(value)


def decision_json(decision: Decision[Any]) -> dict[str, Any]:
    """The object of `explain --json`."""
    return {
        "value": plain(decision.value),
        "requested": plain(decision.requested),
        "source": decision.source.value,
        "rule": decision.rule,
        "reason": decision.reason,
        "inputs": plain(decision.inputs),
        "rejected": [{"value": plain(r.value), "rule": r.rule, "reason": r.reason} for r in decision.rejected],
        "notes": [{"condition": note.condition, "reason": note.reason} for note in decision.notes],
    }


def stable(decision: Decision[Any]) -> Any:
    """The part of a decision that its plan's digest covers."""
    return plain(decision.requested) if MEASURED & set(decision.inputs) else decision_json(decision)


def digest_of(value: Any) -> str:
    """Sixteen hex digits of SHA-256 over canonical JSON."""
    text = json.dumps(plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
