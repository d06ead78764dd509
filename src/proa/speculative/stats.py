"""How well proposals were met: counts per verify step, and the figures that users read. Owns no policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TypedDict

from proa.speculative.protocol import RequestVerdict


class SpeculativeMetrics(TypedDict):
    """`mean_acceptance_length` is tokens emitted per verify step, bonus included: 1.0 means no gain.

    `acceptance_rate_per_position[i]`: accepted, of the proposals longer than i. `acceptance_histogram[n]`:
    verify steps that accepted n proposed tokens.
    """

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    mean_acceptance_length: float
    acceptance_rate: float
    acceptance_rate_per_position: list[float]
    acceptance_histogram: list[int]


class SpeculativeStats:
    """Counts of one request, or of many, whose proposals have at most `num_draft_tokens` tokens.

    A step without a proposal is plain decoding and counts nowhere.
    """

    def __init__(self, num_draft_tokens: int) -> None:
        self._longest = num_draft_tokens
        self._emitted = 0
        self._lengths: Counter[int] = Counter()
        self._accepted: Counter[int] = Counter()

    def record(self, verdict: RequestVerdict) -> None:
        if verdict.proposed:
            self._emitted += len(verdict.emitted)
            self._lengths[verdict.proposed] += 1
            self._accepted[verdict.accepted] += 1

    @classmethod
    def merged(cls, parts: Iterable[SpeculativeStats]) -> SpeculativeStats:
        """The counts of several requests together, such as the choices of one prompt."""
        listed = list(parts)
        total = cls(max((part._longest for part in listed), default=0))
        for part in listed:
            total._emitted += part._emitted
            total._lengths.update(part._lengths)
            total._accepted.update(part._accepted)
        return total

    @property
    def num_drafts(self) -> int:
        return self._lengths.total()

    @property
    def num_draft_tokens(self) -> int:
        return sum(length * steps for length, steps in self._lengths.items())

    @property
    def num_accepted_tokens(self) -> int:
        return sum(length * steps for length, steps in self._accepted.items())

    def metrics(self) -> SpeculativeMetrics:
        return SpeculativeMetrics(
            num_drafts=self.num_drafts,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
            mean_acceptance_length=self._emitted / self.num_drafts if self.num_drafts else 1.0,
            acceptance_rate=self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0,
            acceptance_rate_per_position=[self._rate(position) for position in range(self._longest)],
            acceptance_histogram=[self._accepted[count] for count in range(self._longest + 1)],
        )

    def _rate(self, position: int) -> float:
        proposed = sum(steps for length, steps in self._lengths.items() if length > position)
        accepted = sum(steps for length, steps in self._accepted.items() if length > position)
        return accepted / proposed if proposed else 0.0
