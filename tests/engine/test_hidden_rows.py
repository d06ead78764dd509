"""What the engine tells a drafter that reads the target's hidden rows, and serving with a next-token layer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import pytest

from proa.engine.request import Request, Status
from proa.speculative.drift import WINDOW, AcceptWatch
from proa.speculative.protocol import HiddenRows
from tests.engine.table_model import (
    VOCAB,
    Broken,
    GuessingDrafter,
    NextLayer,
    TableRunner,
    check_empty,
    expected,
    finish,
    make_engine,
    request,
    run,
    tokens_of,
)
from tests.speculative.next_model import TARGET, Hidden


class Watching(GuessingDrafter):
    """Guesses, and checks the hidden rows that it is shown against what it was shown before."""

    needs_hidden = True

    def __init__(self, hidden: Hidden, **settings) -> None:
        super().__init__(**settings)
        self.hidden = hidden
        self.seen: dict[int, list[tuple[int, ...]]] = defaultdict(list)
        self.most = 0

    def observe(self, hidden: Sequence[HiddenRows]) -> None:
        for entry in hidden:
            rows = self.seen[entry.request_id]
            assert entry.start == len(rows), "a gap, or rows twice"
            for row in entry.rows:
                tokens, owner = self.hidden.read(row)
                assert (len(tokens), owner) == (len(rows) + 1, TARGET)
                rows.append(tokens)
        self.most = max(self.most, sum(map(len, self.seen.values())))

    def propose(self, context):
        for asked in context.requests:
            seen = self.seen[asked.request_id]
            assert [*seen[-1], asked.tokens[-1]] == list(asked.tokens), "not all rows before the anchor"
        return super().propose(context)

    def release(self, request_ids: Sequence[int]) -> None:
        super().release(request_ids)
        for request_id in request_ids:
            self.seen.pop(request_id, None)


def watched(skill: float = 0.6, num_pages: int = 200, **settings) -> tuple[TableRunner, Watching]:
    hidden = Hidden()
    runner = TableRunner(num_pages=num_pages, page_size=3, hidden=hidden, **settings)
    return runner, Watching(hidden, max_tokens=3, skill=skill, seed=1)


def requests(count: int = 8, max_tokens: int = 14) -> list[Request]:
    return [
        request(
            i,
            [(5 * i + j) % VOCAB for j in range(1 + 3 * i)],
            max_tokens=max_tokens,
            temperature=0.8 * (i % 2),
            speculative=i != 4,
        )
        for i in range(count)
    ]


def alone() -> dict[int, list[int]]:
    return {one.request_id: expected(one) for one in requests()}


@pytest.mark.parametrize("skill", [0.0, 0.6, 1.0])
def test_a_drafter_sees_the_hidden_row_of_every_kept_position_once_and_in_order(skill: float) -> None:
    runner, drafter = watched(skill)
    engine = make_engine(runner, drafter=drafter, prefill_chunk=5)
    asked = requests()
    for one in asked:
        engine.add(one)
    while engine.has_work:
        engine.step()
        for one in asked:
            if one.status is Status.RUNNING and one.request_id != 4:
                seen = drafter.seen[one.request_id]
                assert len(seen) == runner.tables.length(one.request_id)
                assert not seen or list(seen[-1]) == [*one.prompt, *one.output][: len(seen)]
    assert {one.request_id: one.output for one in asked} == alone()
    assert not drafter.seen
    check_empty(runner)


def test_a_request_that_asks_for_no_speculation_keeps_no_hidden_rows() -> None:
    runner, drafter = watched()
    run(make_engine(runner, drafter=drafter), [request(0, [1, 2, 3], speculative=False)])
    assert drafter.most == 0
    run(make_engine(runner, drafter=drafter), [request(0, [1, 2, 3])])
    assert drafter.most > 3


def test_a_preempted_request_begins_anew() -> None:
    runner, drafter = watched(num_pages=20)
    asked = requests(max_tokens=20)
    engine = make_engine(runner, drafter=drafter, prefill_chunk=7)
    for one in asked:
        engine.add(one)
    preempted = set[int]()
    while engine.has_work:
        engine.step()
        now = {one.request_id for one in asked if one.status is Status.PREEMPTED}
        assert not now & set(drafter.seen)
        preempted |= now
    assert preempted
    assert not drafter.seen


def test_an_aborted_request_is_forgotten_before_and_after_its_first_proposal() -> None:
    for steps in (1, 3):
        runner, drafter = watched()
        engine = make_engine(runner, drafter=drafter)
        engine.add(request(0, [1, 2, 3]))
        for _ in range(steps):
            engine.step()
        assert drafter.seen[0]
        engine.abort(0)
        assert not drafter.seen
        finish(engine)
        check_empty(runner)


@pytest.mark.parametrize("fails_at", range(1, 12))
def test_a_step_that_failed_shows_nothing(fails_at: int) -> None:
    runner, drafter = watched(fails_at=[fails_at])
    engine = make_engine(runner, drafter=drafter, prefill_chunk=5)
    asked = requests(3)
    for one in asked:
        engine.add(one)
    failures = 0
    while engine.has_work:
        before = {key: len(rows) for key, rows in drafter.seen.items()}
        try:
            engine.step()
        except Broken:
            failures += 1
            assert {key: len(rows) for key, rows in drafter.seen.items()} == before
    assert failures == 1
    assert {one.request_id: one.output for one in asked} == {key: alone()[key] for key in range(3)}


def test_a_target_without_hidden_rows_is_refused_and_nothing_is_kept() -> None:
    _, drafter = watched()
    runner = TableRunner(num_pages=60, page_size=3)
    with pytest.raises(RuntimeError, match="needs the hidden rows of all 3 rows of the batch"):
        run(make_engine(runner, drafter=drafter), [request(0, [1, 2, 3])])
    assert runner.tables.length(0) == 0


def test_hidden_rows_that_nobody_needs_go_nowhere() -> None:
    runner, _ = watched()
    asked = request(0, [1, 2, 3])
    run(make_engine(runner, drafter=GuessingDrafter(max_tokens=3)), [asked])
    assert asked.output == expected(asked)


@pytest.mark.parametrize("num_pages", [400, 20])
@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("weights", [0, 1], ids=["foresees the target", "does not"])
def test_a_next_token_layer_changes_nothing_but_the_number_of_steps(weights: int, length: int, num_pages: int) -> None:
    layer = NextLayer(num_pages, 3, length, weights=weights)
    runner = TableRunner(num_pages=num_pages, page_size=3, hidden=layer.hidden)
    engine = make_engine(runner, drafter=layer.drafter, draft=layer.runner, prefill_chunk=7)
    assert tokens_of(run(engine, requests())) == alone()
    assert layer.runner.forwards
    assert not layer.drafter._observed
    check_empty(runner, layer.runner)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_layer_that_foresees_the_target_has_every_token_accepted(temperature: float) -> None:
    layer = NextLayer(40, 4, 3)
    runner = TableRunner(num_pages=40, page_size=4, hidden=layer.hidden)
    engine = make_engine(runner, drafter=layer.drafter, draft=layer.runner)
    run(engine, [request(0, [1, 2, 3], max_tokens=1 + 6 * 4, temperature=temperature)])
    metrics = engine.stats.metrics()
    assert (metrics["num_drafts"], metrics["mean_acceptance_length"]) == (6, 4.0)


@pytest.mark.parametrize("fails_at", range(1, 16))
@pytest.mark.parametrize("which", ["target", "draft"])
def test_a_step_with_a_next_token_layer_can_be_repeated(which: str, fails_at: int) -> None:
    layer = NextLayer(20, 3, 3, weights=1, fails_at=[fails_at] if which == "draft" else [])
    fails = [fails_at] if which == "target" else []
    runner = TableRunner(num_pages=20, page_size=3, hidden=layer.hidden, fails_at=fails)
    engine = make_engine(runner, drafter=layer.drafter, draft=layer.runner, prefill_chunk=7)
    outputs: dict[int, list[int]] = defaultdict(list)
    for one in requests():
        engine.add(one)
    failures = 0
    while engine.has_work:
        try:
            for output in engine.step():
                outputs[output.request_id] += output.tokens
        except (Broken, ArithmeticError):
            failures += 1
    assert failures == 1
    assert outputs == alone()
    check_empty(runner, layer.runner)


def test_the_watch_hears_of_every_step_and_of_what_the_policy_found() -> None:
    notes: list[str] = []
    runner = TableRunner(num_pages=200, page_size=4)
    drafter = GuessingDrafter(max_tokens=4, skill=0.0)
    engine = make_engine(runner, drafter=drafter, watch=AcceptWatch(notes.append))
    run(engine, [request(i, [i], max_tokens=30) for i in range(8)])
    assert engine.stats.num_drafts > WINDOW
    assert [note.partition(":")[0] for note in notes] == ["speculative/accept-drift"]
    assert engine.health()["state"] == "drifting"
    good = make_engine(runner, drafter=GuessingDrafter(max_tokens=4, skill=1.0), watch=AcceptWatch(notes.append))
    run(good, [request(i, [i], max_tokens=100) for i in range(8)])
    assert good.health()["state"] == "healthy"
    assert len(notes) == 1
    assert make_engine(runner).health() is None
