"""Prefix reuse on a model whose output depends on every token before: a wrong row, page or length shows, or raises."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proa.engine.engine import Engine
from proa.engine.request import Request, Status
from proa.sampling.sampler import logprobs
from proa.speculative.drafters.standalone import StandaloneDrafter
from proa.units import Phase, Verification
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
    next_logits,
    request,
    run,
    tokens_of,
)

PROMPT = [(7 * i + i // 5) % VOCAB for i in range(14)]


def reusing(num_pages: int = 200, page_size: int = 4, **settings) -> tuple[Engine, TableRunner]:
    runner = TableRunner(num_pages=num_pages, page_size=page_size, fails_at=settings.pop("fails_at", ()))
    return make_engine(runner, reuses=True, **settings), runner


def served(engine: Engine, asked: Request) -> Request:
    assert tokens_of(run(engine, [asked]))[asked.request_id] == expected(asked)
    return asked


def prefilled(runner: TableRunner, since: int = 0) -> list[tuple[int, int]]:
    """Rows [start, end) of every prompt chunk."""
    spans = [span for spans in runner.forwards[since:] for span in spans]
    return [(span.start, span.end) for span in spans if span.phase is Phase.PREFILL]


def standalone(draft: TableRunner) -> StandaloneDrafter:
    fields = {"max_tokens": 3, "draft_vocab": VOCAB, "vocab": VOCAB, "prefill_chunk": 7}
    return StandaloneDrafter(runner=draft, verification=Verification.COUPLED, **fields)


def test_only_what_is_new_of_a_prompt_is_computed() -> None:
    engine, runner = reusing()
    first = served(engine, request(0, PROMPT))
    second = served(engine, request(1, [*PROMPT[:10], 1, 2, 3, 4]))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 8)
    assert prefilled(runner) == [(0, 14), (8, 14)]
    check_empty(runner)


@pytest.mark.parametrize(("length", "cached"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (13, 12), (14, 12)])
def test_the_last_token_of_a_prompt_is_always_computed(length: int, cached: int) -> None:
    engine, runner = reusing()
    served(engine, request(0, PROMPT))
    runner.forwards.clear()
    assert served(engine, request(1, PROMPT[:length])).num_cached_tokens == cached
    assert prefilled(runner) == [(cached, length)]


def test_an_answer_is_known_to_the_next_turn() -> None:
    engine, runner = reusing()
    first = served(engine, request(0, PROMPT, max_tokens=9))
    turn = [*PROMPT, *first.output, 5, 6]
    # 22 of its tokens have rows: the last one emitted has none.
    assert served(engine, request(1, turn)).num_cached_tokens == 20
    assert prefilled(runner)[-1] == (20, 25)


def test_a_prompt_is_known_while_its_request_still_runs() -> None:
    engine, runner = reusing()
    first, second = request(0, PROMPT, max_tokens=20), request(1, PROMPT)
    engine.add(first)
    engine.step()
    engine.add(second)
    engine.step()
    assert (first.status, second.num_cached_tokens) == (Status.RUNNING, 12)
    finish(engine)
    assert (first.output, second.output) == (expected(first), expected(second))
    check_empty(runner)


def test_chunks_begin_where_the_known_ends() -> None:
    engine, runner = reusing(prefill_chunk=5)
    served(engine, request(0, PROMPT))
    runner.forwards.clear()
    served(engine, request(1, [*PROMPT[:9], *range(8)]))
    assert prefilled(runner) == [(8, 13), (13, 17)]


def test_a_request_for_the_prompt_s_logprobs_computes_all_of_it() -> None:
    engine, runner = reusing()
    served(engine, request(0, PROMPT))
    asked = request(1, PROMPT, prompt_logprobs=1)
    outputs = run(engine, [asked])
    assert asked.num_cached_tokens == 0
    assert outputs[1][0].prompt_logprobs == (
        None,
        *(logprobs(next_logits(PROMPT[:stop]), PROMPT[stop], 1) for stop in range(1, len(PROMPT))),
    )


def test_switched_off_nothing_is_known_and_nothing_kept() -> None:
    runner = TableRunner(num_pages=200, page_size=4)
    engine = make_engine(runner)
    assert engine.reuse is None
    served(engine, request(0, PROMPT))
    assert served(engine, request(1, PROMPT)).num_cached_tokens == 0
    assert runner.tables.pool.num_free == 200


def test_what_is_there_is_counted() -> None:
    engine, _ = reusing()
    served(engine, request(0, PROMPT, max_tokens=1))
    served(engine, request(1, PROMPT, max_tokens=1))
    assert engine.reuse.stats() == {
        "num_prompt_tokens": 28,
        "num_cached_tokens": 12,
        "num_tokens_kept": 12,
        "num_snapshots": 0,
    }


def test_kept_pages_go_when_they_are_needed_and_the_prompt_is_computed_anew() -> None:
    engine, runner = reusing(num_pages=8)
    served(engine, request(0, PROMPT))
    served(engine, request(1, [9] * 20, max_tokens=12))
    assert served(engine, request(2, PROMPT)).num_cached_tokens < 12
    assert served(engine, request(3, PROMPT)).num_cached_tokens == 12
    check_empty(runner)


def test_a_known_beginning_leaves_room_for_requests_that_would_not_fit_without() -> None:
    long = [(3 * i) % VOCAB for i in range(32)]
    engine, runner = reusing(num_pages=14, prefill_chunk=64, max_num_seqs=4)
    served(engine, request(0, long, max_tokens=1))
    asked = [request(i, [*long, i], max_tokens=3) for i in range(1, 4)]
    for one in asked:
        engine.add(one)
    engine.step()
    assert engine.num_running == 3
    finish(engine)
    assert [one.output for one in asked] == [expected(one) for one in asked]
    check_empty(runner)


def test_a_preempted_request_goes_on_from_its_own_rows() -> None:
    engine, runner = reusing(num_pages=12, page_size=2)
    asked = [request(i, [i] * 6, max_tokens=14) for i in range(2)]
    for one in asked:
        engine.add(one)
    while all(one.status is not Status.PREEMPTED for one in asked):
        engine.step()
    [waiting] = [one for one in asked if one.status is Status.PREEMPTED]
    assert waiting.num_cached_tokens == 0
    finish(engine)
    assert [one.output for one in asked] == [expected(one) for one in asked]
    # Its cached tokens are those of its prompt when it came.
    assert waiting.num_cached_tokens == 0
    check_empty(runner)


@pytest.mark.parametrize("fails_at", range(1, 9))
def test_a_step_that_failed_leaves_nothing_wrong_behind(fails_at: int) -> None:
    engine, runner = reusing(num_pages=20, fails_at=[fails_at], prefill_chunk=6)
    asked = [request(i, [*PROMPT[: 6 + i], i, i], max_tokens=6) for i in range(4)]
    for one in asked:
        engine.add(one)
    failures = 0
    while engine.has_work:
        try:
            engine.step()
        except Broken:
            failures += 1
    assert failures == 1
    assert [one.output for one in asked] == [expected(one) for one in asked]
    check_empty(runner)


def drafted_by_a_layer(num_pages: int = 200, **settings) -> tuple[Engine, TableRunner, NextLayer]:
    layer = NextLayer(num_pages, 4, 3)
    runner = TableRunner(num_pages=num_pages, page_size=4, hidden=layer.hidden)
    engine = make_engine(runner, drafter=layer.drafter, draft=layer.runner, reuses=True, **settings)
    return engine, runner, layer


def test_a_draft_that_lives_on_hidden_rows_goes_on_where_the_target_does() -> None:
    engine, runner, layer = drafted_by_a_layer()
    served(engine, request(0, PROMPT))
    layer.runner.forwards.clear()
    asked = served(engine, request(1, [*PROMPT[:13], 1, 2]))
    assert asked.num_cached_tokens == 12
    assert layer.runner.forwards[0][0].start == 12
    assert not layer.drafter._observed
    check_empty(runner, layer.runner)


def test_a_page_of_such_a_draft_is_known_with_the_token_after_it_only() -> None:
    engine, _, _ = drafted_by_a_layer()
    served(engine, request(0, PROMPT))
    assert served(engine, request(1, [*PROMPT[:12], 20, 20])).num_cached_tokens == 8
    assert served(engine, request(2, [*PROMPT[:12], PROMPT[12], 20])).num_cached_tokens == 12


def test_without_rows_of_such_a_draft_only_a_request_without_proposals_reuses_the_target_s() -> None:
    engine, _, _ = drafted_by_a_layer()
    served(engine, request(0, PROMPT, speculative=False))
    assert served(engine, request(1, PROMPT, speculative=False)).num_cached_tokens == 12
    assert served(engine, request(2, PROMPT)).num_cached_tokens == 0
    assert served(engine, request(3, PROMPT)).num_cached_tokens == 12


def test_a_draft_model_of_its_own_computes_what_it_lacks() -> None:
    runner, draft = (TableRunner(num_pages=200, page_size=4) for _ in range(2))
    engine = make_engine(runner, drafter=standalone(draft), draft=draft, reuses=True)
    served(engine, request(0, PROMPT, speculative=False))
    assert served(engine, request(1, PROMPT)).num_cached_tokens == 12
    assert draft.forwards[0][0].start == 0
    draft.forwards.clear()
    assert served(engine, request(2, PROMPT)).num_cached_tokens == 12
    assert draft.forwards[0][0].start == 12
    assert engine.stats.metrics()["acceptance_rate"] == 1
    check_empty(runner, draft)


def test_a_draft_with_other_pages_shares_what_is_whole_in_both() -> None:
    runner, draft = TableRunner(num_pages=200, page_size=4), TableRunner(num_pages=200, page_size=3)
    engine = make_engine(runner, drafter=standalone(draft), draft=draft, reuses=True)
    served(engine, request(0, PROMPT))
    draft.forwards.clear()
    assert served(engine, request(1, PROMPT)).num_cached_tokens == 12
    assert draft.forwards[0][0].start == 12
    check_empty(runner, draft)


def related_requests(rng: random.Random, count: int) -> list[Request]:
    """Prompts that begin like one another, each for some way."""
    stems = [[rng.randrange(VOCAB) for _ in range(12)] for _ in range(2)]
    return [
        request(
            index,
            [*rng.choice(stems)[: rng.randint(0, 12)], *(rng.randrange(VOCAB) for _ in range(rng.randint(1, 6)))],
            max_tokens=rng.randint(1, 10),
            temperature=rng.choice([0.0, 0.8]),
            speculative=rng.random() < 0.8,
            prompt_logprobs=0 if rng.random() < 0.1 else None,
        )
        for index in range(count)
    ]


def check_pages(engine: Engine, runners: Sequence[TableRunner], requests: Sequence[Request]) -> None:
    for runner in runners:
        pool = runner.tables.pool
        pool.check()
        held = {page for asked in requests for page in runner.tables.pages(asked.request_id)}
        assert len(held) == pool.num_pages - pool.num_free - pool.num_idle
    engine.reuse._tree.check()


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    count=st.integers(1, 14),
    page_sizes=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    extra_pages=st.integers(0, 30),
    prefill_chunk=st.sampled_from([1, 7, 512]),
    max_num_seqs=st.integers(1, 8),
    drafting=st.sampled_from(["none", "guesses", "runner", "next layer"]),
    fails_at=st.sets(st.integers(1, 40), max_size=3),
)
def test_whatever_is_reused_every_request_answers_as_it_would_alone(
    seed: int, count: int, page_sizes: tuple[int, int], extra_pages: int, prefill_chunk: int, max_num_seqs: int,
    drafting: str, fails_at: set[int],
) -> None:  # fmt: skip
    rng = random.Random(seed)
    requests = related_requests(rng, count)
    rows = max(len(asked.prompt) + asked.sampling.params.max_tokens - 1 for asked in requests)
    target_pages, draft_pages = (-(-rows // size) + extra_pages for size in page_sizes)
    layer = NextLayer(draft_pages, page_sizes[1], 3, weights=rng.randint(0, 1))
    runner = TableRunner(
        num_pages=target_pages, page_size=page_sizes[0], hidden=layer.hidden, fails_at=sorted(fails_at)
    )
    table = TableRunner(num_pages=draft_pages, page_size=page_sizes[1], weights=rng.randint(0, 1))
    drafter, draft = {
        "none": lambda: (None, None),
        "guesses": lambda: (GuessingDrafter(max_tokens=3, seed=seed), None),
        "runner": lambda: (standalone(table), table),
        "next layer": lambda: (layer.drafter, layer.runner),
    }[drafting]()
    engine = make_engine(
        runner, drafter=drafter, draft=draft, prefill_chunk=prefill_chunk, max_num_seqs=max_num_seqs, reuses=True
    )
    pending, steps = list(requests), 0
    while pending or engine.has_work:
        if pending and (rng.random() < 0.4 or not engine.has_work):
            engine.add(pending.pop(0))
        try:
            engine.step()
        except Broken:
            assert runner.num_forwards in fails_at
        check_pages(engine, [runner] if draft is None else [runner, draft], requests)
        steps += 1
        assert steps < 5000, "somebody starves"
    for asked in requests:
        assert asked.output == expected(asked)
        assert 0 <= asked.num_cached_tokens < len(asked.prompt)
    engine.reuse._tree.clear()
    for one in (runner, table, layer.runner):
        assert one.tables.pool.num_free == one.tables.pool.num_pages
