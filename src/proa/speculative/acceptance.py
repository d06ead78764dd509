"""How likely the next proposed token is right, estimated from verdicts of earlier steps. Owns no decision."""

from __future__ import annotations

from collections.abc import Sequence


class Acceptance:
    """Chances by kind of evidence, 1 to `len(prior)`; what is stronger counts as the last kind.

    The first token of a proposal has the proposal's kind, each further one the next kind: an n-gram match of m tokens
    that proves right is a match of m + 1, and a draft model's second token follows a first one that was right.

    Counts are weighed against `above` (all requests together, for one request) with `weight` trials, and that one
    against its prior. After `memory` trials of a kind old ones begin to count less.
    """

    def __init__(self, prior: Sequence[float], *, above: Acceptance | None, weight: float, memory: float) -> None:
        self._prior = tuple(prior)
        self._above = above
        self._weight = weight
        self._memory = memory
        self._right = [0.0] * len(self._prior)
        self._judged = [0.0] * len(self._prior)

    def chance(self, kind: int) -> float:
        """Of a token with that evidence, given that those before it in the proposal are right."""
        index = self._index(kind)
        expected = self._prior[index] if self._above is None else self._above.chance(kind)
        return (self._right[index] + self._weight * expected) / (self._judged[index] + self._weight)

    def survival(self, kind: int, length: int) -> list[float]:
        """Entry i: the chance that the first i + 1 tokens of a proposal are all right. It never rises."""
        chances: list[float] = []
        for offset in range(length):
            chances.append((chances[-1] if chances else 1.0) * self.chance(kind + offset))
        return chances

    def record(self, kind: int, *, accepted: int, is_rejected: bool) -> None:
        """`accepted` tokens of a proposal were right; with `is_rejected` the one after them was wrong."""
        for offset in range(accepted):
            self._count(kind + offset, 1.0)
        if is_rejected:
            self._count(kind + accepted, 0.0)

    def _count(self, kind: int, right: float) -> None:
        index = self._index(kind)
        if self._judged[index] >= self._memory:
            keep = 1 - 1 / self._memory
            self._judged[index] *= keep
            self._right[index] *= keep
        self._judged[index] += 1
        self._right[index] += right

    def _index(self, kind: int) -> int:
        return min(kind, len(self._prior)) - 1
