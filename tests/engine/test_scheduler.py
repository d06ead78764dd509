from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proa.engine.request import Request, Status
from proa.engine.scheduler import Scheduler, StepPlan
from tests.engine.table_model import TableRunner, request, schedule


class Bench:
    """A scheduler with its tables, and steps in which every request that decodes emits one token."""

    def __init__(
        self, *, num_pages: int, page_size: int = 4, draft_pages: int | None = None, drafts: int = 0, **limits: int
    ) -> None:
        runners = [TableRunner(num_pages=num_pages, page_size=page_size)]
        if draft_pages is not None:
            runners.append(TableRunner(num_pages=draft_pages, page_size=page_size))
        self.tables = runners[0].tables
        self.scheduler = Scheduler(schedule(**limits), runners, drafts, None)
        self.requests: dict[int, Request] = {}

    def add(self, request_id: int, prompt_tokens: int, max_tokens: int = 12, **params: object) -> Request:
        asked = request(request_id, [0] * prompt_tokens, max_tokens=max_tokens, **params)
        self.scheduler.add(asked)
        self.requests[request_id] = asked
        return asked

    def plan(self) -> StepPlan:
        plan = self.scheduler.schedule()
        for request_id in plan.preempted:
            self.tables.release(request_id)
        return plan

    def carry_out(self, plan: StepPlan, accepted: int = 0) -> None:
        """Write all rows, keep the accepted ones, emit their tokens, remove who has all its tokens."""
        self.tables.mark()
        keep = {chunk.request_id: chunk.stop - chunk.start for chunk in plan.prefill}
        for row in plan.decode:
            self.tables.reserve(row.request_id, 1 + row.limit)
            keep[row.request_id] = 1 + min(accepted, row.limit)
        for chunk in plan.prefill:
            assert chunk.start == self.tables.length(chunk.request_id)
            self.tables.reserve(chunk.request_id, chunk.stop - chunk.start)
        self.tables.keep(keep)
        emitted = {row.request_id: keep[row.request_id] for row in plan.decode}
        for chunk in plan.prefill:
            asked = self.requests[chunk.request_id]
            emitted[chunk.request_id] = int(chunk.stop == len(asked.prompt) and not asked.output)
        for request_id, count in emitted.items():
            self._emit(self.requests[request_id], count)

    def step(self, accepted: int = 0) -> StepPlan:
        plan = self.plan()
        self.carry_out(plan, accepted)
        return plan

    def _emit(self, asked: Request, count: int) -> None:
        asked.output.extend([0] * count)
        assert len(asked.output) <= asked.sampling.params.max_tokens
        if len(asked.output) == asked.sampling.params.max_tokens:
            self.scheduler.remove(asked)
            self.tables.release(asked.request_id)


def chunks(plan: StepPlan) -> list[tuple[int, int, int]]:
    return [(chunk.request_id, chunk.start, chunk.stop) for chunk in plan.prefill]


def limits(plan: StepPlan) -> dict[int, int]:
    return {row.request_id: row.limit for row in plan.decode}


def test_prompt_tokens_of_a_step_are_shared_in_order_of_arrival():
    bench = Bench(num_pages=40, prefill_chunk=10)
    for request_id, prompt_tokens in enumerate([4, 9, 3]):
        bench.add(request_id, prompt_tokens)
    assert chunks(bench.step()) == [(0, 0, 4), (1, 0, 6)]
    assert chunks(bench.step()) == [(1, 6, 9), (2, 0, 3)]


def test_decode_rows_take_nothing_from_the_prompt_tokens():
    bench = Bench(num_pages=40, prefill_chunk=4)
    bench.add(0, 4)
    bench.step()
    bench.add(1, 9)
    plan = bench.step()
    assert limits(plan) == {0: 0}
    assert chunks(plan) == [(1, 0, 4)]


def test_no_more_requests_run_than_allowed():
    bench = Bench(num_pages=40, max_num_seqs=2)
    for request_id in range(3):
        bench.add(request_id, 2, max_tokens=2)
    bench.step()
    assert (bench.scheduler.num_running, bench.scheduler.num_waiting) == (2, 1)
    bench.step()
    assert chunks(bench.step()) == [(2, 0, 2)]


def test_a_request_waits_until_its_whole_prompt_has_pages_and_nobody_overtakes_it():
    bench = Bench(num_pages=6, prefill_chunk=2)
    bench.add(0, 8, max_tokens=9)
    bench.add(1, 16, max_tokens=5)
    bench.add(2, 1, max_tokens=2)
    plans = []
    while 0 in [asked.request_id for asked in bench.requests.values() if asked.status is not Status.FINISHED]:
        plans.append(bench.step())
    assert all(chunk[0] == 0 for plan in plans for chunk in chunks(plan))
    assert chunks(bench.step())[0] == (1, 0, 2)


@pytest.mark.parametrize(("num_pages", "running"), [(3, 1), (4, 2)])
def test_admission_leaves_a_page_to_grow_into_for_each_request_that_runs(num_pages: int, running: int):
    bench = Bench(num_pages=num_pages)
    bench.add(0, 4, max_tokens=5)
    bench.add(1, 8, max_tokens=5)
    bench.step()
    assert bench.scheduler.num_running == running


