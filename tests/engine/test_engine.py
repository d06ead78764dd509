from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proa.engine.request import Request, Status
from proa.errors import CacheExhausted, RequestError
from proa.kernels.reference.sample import ReferenceSample
from proa.sampling.sampler import logprobs
from proa.speculative.drafters.standalone import StandaloneDrafter
from proa.speculative.protocol import Verdict
from proa.speculative.verify import Verifier
from proa.units import Phase, Verification
from tests.engine.table_model import (
    VOCAB,
    Broken,
    GuessingDrafter,
    ListSink,
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

TEMPERATURES = (0.0, 0.8)


def mixed_requests(count: int = 8, seed: int = 0, longest: int = 20) -> list[Request]:
    """Prompts and outputs of different lengths, greedy and sampled, some with penalties and stop tokens."""
    rng = random.Random(seed)
    return [
        request(
            index,
            [rng.randrange(VOCAB) for _ in range(rng.randint(1, longest))],
            max_tokens=rng.randint(1, 14),
            stop_ids=[rng.randrange(VOCAB)] if rng.random() < 0.3 else [],
            temperature=rng.choice(TEMPERATURES),
            presence_penalty=rng.choice([0.0, 1.5]),
        )
        for index in range(count)
    ]


def alone(requests: list[Request]) -> dict[int, list[int]]:
    return {asked.request_id: expected(asked) for asked in requests}


def standalone(draft: TableRunner, max_tokens: int = 3) -> StandaloneDrafter:
    return StandaloneDrafter(
        runner=draft,
        max_tokens=max_tokens,
        draft_vocab=VOCAB,
        vocab=VOCAB,
        prefill_chunk=7,
        verification=Verification.COUPLED,
    )


@pytest.mark.parametrize("prefill_chunk", [1, 7, 512])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_eight_requests_together_answer_as_each_would_alone(prefill_chunk: int, page_size: int):
    runner = TableRunner(num_pages=512 // page_size, page_size=page_size)
    requests = mixed_requests()
    outputs = run(make_engine(runner, prefill_chunk=prefill_chunk), requests)
    assert tokens_of(outputs) == alone(requests)
    assert {asked.request_id: asked.output for asked in requests} == alone(requests)
    check_empty(runner)


def test_a_pool_that_forces_preemption_gives_the_same_output():
    runner = TableRunner(num_pages=14, page_size=3)
    requests = mixed_requests(seed=3)
    engine = make_engine(runner, prefill_chunk=7)
    for asked in requests:
        engine.add(asked)
    preempted: set[int] = set()
    outputs: dict[int, list[int]] = {asked.request_id: [] for asked in requests}
    while engine.has_work:
        for output in engine.step():
            outputs[output.request_id] += output.tokens
        preempted |= {asked.request_id for asked in requests if asked.status is Status.PREEMPTED}
    assert preempted
    assert outputs == alone(requests)
    check_empty(runner)


@pytest.mark.parametrize("skill", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_proposals_change_nothing_but_the_number_of_steps(skill: float, seed: int):
    runner = TableRunner(num_pages=60, page_size=3)
    requests = mixed_requests(seed=seed)
    drafter = GuessingDrafter(max_tokens=4, skill=skill, seed=seed)
    outputs = run(make_engine(runner, drafter=drafter, prefill_chunk=7), requests)
    assert tokens_of(outputs) == alone(requests)
    assert not drafter.shown
    check_empty(runner)


@pytest.mark.parametrize("num_pages", [400, 14])
@pytest.mark.parametrize("weights", [0, 1], ids=["the target itself", "another model"])
def test_a_draft_runner_with_pages_of_its_own_changes_nothing(weights: int, num_pages: int):
    runner = TableRunner(num_pages=num_pages, page_size=3)
    draft = TableRunner(num_pages=num_pages, page_size=3, weights=weights)
    requests = mixed_requests(seed=3)
    engine = make_engine(runner, drafter=standalone(draft), draft=draft, prefill_chunk=7)
    assert tokens_of(run(engine, requests)) == alone(requests)
    assert draft.num_forwards
    check_empty(runner, draft)


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_a_draft_that_is_the_target_has_every_token_accepted(temperature: float):
    runner, draft = (TableRunner(num_pages=40, page_size=4) for _ in range(2))
    asked = request(0, [1, 2, 3], max_tokens=1 + 6 * 4, temperature=temperature)
    engine = make_engine(runner, drafter=standalone(draft), draft=draft)
    run(engine, [asked])
    metrics = engine.stats.metrics()
    assert metrics["num_drafts"] == 6
    assert metrics["mean_acceptance_length"] == 4.0


def test_verify_rows_are_the_anchor_and_its_proposal_after_the_committed_rows():
    runner = TableRunner(num_pages=40, page_size=4)
    asked = request(0, [1, 2, 3], max_tokens=9)
    run(make_engine(runner, drafter=GuessingDrafter(max_tokens=3, skill=1.0)), [asked])
    text = [*asked.prompt, *asked.output]
    spans = [span for [span] in runner.forwards]
    assert spans[0].phase is Phase.PREFILL
    for span in spans[1:]:
        assert span.phase is (Phase.VERIFY if len(span.tokens) > 1 else Phase.DECODE)
        assert list(span.tokens) == text[span.start : span.start + len(span.tokens)]
        assert list(span.logits) == list(range(len(span.tokens)))


def test_prefill_chunks_plain_rows_and_verify_rows_share_one_forward():
    runner = TableRunner(num_pages=80, page_size=4)
    engine = make_engine(runner, drafter=GuessingDrafter(max_tokens=3, skill=1.0, seed=1), prefill_chunk=5)
    run(engine, [request(0, [1, 2], max_tokens=20), request(1, [3], max_tokens=20, speculative=False),
                 request(2, [4] * 30, max_tokens=2)])  # fmt: skip
    phases = {tuple(sorted({span.phase.value for span in spans})) for spans in runner.forwards}
    assert ("decode", "prefill", "verify") in phases


def test_only_the_last_row_of_a_prompt_asks_for_logits():
    runner = TableRunner(num_pages=40, page_size=4)
    run(make_engine(runner, prefill_chunk=4), [request(0, range(10), max_tokens=1)])
    assert [list(span.logits) for [span] in runner.forwards] == [[], [], [1]]
    assert [(span.start, len(span.tokens)) for [span] in runner.forwards] == [(0, 4), (4, 4), (8, 2)]


@pytest.mark.parametrize("fails_at", range(1, 16))
@pytest.mark.parametrize("which", ["target", "draft"])
def test_a_step_that_failed_can_be_repeated_as_if_it_had_not_begun(which: str, fails_at: int):
    runner = TableRunner(num_pages=14, page_size=3, fails_at=[fails_at] if which == "target" else [])
    draft = TableRunner(num_pages=14, page_size=3, weights=1, fails_at=[fails_at] if which == "draft" else [])
    requests = mixed_requests(seed=3)
    engine = make_engine(runner, drafter=standalone(draft), draft=draft, prefill_chunk=7)
    for asked in requests:
        engine.add(asked)
    outputs: dict[int, list[int]] = {asked.request_id: [] for asked in requests}
    failures = 0
    while engine.has_work:
        before = [list(asked.output) for asked in requests]
        try:
            for output in engine.step():
                outputs[output.request_id] += output.tokens
        except Broken:
            failures += 1
            assert [list(asked.output) for asked in requests] == before
    assert failures == 1
    assert outputs == alone(requests)
    check_empty(runner, draft)


@pytest.mark.parametrize("fails_at", range(8))
def test_a_sink_that_fails_once_gets_no_token_twice(fails_at: int):
    runner = TableRunner(num_pages=60, page_size=3)
    requests = mixed_requests(count=3, seed=5) + [request(9, [1, 2], max_tokens=8)]
    broken = ListSink(max_new=8, fails_at=fails_at)
    requests[-1].sink = broken
    engine = make_engine(runner, drafter=GuessingDrafter(max_tokens=3, skill=1.0, seed=2))
    for asked in requests:
        engine.add(asked)
    with pytest.raises(Broken, match="sink"):
        finish(engine)
    finish(engine)
    assert {asked.request_id: asked.sink.tokens for asked in requests} == alone(requests)
    check_empty(runner)


def test_a_drafter_that_fails_at_a_prompt_is_shown_it_again():
    class FailsOnce(GuessingDrafter):
        failures = 0

        def prefill(self, context):
            if not self.failures:
                self.failures += 1
                raise Broken("prefill")
            super().prefill(context)

    runner = TableRunner(num_pages=60, page_size=3)
    drafter = FailsOnce(max_tokens=3)
    engine = make_engine(runner, drafter=drafter)
    asked = request(0, [1, 2, 3])
    with pytest.raises(Broken):
        run(engine, [asked])
    assert not drafter.shown
    finish(engine)
    assert asked.output == expected(asked)


def test_tokens_are_not_lost_when_the_drafter_fails_after_the_commit():
    class FailsOnce(GuessingDrafter):
        def commit(self, verdict):
            super().commit(verdict)
            if len(self.judged) == 2:
                raise Broken("commit")

    runner = TableRunner(num_pages=60, page_size=3)
    engine = make_engine(runner, drafter=FailsOnce(max_tokens=3, skill=1.0, seed=3))
    asked = request(0, [1, 2, 3])
    engine.add(asked)
    outputs = []
    failures = 0
    while engine.has_work:
        try:
            outputs += engine.step()
        except Broken:
            failures += 1
    assert failures == 1
    assert [token for output in outputs for token in output.tokens] == expected(asked)
    assert outputs[-1].finish_reason == "length"


def test_a_drafter_that_proposes_too_much_is_refused_and_nothing_is_kept():
    runner = TableRunner(num_pages=60, page_size=3)
    engine = make_engine(runner, drafter=GuessingDrafter(max_tokens=3, overshoot=4))
    with pytest.raises(RuntimeError, match="where 3 were of use"):
        run(engine, [request(0, [1, 2, 3])])
    assert runner.tables.length(0) == 3


def test_a_runner_that_returns_other_rows_than_asked_for_is_refused():
    class Short(TableRunner):
        def forward(self, spans):
            output = super().forward(spans)
            return replace(output, logits=output.logits[1:])

    engine = make_engine(Short(num_pages=9, page_size=4))
    with pytest.raises(RuntimeError, match="0 rows of logits instead of 1"):
        run(engine, [request(0, [1])])


class OffByOne(Verifier):
    """Keeps `error` more rows of each request than it emits tokens."""

    error = 0

    def verify(self, requests, proposal, logits):
        verdict = super().verify(requests, proposal, logits)
        return Verdict(requests=tuple(replace(entry, keep=entry.keep + self.error) for entry in verdict.requests))


def test_a_verdict_that_keeps_rows_of_tokens_it_did_not_emit_is_noticed():
    engine = make_engine(TableRunner(num_pages=9, page_size=4), drafter=GuessingDrafter(max_tokens=3, skill=0.0))
    engine._verifier = OffByOne(Verification.COUPLED, ReferenceSample())
    engine._verifier.error = 1
    with pytest.raises(RuntimeError, match="request 0 has 3 rows cached of 3 tokens"):
        run(engine, [request(0, [1])])


def test_a_verdict_that_keeps_too_few_rows_costs_their_computation_and_nothing_else():
    engine = make_engine(TableRunner(num_pages=9, page_size=4), drafter=GuessingDrafter(max_tokens=3, skill=1.0))
    engine._verifier = OffByOne(Verification.COUPLED, ReferenceSample())
    engine._verifier.error = -1
    asked = request(0, [1, 2])
    assert tokens_of(run(engine, [asked]))[0] == expected(asked)


def test_a_drafter_hears_only_of_what_it_proposed():
    runner = TableRunner(num_pages=60, page_size=3)
    drafter = GuessingDrafter(max_tokens=3)
    run(make_engine(runner, drafter=drafter), [request(0, [1]), request(1, [2], speculative=False)])
    assert {entry.request_id for verdict in drafter.judged for entry in verdict.requests} == {0}


def test_a_request_may_decline_speculation():
    runner = TableRunner(num_pages=60, page_size=3)
    drafter = GuessingDrafter(max_tokens=3)
    asked = request(0, [1, 2], speculative=False)
    outputs = run(make_engine(runner, drafter=drafter), [asked])
    assert tokens_of(outputs)[0] == expected(asked)
    assert not drafter.judged
    assert outputs[0][-1].stats.metrics()["num_drafts"] == 0


def test_statistics_are_kept_per_request_and_for_all():
    runner = TableRunner(num_pages=60, page_size=3)
    engine = make_engine(runner, drafter=GuessingDrafter(max_tokens=3, skill=0.5))
    outputs = run(engine, mixed_requests(seed=8))
    each = [entries[-1].stats.metrics()["num_draft_tokens"] for entries in outputs.values()]
    assert engine.stats.metrics()["num_draft_tokens"] == sum(each) > 0


@pytest.mark.parametrize("prefill_chunk", [3, 512])
def test_prompt_logprobs_score_every_prompt_token_after_the_first(prefill_chunk: int):
    runner = TableRunner(num_pages=60, page_size=3)
    prompt = [4, 8, 15, 16, 2, 3, 4]
    plain = request(1, [5, 6, 7], max_tokens=5)
    scored = request(0, prompt, prompt_logprobs=2, max_tokens=5)
    outputs = run(make_engine(runner, prefill_chunk=prefill_chunk), [scored, plain])
    first, *later = outputs[0]
    assert first.prompt_logprobs == (
        None,
        *(logprobs(next_logits(prompt[:stop]), prompt[stop], 2) for stop in range(1, len(prompt))),
    )
    assert all(output.prompt_logprobs is None for output in [*later, *outputs[1]])
    assert tokens_of(outputs) == {0: expected(scored), 1: expected(plain)}


def test_prompt_logprobs_survive_a_preemption_in_the_middle_of_the_prompt():
    runner = TableRunner(num_pages=12, page_size=2)
    older = request(0, [1] * 3, max_tokens=20)
    scored = request(1, list(range(15)), prompt_logprobs=0, max_tokens=2)
    engine = make_engine(runner, prefill_chunk=2)
    engine.add(older)
    engine.add(scored)
    statuses = set()
    entries = []
    while engine.has_work:
        entries += [output.prompt_logprobs for output in engine.step() if output.prompt_logprobs]
        statuses.add((scored.status, bool(scored.output)))
    assert (Status.PREEMPTED, False) in statuses
    [entry] = entries
    assert [scored and scored.token for scored in entry] == [None, *range(1, 15)]


def test_an_aborted_request_is_reported_once_and_frees_its_pages():
    runner = TableRunner(num_pages=60, page_size=3)
    engine = make_engine(runner, max_num_seqs=1)
    requests = [request(index, [1, 2, index], max_tokens=9) for index in range(2)]
    for asked in requests:
        engine.add(asked)
    engine.step()
    engine.step()
    engine.abort(0)
    engine.abort(0)
    engine.abort(7)
    outputs = finish(engine)
    assert [(output.tokens, output.finish_reason) for output in outputs[0]] == [((), "abort")]
    assert requests[0].output == expected(requests[0])[:2]
    assert requests[1].output == expected(requests[1])
    check_empty(runner)


def test_a_sink_may_abort_its_request_in_the_middle_of_a_step():
    class Leaving(ListSink):
        def push(self, token: int) -> bool:
            if len(self.tokens) == 3:
                engine.abort(0)
            return super().push(token)

    runner = TableRunner(num_pages=60, page_size=3)
    engine = make_engine(runner)
    outputs = run(engine, [request(0, [1, 2], sink=Leaving())])
    assert outputs[0][-1].finish_reason == "abort"
    assert tokens_of(outputs)[0] == expected(request(0, [1, 2], max_tokens=4))
    check_empty(runner)


def test_the_model_length_ends_a_request_whose_sink_knows_no_limit():
    runner = TableRunner(num_pages=60, page_size=3)
    drafter = GuessingDrafter(max_tokens=4, skill=1.0)
    engine = make_engine(runner, drafter=drafter, max_model_len=10)
    asked = request(0, [1, 2, 3], max_tokens=None)
    outputs = run(engine, [asked])
    assert asked.output == expected(request(0, [1, 2, 3], max_tokens=7))
    assert outputs[0][-1].finish_reason == "length"
    assert max(span.start + len(span.tokens) for [span] in runner.forwards) <= 10


def test_a_prompt_as_long_as_the_model_is_refused_with_both_counts():
    engine = make_engine(TableRunner(num_pages=60, page_size=3), max_model_len=10)
    with pytest.raises(RequestError, match="10 tokens and the model length is 10") as caught:
        engine.add(request(0, range(10)))
    assert caught.value.slug == "request/too-long"
    engine.add(request(0, range(9)))


def test_an_empty_prompt_is_refused():
    with pytest.raises(RequestError) as caught:
        make_engine(TableRunner(num_pages=6, page_size=3)).add(request(0, []))
    assert caught.value.slug == "request/empty-prompt"


@pytest.mark.parametrize("small", ["target", "draft"])
def test_a_request_that_no_empty_pool_could_hold_is_refused_with_pages_needed_and_there(small: str):
    runner = TableRunner(num_pages=4 if small == "target" else 90, page_size=4)
    draft = TableRunner(num_pages=4 if small == "draft" else 90, page_size=4)
    engine = make_engine(runner, drafter=standalone(draft), draft=draft)
    with pytest.raises(CacheExhausted, match="needs 5 cache pages and the runner has 4") as caught:
        engine.add(request(0, range(10), max_tokens=8))
    assert caught.value.slug == "cache/request-too-large"
    assert not engine.has_work
    fits = request(0, range(10), max_tokens=7)
    assert tokens_of(run(engine, [fits]))[0] == expected(fits)


def test_an_id_in_use_is_refused():
    engine = make_engine(TableRunner(num_pages=60, page_size=3))
    engine.add(request(0, [1]))
    with pytest.raises(ValueError, match="request 0 is being served already"):
        engine.add(request(0, [2]))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    count=st.integers(1, 8),
    page_size=st.integers(1, 5),
    extra_pages=st.integers(0, 12),
    prefill_chunk=st.sampled_from([1, 7, 512]),
    max_num_seqs=st.integers(1, 8),
    drafting=st.sampled_from(["none", "guesses", "runner", "next layer"]),
    num_draft_tokens=st.integers(1, 5),
    aborts=st.integers(0, 2),
)
def test_whatever_the_pool_the_limits_the_drafts_and_the_aborts(
    seed: int, count: int, page_size: int, extra_pages: int, prefill_chunk: int, max_num_seqs: int, drafting: str,
    num_draft_tokens: int, aborts: int,
):  # fmt: skip
    rng = random.Random(seed)
    requests = mixed_requests(count=count, seed=seed, longest=12)
    # The smallest pool in which each request fits alone, and a little more.
    rows = max(len(asked.prompt) + asked.sampling.params.max_tokens - 1 for asked in requests)
    num_pages = -(-rows // page_size) + extra_pages
    layer = NextLayer(num_pages, page_size, num_draft_tokens, weights=rng.randint(0, 1))
    runner = TableRunner(num_pages=num_pages, page_size=page_size, hidden=layer.hidden)
    table = TableRunner(num_pages=num_pages, page_size=page_size, weights=rng.randint(0, 1))
    draft = layer.runner if drafting == "next layer" else table
    drafters = {
        "none": lambda: None,
        "guesses": lambda: GuessingDrafter(max_tokens=num_draft_tokens, seed=seed),
        "runner": lambda: standalone(table, num_draft_tokens),
        "next layer": lambda: layer.drafter,
    }
    engine = make_engine(
        runner,
        drafter=drafters[drafting](),
        draft=draft if drafting in {"runner", "next layer"} else None,
        prefill_chunk=prefill_chunk,
        max_num_seqs=max_num_seqs,
    )
    pending = list(requests)
    aborted = set(rng.sample(range(count), min(aborts, count)))
    ended: list[int] = []
    steps = 0
    while pending or engine.has_work:
        if pending and (rng.random() < 0.5 or not engine.has_work):
            engine.add(pending.pop(0))
        live = [asked.request_id for asked in requests if asked.status is not Status.FINISHED and asked not in pending]
        if aborted & set(live) and rng.random() < 0.1:
            engine.abort((aborted & set(live)).pop())
        ended += [output.request_id for output in engine.step() if output.finished]
        for tables in (runner.tables, draft.tables):
            tables.pool.check()
            held = sum(len(tables.pages(asked.request_id)) for asked in requests)
            assert held == tables.pool.num_pages - tables.pool.num_free
        assert engine.num_running <= max_num_seqs
        steps += 1
        assert steps < 5000, "somebody starves"
    assert sorted(ended) == list(range(count))
    for asked in requests:
        answer = expected(asked)
        assert asked.output == answer[: len(asked.output)]
        assert len(asked.output) == len(answer) or asked.request_id in aborted
    check_empty(runner, draft)
    assert not layer.drafter._observed
