"""Watches for a draft that has stopped being right: wrong weights give no error, only fewer accepted tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypedDict

from proa.speculative.protocol import Verdict

WINDOW = 64
"""Verify steps with a proposal, over all requests, whose mean is judged."""
FLOOR = 1.3
"""Tokens emitted per such step, 1 of them without any draft: below it a draft model is hardly ever right."""


class SpeculativeHealth(TypedDict):
    """`state`: `healthy`, `drifting` while `accept_length` is below the floor, `unknown` before enough was judged.

    `accept_length`: tokens per verify step over the last `WINDOW` ones, None before there was any."""

    state: str
    accept_length: float | None


class AcceptWatch:
    """The moving mean of the accept length. Says once when it is below the floor and proposals go on being made."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._lengths: deque[int] = deque(maxlen=WINDOW)
        self._steps = 0
        self._emitted = 0
        self._has_told = False

    def record(self, verdict: Verdict, *, pays: bool) -> None:
        """The step is kept. `pays` False: the policy of lengths has found as much already, and said so."""
        lengths = [len(entry.emitted) for entry in verdict.requests if entry.proposed]
        self._lengths.extend(lengths)
        self._steps += len(lengths)
        self._emitted += sum(lengths)
        if lengths and pays and self._is_drifting and not self._has_told:
            self._has_told = True
            self._note(
                f"speculative/accept-drift: accept length {self._mean:.2f} over the last {WINDOW} verify steps "
                f"({self._emitted / self._steps:.2f} over all {self._steps}), and below {FLOOR} a draft is hardly ever "
                "right: it may not belong to this target, or not be whole (`proa check`)"
            )

    def health(self) -> SpeculativeHealth:
        state = "unknown" if len(self._lengths) < WINDOW else "drifting" if self._is_drifting else "healthy"
        return SpeculativeHealth(state=state, accept_length=self._mean if self._lengths else None)

    @property
    def _mean(self) -> float:
        return sum(self._lengths) / len(self._lengths)

    @property
    def _is_drifting(self) -> bool:
        return len(self._lengths) == WINDOW and self._mean < FLOOR
