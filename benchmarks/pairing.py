"""Pairs of measurements and what may be said from them. Pure: owns dropping, ratios and medians; measures nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

TOLERANCE = 0.10
"""Bandwidth probes around a pair may differ by this part; the host moved under a pair that differs by more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two engines at the same work, one after the other. `left` and `right` in tokens per second.

    `probes` are GB/s read before, between and after the two measurements. A rate of 0: it could not be measured.
    """

    left: float
    right: float
    probes: tuple[float, float, float]

    @property
    def ratio(self) -> float:
        return self.left / self.right

    @property
    def spread(self) -> float:
        """How far the probes are apart, as a part of the smallest."""
        return max(self.probes) / min(self.probes) - 1

    @property
    def is_measured(self) -> bool:
        return self.left > 0 and self.right > 0

    @property
    def is_steady(self) -> bool:
        return self.is_measured and self.spread <= TOLERANCE

    @property
    def left_probe(self) -> float:
        """GB/s beside the left measurement."""
        return (self.probes[0] + self.probes[1]) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Medians over the kept pairs; None where none was kept. `ratio` is the median of ratios, not of the rates."""

    kept: int
    dropped: int
    left: float | None
    right: float | None
    ratio: float | None
    lowest_ratio: float | None
    highest_ratio: float | None
    probe: float | None


def summarise(pairs: Sequence[Pair]) -> Summary:
    steady = [pair for pair in pairs if pair.is_steady]
    ratios = [pair.ratio for pair in steady]
    return Summary(
        kept=len(steady),
        dropped=len(pairs) - len(steady),
        left=median(pair.left for pair in steady) if steady else None,
        right=median(pair.right for pair in steady) if steady else None,
        ratio=median(ratios) if ratios else None,
        lowest_ratio=min(ratios, default=None),
        highest_ratio=max(ratios, default=None),
        probe=median(pair.left_probe for pair in steady) if steady else None,
    )


def collect(measure: Callable[[int], Pair], rounds: int, most: int) -> list[Pair]:
    """Pairs until `rounds` of them are steady, and no more than `most` of any kind. Every pair is returned."""
    pairs: list[Pair] = []
    while len(pairs) < most and sum(pair.is_steady for pair in pairs) < rounds:
        pairs.append(measure(len(pairs)))
    return pairs


def measure_pair(left: Callable[[], float], right: Callable[[], float], probe: Callable[[], float]) -> Pair:
    before = probe()
    left_rate = left()
    between = probe()
    right_rate = right()
    return Pair(left=left_rate, right=right_rate, probes=(before, between, probe()))


def as_json(pairs: Sequence[Pair]) -> dict[str, Any]:
    """The summary with every raw value, dropped pairs included."""
    raw = [
        {**asdict(pair), "ratio": pair.ratio if pair.is_measured else None, "kept": pair.is_steady} for pair in pairs
    ]
    return {**asdict(summarise(pairs)), "pairs": raw}
