"""Watches for a draft that has stopped being right: wrong weights give no error, only fewer accepted tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypedDict

from proa.speculative.protocol import RequestVerdict, Verdict

WINDOW = 64
"""Verify steps with a proposal, over all requests, whose mean is judged."""
FLOOR = 1.3
"""Tokens emitted per such step, 1 of them without any draft: below it a draft model is hardly ever right."""
FALL = 0.25
"""Of the tokens that a draft added per step at its best: less, for a window of steps, is a fall. Harder text takes half
of them, a draft that no longer fits its target nearly all."""


class SpeculativeHealth(TypedDict):
    """`state`: `healthy`, `drifting` while `accept_length` is below the floor or has fallen far below
    `best_accept_length`, `unknown` before enough was judged.

    `accept_length`: tokens per verify step over the last `WINDOW` ones, None before there was any; the best one is that
    of the best such window, None before there was one."""

    state: str
    accept_length: float | None
    best_accept_length: float | None


class AcceptWatch:
    """The moving mean of the accept length, against a floor and against its own best. Says of either, once, when it is
    below and proposals go on being made."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._window: deque[RequestVerdict] = deque(maxlen=WINDOW)
        self._emitted = self._accepted = self._proposed = 0  # in the window
        self._all_steps = self._all_emitted = 0
        self._best_length: float | None = None
        self._best_rate = 0.0
        self._fallen = 0  # steps in a row
        self._told: set[str] = set()

    def record(self, verdict: Verdict, *, pays: bool) -> None:
        """The step is kept. `pays` False: the policy of lengths has found as much already, and said so."""
        judged = [entry for entry in verdict.requests if entry.proposed]
        for entry in judged:
            self._take(entry)
        if not judged or not pays:
            return
        if self._is_low:
            why = f"and below {FLOOR} a draft is hardly ever right: it may not belong to this target, or not be whole"
            self._tell("low", why)
        elif self._has_fallen:
            why = "the text has become much harder to foresee, or the draft does not fit its target any more"
            self._tell("fallen", f"after {self._best_length:.2f} at its best: {why}")

    def health(self) -> SpeculativeHealth:
        state = "drifting" if self._is_low or self._has_fallen else "healthy"
        return SpeculativeHealth(
            state=state if self._is_full else "unknown",
            accept_length=self._mean if self._window else None,
            best_accept_length=self._best_length,
        )

    def _tell(self, kind: str, why: str) -> None:
        if kind in self._told:
            return
        self._told.add(kind)
        self._note(
            f"speculative/accept-drift: accept length {self._mean:.2f} over the last {WINDOW} verify steps "
            f"({self._all_emitted / self._all_steps:.2f} over all {self._all_steps}), {why} (`proa check`)"
        )

    def _take(self, entry: RequestVerdict) -> None:
        if self._is_full:
            self._count(self._window[0], -1)
        self._window.append(entry)
        self._count(entry, 1)
        self._all_steps += 1
        self._all_emitted += len(entry.emitted)
        if self._is_full:
            self._compare(self._mean, self._accepted / self._proposed)

    def _count(self, entry: RequestVerdict, sign: int) -> None:
        self._emitted += sign * len(entry.emitted)
        self._accepted += sign * entry.accepted
        self._proposed += sign * entry.proposed

    def _compare(self, length: float, rate: float) -> None:
        """With the best window. Proposals of one token add few tokens however right they are, and of long ones a small
        part is right: only where both figures have fallen it is the draft."""
        best = length if self._best_length is None else max(length, self._best_length)
        self._best_length, self._best_rate = best, max(rate, self._best_rate)
        has_fallen = length - 1 < FALL * (best - 1) and rate < FALL * self._best_rate
        self._fallen = self._fallen + 1 if has_fallen else 0

    @property
    def _is_full(self) -> bool:
        return len(self._window) == WINDOW

    @property
    def _mean(self) -> float:
        return self._emitted / len(self._window)

    @property
    def _is_low(self) -> bool:
        return self._is_full and self._mean < FLOOR

    @property
    def _has_fallen(self) -> bool:
        return self._fallen >= WINDOW
