"""Measuring, with a runner whose forwards take exactly what they should and a clock that says so."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from proa.cache.pages import PagePool
from proa.cache.state import StateTables
from proa.cache.state_values import NONE, Replay, StateRoom
from proa.cache.tables import BlockTables
from proa.runner.batch import ForwardOutput, RowSpan
from proa.speculative.costs import BUDGET, CONTEXT, ROWS, measure
from proa.units import DType, Phase

VOCAB = 11


class TimedRunner:
    """A forward of n rows takes `seconds(n)`; the first of all takes one second more."""

    states = None

    def __init__(self, num_pages: int, page_size: int, seconds) -> None:
        self.tables = BlockTables(PagePool(num_pages), page_size)
        self.now = 0.0
        self.spans: list[RowSpan] = []
        self._seconds = seconds

    def clock(self) -> float:
        return self.now

    def forward(self, spans: Sequence[RowSpan]) -> ForwardOutput:
        (span,) = spans
        assert all(self.tables.pool.owners(page) == 1 for page in span.pages)
        assert span.end <= len(span.pages) * self.tables.page_size
        assert all(0 <= token < VOCAB for token in span.tokens)
        self.now += self._seconds(len(span.tokens)) + (0 if self.spans else 1.0)
        self.spans.append(span)
        return ForwardOutput(logits=torch.zeros(len(span.logits), VOCAB))


def timed(seconds, num_pages: int = 64, page_size: int = 16, max_positions: int = 10**6, hidden=None):
    runner = TimedRunner(num_pages, page_size, seconds)
    table = measure(runner, vocab=VOCAB, max_positions=max_positions, hidden=hidden, clock=runner.clock)
    runner.tables.pool.check()
    assert runner.tables.pool.num_free == num_pages
    return runner, table


def test_every_number_of_rows_gets_the_time_that_it_takes_without_the_first_forward_s() -> None:
    runner, table = timed(lambda rows: 1e-4 * (10 + rows))
    assert table.rows == tuple(sorted(ROWS))
    assert table.seconds == pytest.approx([1e-4 * (10 + rows) for rows in sorted(ROWS)])
    assert all(span.phase is (Phase.DECODE if len(span.tokens) == 1 else Phase.VERIFY) for span in runner.spans)
    assert {span.start for span in runner.spans} == {CONTEXT}
    assert all(len(span.logits) == len(span.tokens) for span in runner.spans)


@pytest.mark.parametrize("one", [1e-3, 0.011, 0.04, 0.09])
def test_it_stays_within_its_budget(one: float) -> None:
    runner, table = timed(lambda rows: one * (1 + rows / 100))
    assert runner.now - 1 - one <= max(BUDGET, 3 * one) + 1e-9
    assert {1, 4} <= set(table.rows)


def test_a_slow_model_is_measured_with_one_row_and_four() -> None:
    assert timed(lambda rows: 2.0 + rows)[1].rows == (1, 4)


def test_one_odd_forward_changes_no_median() -> None:
    calls = iter(range(10**6))
    _, table = timed(lambda rows: 0.05 if next(calls) == 7 else 1e-3)
    assert table.seconds == pytest.approx([1e-3] * len(ROWS))


def test_it_takes_what_room_there_is() -> None:
    runner, table = timed(lambda rows: 1e-3, num_pages=3, page_size=4)
    assert max(table.rows) == 12 and {span.start for span in runner.spans} == {0}
    runner, table = timed(lambda rows: 1e-3, max_positions=40)
    assert max(table.rows) == 32 and max(span.end for span in runner.spans) == 40


def test_pages_are_free_again_when_a_forward_fails() -> None:
    def fails(rows: int) -> float:
        if rows == 8:
            raise MemoryError
        return 1e-3

    runner = TimedRunner(64, 16, fails)
    with pytest.raises(MemoryError):
        measure(runner, vocab=VOCAB, max_positions=100, hidden=None, clock=runner.clock)
    assert runner.tables.pool.num_free == 64


def test_a_draft_that_begins_with_hidden_rows_gets_some_all_different_and_another_runner_none() -> None:
    runner, _ = timed(lambda rows: 1e-3, hidden=(6, torch.bfloat16))
    assert all(span.hidden.shape == (len(span.tokens), 6) for span in runner.spans)
    assert {span.hidden.dtype for span in runner.spans} == {torch.bfloat16}
    longest = max((span.hidden for span in runner.spans), key=len)
    assert len(longest.unique(dim=0)) == max(ROWS)
    assert all(span.hidden is None for span in timed(lambda rows: 1e-3)[0].spans)


@pytest.mark.parametrize(("slots", "kept_rows", "most"), [(40, 0, 32), (7, 0, 6), (2, 9, 8), (1, 0, 1)])
def test_a_model_with_states_is_measured_on_slots_that_are_free_again_afterwards(
    slots: int, kept_rows: int, most: int
) -> None:
    runner = TimedRunner(64, 16, lambda rows: 1e-4 * rows)
    runner.states = StateTables(StateRoom(slots=slots, kept_rows=kept_rows), DType.F32, replayed_by_nobody)
    table = measure(runner, vocab=VOCAB, max_positions=10**6, hidden=None, clock=runner.clock)
    assert table.rows == tuple(sorted(rows for rows in ROWS if rows <= most))
    for span in runner.spans:
        assert span.state is not None
        assert len(span.state.targets) == len(span.state.kept) == len(span.tokens)
        assert NONE not in (span.state.kept if kept_rows and len(span.tokens) > 1 else span.state.targets)
    runner.states.check()
    assert runner.states.free_slots == slots


def replayed_by_nobody(replays: Sequence[Replay]) -> None:
    raise AssertionError("nothing was accepted")
