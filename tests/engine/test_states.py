"""Serving models with states: who waits for a slot, how prompts are cut, what a preempted request computes again."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proa.arch.delta_blocks import BLOCK
from proa.engine.engine import Engine
from proa.engine.request import Request, Status
from proa.errors import CacheExhausted
from proa.speculative.draft_length import FixedLengths
from proa.speculative.drafters.standalone import StandaloneDrafter
from proa.units import Phase, Verification
from tests.engine.state_model import KnowingDrafter, StateRunner, expected_with_states
from tests.engine.table_model import (
    VOCAB,
    Broken,
    NextLayer,
    TableRunner,
    expected,
    finish,
    make_engine,
    request,
    run,
)

K = 3
EACH = {"replay": 2, "states": 1 + K + 1}
"""Slots of one request: a committed state and one tentative, or one for each row of a proposal and its anchor."""


def runner_of(rollback: str, *, seqs: int = 4, snapshots: int = 0, num_pages: int = 400, **settings) -> StateRunner:
    """As the plan would have it for `seqs` requests."""
    kept = seqs * (K + 1) if rollback == "replay" else 0
    slots = seqs * EACH[rollback] + snapshots
    return StateRunner(slots=slots, kept_rows=kept, num_pages=num_pages, **{"page_size": 4, **settings})


def engine_of(runner: TableRunner, **settings) -> Engine:
    limits = {"prefill_chunk": 128, "max_model_len": 1024, "alignment": BLOCK, "max_num_seqs": 4}
    return make_engine(runner, **{**limits, **settings})


def standalone(draft: TableRunner) -> StandaloneDrafter:
    fields = {"max_tokens": K, "draft_vocab": VOCAB, "vocab": VOCAB, "prefill_chunk": 128}
    return StandaloneDrafter(runner=draft, verification=Verification.COUPLED, **fields)


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def spans_of(runner: TableRunner) -> list[tuple[str, int, int]]:
    return [(span.phase.value, span.start, span.end) for spans in runner.forwards for span in spans]


def check_idle(*runners: TableRunner) -> None:
    """Nothing is held but for requests to come."""
    for runner in runners:
        pool = runner.tables.pool
        pool.check()
        assert pool.num_free + pool.num_idle == pool.num_pages
        if runner.states is not None:
            runner.states.check()


@pytest.mark.parametrize("rollback", EACH)
@pytest.mark.parametrize("length", [1, 63, 64, 65, 128, 150, 300])
def test_prompts_are_cut_at_whole_blocks_and_what_is_generated_is_computed_row_by_row(rollback: str, length: int):
    runner = runner_of(rollback)
    asked = request(0, prompt(length), max_tokens=5)
    run(engine_of(runner), [asked])
    assert asked.output == expected_with_states(asked)
    cuts = [*range(0, length, 128), length]
    wanted = [("prefill", start, stop) for start, stop in zip(cuts, cuts[1:], strict=False)]
    assert spans_of(runner) == [*wanted, *(("decode", row, row + 1) for row in range(length, length + 4))]
    assert runner.states.free_slots == runner.states.pool.num_pages


def test_tokens_that_do_not_reach_the_next_block_go_to_a_prompt_that_ends_before_it():
    runner = runner_of("states")
    engine = engine_of(runner)
    asked = [request(0, prompt(100), max_tokens=2), request(1, prompt(90, 1), max_tokens=2)]
    asked.append(request(2, prompt(20, 2), max_tokens=2))
    run(engine, asked)
    # 28 of 128 tokens are left after the first prompt: the second one needs 64 for its first block.
    assert spans_of(runner)[:3] == [("prefill", 0, 100), ("decode", 100, 101), ("prefill", 0, 90)]
    assert [one.output for one in asked] == [expected_with_states(one) for one in asked]


@pytest.mark.parametrize("rollback", EACH)
@pytest.mark.parametrize("skill", [0.0, 0.7, 1.0])
def test_proposals_change_nothing(rollback: str, skill: float):
    runner = runner_of(rollback)
    asked = [request(i, prompt(40 * i + 1, i), max_tokens=12, temperature=0.8 * (i % 2)) for i in range(6)]
    engine = engine_of(runner, drafter=KnowingDrafter(max_tokens=K, skill=skill))
    run(engine, asked)
    assert [one.output for one in asked] == [expected_with_states(one) for one in asked]
    assert (engine.stats.metrics()["acceptance_rate"] > 0.2) == (skill > 0)
    assert (runner.num_replays > 0) == (rollback == "replay")
    check_idle(runner)


@pytest.mark.parametrize("rollback", EACH)
def test_a_request_waits_until_there_is_a_slot(rollback: str):
    runner = runner_of(rollback, seqs=2)
    engine = engine_of(runner, max_num_seqs=8, drafter=KnowingDrafter(max_tokens=K))
    asked = [request(i, prompt(30, i), max_tokens=6) for i in range(5)]
    for one in asked:
        engine.add(one)
    most = 0
    while engine.has_work:
        engine.step()
        most = max(most, engine.num_running)
    assert most == 2
    assert [one.output for one in asked] == [expected_with_states(one) for one in asked]
    assert runner.states.free_slots == runner.states.pool.num_pages


def test_a_runner_without_slots_for_one_request_is_no_use():
    runner = StateRunner(slots=1, kept_rows=0, num_pages=20, page_size=4)
    with pytest.raises(CacheExhausted, match="needs 2 state slots and the runner has 1") as caught:
        engine_of(runner).add(request(0, [1]))
    assert caught.value.slug == "cache/request-too-large"


@pytest.mark.parametrize("reuses", [False, True])
@pytest.mark.parametrize("rollback", EACH)
def test_a_preempted_request_computes_its_prompt_by_blocks_and_its_answer_row_by_row(rollback: str, reuses: bool):
    runner = runner_of(rollback, num_pages=60, snapshots=2)
    engine = engine_of(runner, reuses=reuses)
    asked = [request(i, prompt(70, i), max_tokens=80) for i in range(2)]
    for one in asked:
        engine.add(one)
    emitted = 0
    while engine.has_work:
        engine.step()
        if not emitted and asked[1].status is Status.PREEMPTED:
            emitted, before = len(asked[1].output), len(runner.forwards)
    assert emitted > BLOCK / 4
    assert [one.output for one in asked] == [expected_with_states(one) for one in asked]
    again = [span for spans in runner.forwards[before:] for span in spans if len(span.tokens) > 1]
    assert {span.phase for span in again if span.start >= 70} == {Phase.VERIFY}
    assert [(span.start, span.end) for span in again if span.phase is Phase.PREFILL] == [(64 if reuses else 0, 70)]
    check_idle(runner)


def test_an_answer_is_not_resumed_from_a_prompt_that_repeats_it():
    asked = request(1, prompt(100), max_tokens=80)
    answer = expected_with_states(asked)
    quoting = request(0, [*prompt(100), *answer[:40]], max_tokens=80)
    runner = runner_of("states", num_pages=78, snapshots=4)
    engine = engine_of(runner, reuses=True)
    engine.add(quoting)
    engine.add(asked)
    preempted_at = None
    while engine.has_work:
        engine.step()
        if asked.status is Status.PREEMPTED:
            preempted_at = len(asked.output)
            # Rows 64 to 127 of the quoting prompt were computed by blocks, those of the answer row by row.
            assert engine.reuse.find(asked).match.rows(0, 1000) == 128
            assert engine.reuse.find(asked).rows == (64,)
    assert preempted_at > 28
    assert (asked.output, quoting.output) == (answer, expected_with_states(quoting))


@pytest.mark.parametrize("fails_at", [*range(1, 9), *range(1004, 1009)])
@pytest.mark.parametrize("rollback", EACH)
def test_a_step_that_failed_can_be_repeated(rollback: str, fails_at: int):
    runner = runner_of(rollback, fails_at=[fails_at], snapshots=2)
    engine = engine_of(runner, drafter=KnowingDrafter(max_tokens=K, skill=0.4), reuses=True)
    asked = [request(i, prompt(66 + i, i // 2), max_tokens=12) for i in range(4)]
    for one in asked:
        engine.add(one)
    failures = 0
    while engine.has_work:
        try:
            engine.step()
        except Broken:
            failures += 1
            runner.fails_at = ()
        runner.states.check()
    assert failures == 1 or fails_at > 1000
    assert [one.output for one in asked] == [expected_with_states(one) for one in asked]
    check_idle(runner)


@pytest.mark.parametrize("past", range(13))
def test_a_prompt_goes_on_from_the_last_snapshot_that_it_has_in_common(past: int):
    runner = runner_of("states", snapshots=8)
    engine = engine_of(runner, reuses=True)
    known = prompt(300)
    first = request(0, known, max_tokens=3)
    run(engine, [first])
    assert engine.reuse.stats()["num_snapshots"] == 1
    for number, boundary in enumerate([256, 192, 192], start=1):
        runner.forwards.clear()
        asked = request(number, [*known[:boundary], *prompt(past, 7 + number)] or [1], max_tokens=4)
        run(engine, [asked])
        assert asked.output == expected_with_states(asked)
        # At 256 there is a snapshot, but the last token is computed. Where two prompts part one is made for the third.
        assert asked.num_cached_tokens == {1: 256 if past else 0, 2: 0, 3: 192 if past else 128}[number]
    check_idle(runner)


def test_without_room_for_snapshots_nothing_is_reused_and_nothing_fails():
    runner = StateRunner(slots=2, kept_rows=0, num_pages=100, page_size=4)
    engine = engine_of(runner, reuses=True, max_num_seqs=1)
    for number in range(3):
        asked = request(number, prompt(130), max_tokens=3)
        run(engine, [asked])
        assert (asked.output, asked.num_cached_tokens) == (expected_with_states(asked), 0)
    assert engine.reuse.stats()["num_snapshots"] == 0


def test_snapshots_go_when_requests_need_their_slots():
    runner = runner_of("replay", seqs=2, snapshots=0)
    engine = engine_of(runner, reuses=True, max_num_seqs=2)
    run(engine, [request(0, prompt(70), max_tokens=2)])
    assert engine.reuse.stats()["num_snapshots"] == 1
    asked = [request(1 + i, prompt(70), max_tokens=9) for i in range(2)]
    for one in asked:
        engine.add(one)
    engine.step()
    # Both run, and use the slots; the first one resumed all the same, before its snapshot had to go.
    assert (engine.num_running, engine.reuse.stats()["num_snapshots"]) == (2, 0)
    finish(engine)
    assert [one.output for one in asked] == [expected_with_states(one) for one in asked]
    check_idle(runner)


@pytest.mark.parametrize("rollback", EACH)
def test_a_draft_with_states_catches_up_by_blocks_and_row_by_row(rollback: str):
    draft = runner_of(rollback, tells_blocks=False, snapshots=2)
    runner = TableRunner(num_pages=400, page_size=4)
    engine = engine_of(runner, drafter=standalone(draft), draft=draft, reuses=True)
    asked = request(0, prompt(150), max_tokens=14)
    run(engine, [asked])
    assert asked.output == expected(asked)
    assert engine.stats.metrics()["acceptance_rate"] == 1
    assert spans_of(draft)[:3] == [("prefill", 0, 128), ("prefill", 128, 150), ("decode", 150, 151)]
    # The last proposed token was accepted and has no row yet: it goes with the next anchor.
    assert ("verify", 153, 155) in spans_of(draft)
    draft.forwards.clear()
    again = request(1, [*prompt(150), 1, 2], max_tokens=4)
    run(engine, [again])
    assert again.output == expected(again)
    assert again.num_cached_tokens == 148
    assert spans_of(draft)[0] == ("prefill", 128, 152)
    check_idle(runner, draft)


class Seldom(FixedLengths):
    """Lets the drafter propose in two of five steps."""

    step = 0

    def limits(self, wanted, size):
        self.step += 1
        return super().limits(wanted, size) if self.step % 5 in (3, 4) else {}


def draft_with(slots: int, rollback: str, **settings) -> StateRunner:
    kept = K + 1 if rollback == "replay" else 0
    pages = {"num_pages": 100, "page_size": 4, "tells_blocks": False}
    return StateRunner(slots=slots, kept_rows=kept, **pages, **settings)


@pytest.mark.parametrize("rollback", EACH)
def test_a_draft_that_has_fallen_behind_catches_up_and_proposes_in_the_same_step(rollback: str):
    draft, runner, lengths = draft_with(EACH[rollback], rollback), TableRunner(num_pages=100, page_size=4), Seldom(K)
    engine = engine_of(runner, drafter=standalone(draft), draft=draft, lengths=lengths, max_num_seqs=1)
    asked = request(0, prompt(70), max_tokens=60)
    run(engine, [asked])
    assert asked.output == expected(asked)
    behind = [span for spans in draft.forwards for span in spans if len(span.tokens) > 2 and span.start >= 70]
    assert {span.phase for span in behind} == {Phase.VERIFY}
    metrics = engine.stats.metrics()
    # 10 tokens by the fourth step (1 + 1 + 4 + 4), then 11 by each five (1 + 1 + 1 + 4 + 4): 54 after ten proposals,
    # 57 three steps later, and the last three by one more.
    assert (metrics["acceptance_rate"], metrics["num_drafts"]) == (1, 11)
    check_idle(runner, draft)
    assert draft.states.free_slots == draft.states.pool.num_pages


@pytest.mark.parametrize("rollback", EACH)
@pytest.mark.parametrize("output", [1, 2, 5, 61])
def test_a_draft_that_is_always_right_proposes_in_every_step(rollback: str, output: int):
    draft, runner = draft_with(EACH[rollback], rollback), TableRunner(num_pages=100, page_size=4)
    engine = engine_of(runner, drafter=standalone(draft), draft=draft, max_num_seqs=1)
    asked = request(0, prompt(70), max_tokens=output)
    run(engine, [asked])
    assert asked.output == expected(asked)
    metrics = engine.stats.metrics()
    # One token of the prompt's forward, then K accepted and the target's own in each step. Of one token that is
    # missing at the end there is nothing to propose.
    steps, missing = divmod(output - 1, K + 1)
    assert metrics["num_drafts"] == steps + (missing > 1)
    assert metrics["num_draft_tokens"] == metrics["num_accepted_tokens"]
    check_idle(runner, draft)


@pytest.mark.parametrize("fails_at", range(1, 14))
@pytest.mark.parametrize("rollback", EACH)
def test_a_draft_that_fails_while_it_catches_up_loses_and_keeps_nothing(rollback: str, fails_at: int):
    draft = draft_with(EACH[rollback] + 2, rollback, fails_at=[fails_at])
    runner = TableRunner(num_pages=100, page_size=4)
    engine = engine_of(runner, drafter=standalone(draft), draft=draft, lengths=Seldom(K), max_num_seqs=1, reuses=True)
    asked = request(0, prompt(150), max_tokens=30)
    engine.add(asked)
    failures = 0
    while engine.has_work:
        try:
            engine.step()
        except Broken:
            failures += 1
            draft.fails_at = ()
        draft.states.check()
    assert (failures, asked.output) == (1, expected(asked))
    assert engine.reuse._tree.num_snapshots(1) == 1
    check_idle(runner, draft)


@pytest.mark.parametrize("slots", [0, 1])
def test_a_draft_without_slots_proposes_nothing_and_keeps_nothing(slots: int):
    draft = runner_of("states", tells_blocks=False)
    runner = TableRunner(num_pages=100, page_size=4)
    engine = engine_of(runner, drafter=standalone(draft), draft=draft)
    taken = draft.states.pool.allocate(draft.states.pool.num_free - slots)
    asked = request(0, prompt(70), max_tokens=6)
    run(engine, [asked])
    assert (asked.output, engine.stats.num_drafts) == (expected(asked), 0)
    assert [spans for spans in draft.forwards if spans[0].start >= 70] == []
    draft.states.pool.release(taken)
    check_idle(runner, draft)
    assert draft.states.free_slots == draft.states.pool.num_pages


def related_requests(rng: random.Random, count: int) -> list[Request]:
    stems = [prompt(140, rng.randrange(10**6)) for _ in range(2)]
    return [
        request(
            index,
            [*rng.choice(stems)[: rng.choice([0, 60, 64, 66, 128, 140])], *prompt(rng.randint(1, 70), index)],
            max_tokens=rng.randint(1, 12),
            temperature=rng.choice([0.0, 0.8]),
            speculative=rng.random() < 0.8,
            prompt_logprobs=0 if rng.random() < 0.1 else None,
        )
        for index in range(count)
    ]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    count=st.integers(1, 9),
    page_sizes=st.tuples(st.sampled_from([1, 4, 16, 5]), st.sampled_from([1, 4, 16])),
    extra_pages=st.integers(0, 60),
    seqs=st.integers(1, 4),
    snapshots=st.integers(0, 5),
    rollbacks=st.tuples(st.sampled_from(sorted(EACH)), st.sampled_from(sorted(EACH))),
    drafting=st.sampled_from(["none", "guesses", "hybrid", "dense", "next layer", "hybrid for dense"]),
    reuses=st.booleans(),
    fails_at=st.sets(st.integers(1, 60), max_size=3),
)
def test_whatever_the_pools_the_slots_and_the_drafts_every_request_answers_as_it_would_alone(
    seed: int, count: int, page_sizes: tuple[int, int], extra_pages: int, seqs: int, snapshots: int,
    rollbacks: tuple[str, str], drafting: str, reuses: bool, fails_at: Sequence[int],
) -> None:  # fmt: skip
    rng = random.Random(seed)
    requests = related_requests(rng, count)
    rows = max(len(asked.prompt) + asked.sampling.params.max_tokens for asked in requests)
    pages = [-(-rows // size) + extra_pages for size in page_sizes]
    layer = NextLayer(pages[1], page_sizes[1], K, weights=rng.randint(0, 1))
    common = {"num_pages": pages[0], "page_size": page_sizes[0], "fails_at": sorted(fails_at)}
    target = runner_of(rollbacks[0], seqs=seqs, snapshots=snapshots, hidden=layer.hidden, **common)
    target = TableRunner(**common) if drafting == "hybrid for dense" else target
    states = runner_of(
        rollbacks[1], seqs=seqs, snapshots=snapshots, num_pages=pages[1], page_size=page_sizes[1], tells_blocks=False
    )
    states.tells_blocks = drafting == "hybrid"
    table = TableRunner(num_pages=pages[1], page_size=page_sizes[1])
    drafter, draft = {
        "none": lambda: (None, None),
        "guesses": lambda: (KnowingDrafter(max_tokens=K, seed=seed), None),
        "hybrid": lambda: (standalone(states), states),
        "hybrid for dense": lambda: (standalone(states), states),
        "dense": lambda: (standalone(table), table),
        "next layer": lambda: (layer.drafter, layer.runner),
    }[drafting]()
    engine = engine_of(target, drafter=drafter, draft=draft, max_num_seqs=seqs, reuses=reuses)
    pending, steps = list(requests), 0
    runners = [target] if draft is None else [target, draft]
    while pending or engine.has_work:
        if pending and (rng.random() < 0.3 or not engine.has_work):
            engine.add(pending.pop(0))
        try:
            engine.step()
        except Broken:
            assert target.num_forwards in fails_at
        for one in runners:
            one.tables.pool.check()
            if one.states is not None:
                one.states.check()
        waiting = sum(rows._stop - rows._start for rows in layer.drafter._observed.values())
        assert waiting <= target.tables.pool.num_pages * target.tables.page_size, "more than the memory plan counts"
        if engine.reuse is not None:
            engine.reuse._tree.check()
        steps += 1
        assert steps < 3000, "somebody starves"
    answer = expected if drafting == "hybrid for dense" else expected_with_states
    assert [asked.output for asked in requests] == [answer(asked) for asked in requests]
    if drafting == "hybrid" and engine.stats.num_draft_tokens:
        assert engine.stats.metrics()["acceptance_rate"] == 1
    if engine.reuse is not None:
        engine.reuse._tree.clear()
    for one in runners:
        assert one.tables.pool.num_free == one.tables.pool.num_pages
        assert one.states is None or one.states.free_slots == one.states.pool.num_pages