def test_the_latest_arrival_is_preempted_and_resumes_before_those_that_never_ran():
    bench = Bench(num_pages=6, max_num_seqs=2)
    first, second, third = (bench.add(request_id, 4, max_tokens=17) for request_id in range(3))
    while not (plan := bench.step()).preempted:
        assert third.status is Status.WAITING
    assert plan.preempted == (1,)
    assert (first.status, second.status) == (Status.RUNNING, Status.PREEMPTED)
    had = len(second.output)
    while second.status is Status.PREEMPTED:
        plan = bench.step()
    # All but its last token are computed again, without asking for a token.
    assert chunks(plan)[0] == (1, 0, 4 + had - 1)
    assert len(second.output) == had
    assert limits(bench.step())[1] == 0
    assert len(second.output) == had + 1


@pytest.mark.parametrize(("left", "limit"), [(6, 4), (4, 3), (2, 1), (1, 0)])
def test_a_proposal_is_no_longer_than_what_the_request_may_still_emit_less_one(left: int, limit: int):
    bench = Bench(num_pages=40, drafts=4)
    bench.add(0, 3, max_tokens=1 + left)
    bench.step()
    assert limits(bench.plan()) == {0: limit}


def test_a_proposal_keeps_within_the_model_length():
    bench = Bench(num_pages=40, drafts=4, max_model_len=6)
    bench.add(0, 3, max_tokens=100)
    bench.step()
    # Tokens 3 (out already), 4 and 5 are all that the model length leaves.
    assert limits(bench.plan()) == {0: 1}


def test_proposals_are_shortened_before_anyone_is_preempted():
    bench = Bench(num_pages=4, drafts=4)
    bench.add(0, 3, max_tokens=9)
    bench.add(1, 3, max_tokens=9)
    bench.step()
    plan = bench.plan()
    assert plan.preempted == ()
    assert limits(plan) == {0: 4, 1: 4}
    bench = Bench(num_pages=3, drafts=4)
    bench.add(0, 3, max_tokens=9)
    bench.add(1, 3, max_tokens=9)
    bench.step()
    plan = bench.plan()
    assert plan.preempted == ()
    # Row 3 fits in the first page; the third page goes to the earlier request.
    assert limits(plan) == {0: 4, 1: 0}


def test_the_pool_of_the_draft_limits_as_the_targets_does():
    bench = Bench(num_pages=40, draft_pages=3, drafts=4)
    bench.add(0, 3, max_tokens=9)
    bench.add(1, 3, max_tokens=9)
    bench.step()
    assert limits(bench.plan()) == {0: 4, 1: 0}


def test_a_step_that_was_not_carried_out_is_planned_again():
    bench = Bench(num_pages=40, prefill_chunk=6)
    for request_id in range(3):
        bench.add(request_id, 4)
    bench.step()
    assert bench.plan() == bench.plan()


def test_a_removed_request_is_forgotten_wherever_it_stands():
    bench = Bench(num_pages=40, max_num_seqs=1)
    running, waiting = bench.add(0, 4), bench.add(1, 4)
    bench.step()
    bench.scheduler.remove(waiting)
    bench.scheduler.remove(running)
    assert (bench.scheduler.num_running, bench.scheduler.num_waiting) == (0, 0)
    assert running.status is waiting.status is Status.FINISHED


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    sizes=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=7),
    page_size=st.integers(1, 5),
    extra_pages=st.integers(0, 8),
    prefill_chunk=st.integers(1, 9),
    max_num_seqs=st.integers(1, 7),
    drafts=st.integers(0, 4),
)
def test_the_oldest_request_moves_in_every_step_and_the_limits_hold(
    seed: int, sizes: Sequence[tuple[int, int]], page_size: int, extra_pages: int, prefill_chunk: int,
    max_num_seqs: int, drafts: int,
):  # fmt: skip
    rng = random.Random(seed)
    num_pages = max(-(-(prompt + most - 1) // page_size) for prompt, most in sizes) + extra_pages
    bench = Bench(
        num_pages=num_pages, page_size=page_size, prefill_chunk=prefill_chunk, max_num_seqs=max_num_seqs, drafts=drafts
    )
    for request_id, (prompt, most) in enumerate(sizes):
        bench.add(request_id, prompt, max_tokens=most)
    waiting_since_start = set(bench.requests)
    while live := [asked for asked in bench.requests.values() if asked.status is not Status.FINISHED]:
        oldest = live[0]
        before = (bench.tables.length(oldest.request_id), len(oldest.output))
        plan = bench.step(accepted=rng.randint(0, 4))
        moved = (bench.tables.length(oldest.request_id), len(oldest.output))
        assert oldest.status is Status.FINISHED or moved > before
        assert oldest.request_id not in plan.preempted
        assert not set(plan.preempted) & {request_id for request_id, _, _ in chunks(plan)}
        assert sum(stop - start for _, start, stop in chunks(plan)) <= prefill_chunk
        assert len(plan.decode) + len(plan.prefill) <= max_num_seqs
        # First runs come in order of arrival.
        started = {request_id for request_id, start, _ in chunks(plan) if start == 0} & waiting_since_start
        assert started == set(sorted(waiting_since_start)[: len(started)])
        waiting_since_start -= started
        bench.tables.pool.check()
    assert bench.tables.pool.num_free == num_pages
