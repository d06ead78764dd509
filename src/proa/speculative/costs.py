"""Times a runner's forwards by number of rows, on pages that nobody uses yet. Owns the clock, no decision."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Protocol

from proa.cache.tables import BlockTables
from proa.kernels.cost import CostTable
from proa.runner.batch import ForwardOutput, RowSpan
from proa.units import Phase

ROWS = (1, 4, 8, 2, 16, 3, 6, 12, 32, 24)
"""The most telling ones first: a slow model has no time for all of them."""
CONTEXT = 128
BUDGET = 0.25
MAX_ROUNDS = 7


class TimedRunner(Protocol):
    """All that measuring needs of a runner."""

    @property
    def tables(self) -> BlockTables: ...

    def forward(self, spans: Sequence[RowSpan]) -> ForwardOutput: ...


def measure(
    runner: TimedRunner, *, vocab: int, max_positions: int, clock: Callable[[], float] = time.perf_counter
) -> CostTable:
    """Medians of a few rounds within a quarter second after the first forward; two points at least, however slow.

    One request of `CONTEXT` rows stands for all: at these lengths the weights decide. Its rows hold whatever lies in
    memory, and the pages are free again afterwards.
    """
    tables = runner.tables
    room = min(tables.free_rows, max_positions)
    counts = [rows for rows in ROWS if rows <= room] or [1]
    context = max(0, min(CONTEXT, room - max(counts)))
    pages = tables.pool.allocate(tables.pages_for(context + max(counts)))
    samples: dict[int, list[float]] = {}
    try:
        _forward(runner, 1, context, pages, vocab)  # the first one pays for what is made once
        end = clock() + BUDGET
        for rows in _order(counts):
            begin = clock()
            # Stop before the budget is spent: a forward with these rows takes as long as the longest so far, or more.
            longest = max((max(times) for times in samples.values()), default=0.0)
            if len(samples) >= min(2, len(counts)) and begin + longest > end:
                break
            _forward(runner, rows, context, pages, vocab)
            samples.setdefault(rows, []).append(clock() - begin)
    finally:
        tables.pool.release(pages)
    return CostTable.measured([(rows, median(times)) for rows, times in sorted(samples.items())])


def _order(counts: Sequence[int]) -> Iterator[int]:
    """Rounds over all counts, so that a change of the machine's speed meets them all."""
    for _ in range(MAX_ROUNDS):
        yield from counts


def _forward(runner: TimedRunner, rows: int, context: int, pages: Sequence[int], vocab: int) -> None:
    span = RowSpan(
        phase=Phase.DECODE if rows == 1 else Phase.VERIFY,
        tokens=[7919 * row % vocab for row in range(rows)],
        start=context,
        pages=pages,
        logits=range(rows),
    )
    runner.forward([span]).logits[0, 0].item()  # a device may still be busy when forward returns
