"""Times a runner's forwards by number of rows, on pages that nobody uses yet. Owns the clock, no decision."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import median
from typing import Protocol

import torch

from proa.cache.state import StateTables
from proa.cache.tables import BlockTables
from proa.kernels.cost import CostTable
from proa.runner.batch import ForwardOutput, RowSpan
from proa.units import Phase

ROWS = (1, 4, 8, 2, 16, 3, 6, 12, 32, 24)
"""The most telling ones first: a slow model has no time for all of them."""
CONTEXT = 128
BUDGET = 0.25
MAX_ROUNDS = 7
NOBODY = -1
"""A request id that no request has."""


class TimedRunner(Protocol):
    """All that measuring needs of a runner. `states`: of a model with delta layers."""

    @property
    def tables(self) -> BlockTables: ...

    @property
    def states(self) -> StateTables | None: ...

    def forward(self, spans: Sequence[RowSpan]) -> ForwardOutput: ...


def measure(
    runner: TimedRunner,
    *,
    vocab: int,
    max_positions: int,
    hidden: tuple[int, torch.dtype] | None,
    clock: Callable[[], float] = time.perf_counter,
) -> CostTable:
    """Medians of a few rounds within a quarter second after the first forward; two points at least, however slow.

    One request of `CONTEXT` rows stands for all: at these lengths the weights decide. Its rows hold whatever lies in
    memory, and the pages are free again afterwards. `hidden`: width and type of the hidden rows that the runner's rows
    begin with, None where they need none.
    """
    tables = runner.tables
    room = min(tables.free_rows, max_positions)
    counts = [rows for rows in ROWS if rows <= room and _has_slots(runner, rows)] or [1]
    longest = max(counts)
    context = max(0, min(CONTEXT, room - longest))
    pages = tables.pool.allocate(tables.pages_for(context + longest))
    whole = RowSpan(
        phase=Phase.VERIFY,
        tokens=[7919 * row % vocab for row in range(longest)],
        start=context,
        pages=pages,
        logits=range(longest),
        hidden=None if hidden is None else _any_rows(longest, *hidden),
    )
    samples: dict[int, list[float]] = {}
    try:
        _forward(runner, whole, 1)  # the first one pays for what is made once
        end = clock() + BUDGET
        for rows in _order(counts):
            begin = clock()
            # Stop before the budget is spent: a forward with these rows takes as long as the longest so far, or more.
            slowest = max((max(times) for times in samples.values()), default=0.0)
            if len(samples) >= min(2, len(counts)) and begin + slowest > end:
                break
            _forward(runner, whole, rows)
            samples.setdefault(rows, []).append(clock() - begin)
    finally:
        tables.pool.release(pages)
    return CostTable.measured([(rows, median(times)) for rows, times in sorted(samples.items())])


def _order(counts: Sequence[int]) -> Iterator[int]:
    """Rounds over all counts, so that a change of the machine's speed meets them all."""
    for _ in range(MAX_ROUNDS):
        yield from counts


def _forward(runner: TimedRunner, whole: RowSpan, rows: int) -> None:
    """The first `rows` rows of `whole`, as a proposal of which nothing is kept."""
    span = replace(
        whole,
        phase=Phase.DECODE if rows == 1 else Phase.VERIFY,
        tokens=whole.tokens[:rows],
        logits=range(rows),
        hidden=None if whole.hidden is None else whole.hidden[:rows],
    )
    if runner.states is None:
        _finish(runner, span)
        return
    runner.states.mark()
    try:
        _finish(runner, replace(span, state=runner.states.extend(NOBODY, rows, is_revocable=rows > 1)))
    finally:
        runner.states.undo()


def _finish(runner: TimedRunner, span: RowSpan) -> None:
    runner.forward([span]).logits[0, 0].item()  # a device may still be busy when forward returns


def _has_slots(runner: TimedRunner, rows: int) -> bool:
    """Whether the state of each of so many rows can be kept, or its inputs."""
    states = runner.states
    if states is None or rows == 1:
        return True
    return states.slots_for(rows, is_revocable=True) <= states.free_slots and (
        not states.room.kept_rows or rows <= states.room.kept_rows
    )


def _any_rows(count: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """[count, width], all different: equal ones would take the same few experts."""
    return torch.randn((count, width), generator=torch.Generator().manual_seed(0)).to(dtype)
