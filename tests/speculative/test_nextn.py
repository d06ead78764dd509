"""Drafting with the target's next-token layer: which rows it is fed, what it proposes, and what stays of it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from proa.cache.transaction import CacheTransaction
from proa.sampling.params import SamplingParams
from proa.sampling.state import SamplingState
from proa.speculative.drafters.nextn import NextNDrafter
from proa.speculative.protocol import DraftContext, DraftRequest, Proposal
from proa.speculative.verify import VerifyRequest
from proa.units import Phase, Verification
from tests.speculative.next_model import OWN, TARGET, Hidden, NextRunner
from tests.speculative.worlds import Sink, World, state, verifier

V, K = 8, 3
GREEDY = SamplingParams(temperature=0)
ALL = SamplingParams(
    temperature=0.8,
    repetition_penalty=1.3,
    presence_penalty=0.5,
    frequency_penalty=0.3,
    min_p=0.05,
    logit_bias={2: 1.0},
)


class Served:
    """One request as an engine would serve it."""

    def __init__(self, request_id: int, sampling: SamplingState, first: int) -> None:
        self.request_id = request_id
        self.sampling = sampling
        self.output = [first]
        self.accepted: list[int] = []
        self.cached = 0
        """Rows in the target's cache: the drafter has seen that many hidden rows."""

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.sampling.prompt, *self.output)

    def draft_request(self, limit: int) -> DraftRequest:
        return DraftRequest(request_id=self.request_id, tokens=self.tokens, sampling=self.sampling, limit=limit)


class Bench:
    """A drafter on its made-up layer, a target, and requests that both serve."""

    def __init__(
        self,
        target: World,
        served: Sequence[Served],
        *,
        draft: World | None = None,
        mode: Verification = Verification.COUPLED,
        gives_hidden: bool = True,
        num_pages: int = 64,
        fails_at: Sequence[int] = (),
        **changes,
    ) -> None:
        self.hidden = Hidden()
        self.target, self.served, self.mode = target, list(served), mode
        self.draft = draft or target
        self.runner = NextRunner(
            self.hidden, self.logits_of, num_pages=num_pages, gives_hidden=gives_hidden, fails_at=fails_at
        )
        fields = {"max_tokens": K, "vocab": V, "prefill_chunk": 5, "verification": mode, "max_positions": None}
        self.drafter = NextNDrafter(runner=self.runner, **{**fields, **changes})

    def logits_of(self, tokens: tuple[int, ...], own: int) -> torch.Tensor:
        """A draft that is not the target sees something else after each row of its own."""
        if self.draft is self.target:
            return self.target.logits(tokens)
        return 0.6 * self.target.logits(tokens) + 0.4 * self.draft.logits((own, *tokens))

    def observe(self, piece: int = 100) -> None:
        """Show the drafter the hidden rows that it has not seen, in pieces like those of a prompt's chunks."""
        for one in self.served:
            stop = len(one.tokens) - 1
            for start in range(one.cached, stop, piece):
                end = min(stop, start + piece)
                self.drafter.observe([self.hidden.rows(one.request_id, one.tokens, start, end)])
            one.cached = stop

    def context(self, limits: Sequence[int]) -> DraftContext:
        pairs = zip(self.served, limits, strict=True)
        return DraftContext(requests=tuple(one.draft_request(limit) for one, limit in pairs if limit))

    def step(self, limits: Sequence[int] = ()) -> Proposal:
        self.observe()
        context = self.context(limits or [self.drafter.max_tokens] * len(self.served))
        with CacheTransaction([self.runner.tables]) as transaction:
            proposal = self.drafter.propose(context)
            verdict = self.verify(context, proposal)
            transaction.commit({entry.request_id: entry.keep for entry in verdict.requests})
        entries = {entry.request_id: entry for entry in verdict.requests}
        for one in self.served:
            if entry := entries.get(one.request_id):
                one.output += entry.emitted
                one.accepted.append(entry.accepted)
            else:  # it decodes plainly
                one.output += plain(self.target, one.sampling, one.output, 1)
        self.observe()
        self.drafter.commit(verdict)
        return proposal

    def verify(self, context: DraftContext, proposal: Proposal):
        rows = [
            self.target.logits((*request.tokens, *proposed[:count]))
            for request, proposed in zip(context.requests, proposal.tokens, strict=True)
            for count in range(len(proposed) + 1)
        ]
        outputs = {one.request_id: one.output for one in self.served}
        verified = [
            VerifyRequest(request_id=one.request_id, sampling=one.sampling, output=outputs[one.request_id], sink=Sink())
            for one in context.requests
        ]
        return verifier(self.mode).verify(verified, proposal, torch.stack(rows) if rows else torch.zeros(0, V))


def plain(target: World, sampling: SamplingState, output: Sequence[int], count: int) -> list[int]:
    """The next `count` tokens of plain decoding."""
    text = list(output)
    for _ in range(count):
        request = VerifyRequest(request_id=0, sampling=sampling, output=text, sink=Sink())
        logits = target.logits((*sampling.prompt, *text))[None]
        text += verifier(Verification.COUPLED).verify([request], Proposal(tokens=((),)), logits).requests[0].emitted
    return text[len(output) :]


def three(params: SamplingParams) -> list[Served]:
    return [Served(i, state(params, seed=i, prompt=range(1 + 4 * i)), first=i) for i in range(3)]


def fed(bench: Bench) -> list[tuple[Phase, int, list[int], list[tuple[int, float]], list[int]]]:
    """Per span: phase, first row, tokens, (position, owner) of each hidden row, rows with logits."""
    return [
        (
            span.phase,
            span.start,
            list(span.tokens),
            [(len(tokens) - 1, owner) for tokens, owner in map(bench.hidden.read, span.hidden)],
            list(span.logits),
        )
        for spans in bench.runner.forwards
        for span in spans
    ]


def test_row_i_joins_the_hidden_row_of_position_i_and_token_i_plus_1() -> None:
    target = World(3, V, holes=False)
    one = Served(0, state(GREEDY, prompt=(1, 2, 3)), first=4)
    bench = Bench(target, [one])
    (proposed,) = bench.step().tokens
    first, second, third = proposed
    assert list(proposed) == plain(target, one.sampling, [4], 3)
    assert fed(bench) == [
        (Phase.PREFILL, 0, [2, 3, 4], [(0, TARGET), (1, TARGET), (2, TARGET)], [2]),
        (Phase.DECODE, 3, [first], [(3, OWN)], [0]),
        (Phase.DECODE, 4, [second], [(4, OWN)], [0]),
    ]
    assert (one.accepted, one.output) == ([3], [4, first, second, third, one.output[-1]])
    bench.runner.forwards.clear()
    bench.step()
    # Rows 3 to 6 from the target: those that the draft had made of its own output are made anew.
    phase, start, tokens, hidden, logits = fed(bench)[0]
    assert (phase, start, tokens, logits) == (Phase.PREFILL, 3, [first, second, third, one.output[4]], [3])
    assert hidden == [(position, TARGET) for position in (3, 4, 5, 6)]


def test_rows_made_from_the_draft_s_own_output_are_never_kept_even_if_all_of_them_were_right() -> None:
    bench = Bench(World(3, V, holes=False), three(GREEDY))
    for _ in range(4):
        before = [len(one.tokens) for one in bench.served]
        bench.step()
        assert [one.accepted[-1] for one in bench.served] == [K] * 3
        assert [bench.runner.tables.length(one.request_id) for one in bench.served] == [n - 1 for n in before]
        bench.runner.tables.pool.check()


@pytest.mark.parametrize("mode", [Verification.COUPLED, Verification.REJECTION])
@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=0.8), ALL])
def test_a_layer_that_foresees_the_target_is_accepted_whole(
    params: SamplingParams, length: int, mode: Verification
) -> None:
    target = World(3, V, holes=False)
    served = three(params)
    bench = Bench(target, served, max_tokens=length, mode=mode)
    for _ in range(5):
        bench.step()
    for one in served:
        assert one.accepted == [length] * 5
        if mode is Verification.COUPLED:
            assert one.output == [one.output[0], *plain(target, one.sampling, one.output[:1], 5 * (length + 1))]


def test_the_proposal_depends_on_the_layer_s_own_rows() -> None:
    target, draft = World(3, V, holes=False), World(4, V, holes=False)
    one = Served(0, state(GREEDY, prompt=(1, 2)), first=4)
    bench = Bench(target, [one], draft=draft)
    text = one.tokens
    expected: list[int] = []
    for own in range(K):
        expected.append(int(bench.logits_of((*text, *expected), own).argmax()))
    assert bench.step().tokens == (tuple(expected),)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 10**6),
    st.lists(st.lists(st.integers(0, K), min_size=2, max_size=2), min_size=1, max_size=8),
    st.integers(1, 7),
    st.integers(1, 4),
    st.sampled_from([Verification.COUPLED, Verification.REJECTION]),
)
def test_after_any_outcomes_the_draft_proposes_what_a_fresh_one_would(seed, limits, chunk, piece, mode) -> None:
    target, draft = World(seed, V, holes=False), World(seed + 1, V, holes=False)
    served = [Served(index, state(ALL, seed=index, prompt=(1, 2) * (index + 1)), first=5) for index in range(2)]
    bench = Bench(target, served, draft=draft, prefill_chunk=chunk, mode=mode)
    bench.observe(piece)
    for both in limits:
        fresh = Bench(target, [], draft=draft, mode=mode)
        for one in served:
            fresh.drafter.observe([fresh.hidden.rows(one.request_id, one.tokens, 0, len(one.tokens) - 1)])
        with CacheTransaction([fresh.runner.tables]) as transaction:
            expected = fresh.drafter.propose(bench.context(both))
            transaction.commit({})
        assert_equal(bench.step(both), expected)
        bench.runner.tables.pool.check()
    if mode is Verification.COUPLED:
        for one in served:
            assert one.output == [5, *plain(target, one.sampling, [5], len(one.output) - 1)]
    assert max(bench.runner.rows_per_forward, default=0) <= chunk


def assert_equal(found: Proposal, expected: Proposal) -> None:
    assert found.tokens == expected.tokens
    assert (found.probs is None) == (expected.probs is None)
    for one, other in zip(found.probs or (), expected.probs or (), strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


def test_only_the_missing_rows_are_computed_and_never_more_than_a_chunk_at_once() -> None:
    bench = Bench(World(0, V, holes=False), [Served(0, state(GREEDY, prompt=range(7)), first=0)])
    bench.step()
    assert bench.runner.rows_per_forward == [5, 2, 1, 1]
    bench.step()
    assert bench.runner.rows_per_forward[4:] == [4, 1, 1]


def test_requests_of_different_lengths_share_forwards() -> None:
    bench = Bench(World(0, V, holes=False), three(GREEDY), prefill_chunk=100)
    bench.step([3, 1, 2])
    assert bench.runner.rows_per_forward == [1 + 5 + 9, 2, 1]
    assert [span.phase for span in bench.runner.forwards[0]] == [Phase.PREFILL, Phase.PREFILL, Phase.DECODE]


def test_under_rejection_each_token_comes_with_the_distribution_it_was_drawn_from() -> None:
    target, draft = World(5, V, holes=False), World(6, V, holes=False)
    hot = Served(0, state(SamplingParams(temperature=0.7), prompt=(1,)), first=2)
    cold = Served(1, state(GREEDY, prompt=(1,)), first=2)
    bench = Bench(target, [hot, cold], draft=draft, mode=Verification.REJECTION)
    text = hot.tokens
    proposal = bench.step()
    assert proposal.probs is not None
    found, point_mass = proposal.probs
    assert point_mass is None
    rows = [bench.logits_of((*text, *proposal.tokens[0][:count]), count) / 0.7 for count in range(K)]
    torch.testing.assert_close(found, torch.stack(rows).double().softmax(1), rtol=1e-6, atol=1e-6)


def test_a_request_without_pages_gets_no_proposal_and_the_others_get_theirs() -> None:
    small = Served(0, state(ALL, prompt=(1, 2)), first=3)
    large = Served(1, state(ALL, prompt=range(8), seed=2), first=3)
    bench = Bench(World(0, V, holes=False), [small, large], num_pages=3)
    assert [len(tokens) for tokens in bench.step().tokens] == [K, 0]
    assert not bench.runner.tables.has(1)
    bench.runner.tables.pool.check()


def test_a_request_that_had_no_pages_catches_up_when_there_are_some() -> None:
    target = World(0, V, holes=False)
    small = Served(0, state(GREEDY, prompt=(1, 2)), first=3)
    large = Served(1, state(GREEDY, prompt=range(8), seed=2), first=3)
    bench = Bench(target, [small, large], num_pages=6)
    bench.runner.tables.pool.allocate(3)
    bench.step([3, 3])
    assert bench.served[1].accepted == [0]
    bench.drafter.release([0])
    bench.runner.tables.pool.release([page for page in range(6) if bench.runner.tables.pool.owners(page)])
    bench.served.pop(0)
    bench.step()
    assert bench.served[0].accepted == [0, K]


def test_pages_that_run_out_on_the_way_shorten_the_proposal() -> None:
    one = Served(0, state(GREEDY, prompt=(1, 2, 3, 4)), first=3)
    bench = Bench(World(0, V, holes=False), [one], num_pages=2, max_tokens=5)
    assert [len(tokens) for tokens in bench.step().tokens] == [3]  # rows 0 to 3 are final, 4 and 5 its own
    assert one.accepted == [3]


def test_a_released_request_leaves_nothing_and_begins_anew_as_after_a_preemption() -> None:
    bench = Bench(World(0, V, holes=False), [Served(0, state(ALL, prompt=(1, 2, 3)), first=4)])
    bench.step()
    bench.drafter.release([0, 1])
    assert bench.runner.tables.pool.num_free == 64
    assert not bench.drafter._observed
    bench.served[0].cached = 0
    bench.step()
    assert bench.served[0].accepted == [K, K]


def test_a_failed_step_leaves_rows_and_hidden_rows_as_they_were() -> None:
    bench = Bench(World(0, V, holes=False), [Served(0, state(ALL, prompt=(1, 2, 3)), first=4)])
    bench.step()
    before = bench.runner.tables.length(0)
    with pytest.raises(KeyError), CacheTransaction([bench.runner.tables]):
        bench.drafter.propose(bench.context([K]))
        raise KeyError
    assert bench.runner.tables.length(0) == before
    bench.step()
    assert bench.served[0].accepted == [K, K]


@pytest.mark.parametrize("fails_at", range(1, 7))
def test_a_forward_of_the_draft_that_fails_can_be_repeated(fails_at: int) -> None:
    bench = Bench(World(0, V, holes=False), three(GREEDY), fails_at=[fails_at])
    failures = 0
    while len(bench.served[0].accepted) < 2:
        try:
            bench.step()
        except ArithmeticError:
            failures += 1
    assert failures == 1
    assert all(one.accepted == [K, K] for one in bench.served)


def test_hidden_rows_are_copied_and_freed_once_their_step_is_kept() -> None:
    one = Served(0, state(GREEDY, prompt=range(7)), first=1)
    bench = Bench(World(0, V, holes=False), [one])
    given = bench.hidden.rows(0, one.tokens, 0, 7)
    bench.drafter.observe([given])
    given.rows.fill_(-1)
    one.cached = 7
    bench.step()
    assert one.accepted == [K]
    (kept,) = bench.drafter._observed[0]._pieces
    assert len(kept) == K + 1  # of the step's own rows, which the next proposal needs


def test_hidden_rows_of_plain_steps_wait_for_the_next_proposal() -> None:
    bench = Bench(World(0, V, holes=False), three(GREEDY))
    bench.step()
    for _ in range(3):
        bench.step([0, K, 0])
    bench.runner.forwards.clear()
    bench.step()
    assert bench.runner.rows_per_forward == [5, 5, 5, 3, 3, 3]  # 4 + 3, 4 and 4 + 3 rows in all, then its own
    assert all(set(one.accepted) == {K} for one in bench.served)


def test_missing_hidden_rows_are_an_error_that_names_them() -> None:
    one = Served(7, state(GREEDY, prompt=(1, 2, 3)), first=4)
    bench = Bench(World(0, V, holes=False), [one])
    one.cached = 3
    with pytest.raises(RuntimeError, match="request 7: hidden rows 0 to 2 are needed, and 0 to -1 are there"):
        bench.step()
    bench.drafter.observe([bench.hidden.rows(7, one.tokens, 0, 2)])
    with pytest.raises(RuntimeError, match="request 7: hidden rows 0 to 2 are needed, and 0 to 1 are there"):
        bench.step()


def test_a_gap_between_hidden_rows_is_an_error() -> None:
    bench = Bench(World(0, V, holes=False), [])
    bench.drafter.observe([bench.hidden.rows(0, (1, 2, 3, 4), 0, 2)])
    with pytest.raises(RuntimeError, match="request 0: hidden rows from 3 on follow those up to 2"):
        bench.drafter.observe([bench.hidden.rows(0, (1, 2, 3, 4), 3, 4)])


def test_one_token_per_proposal_needs_no_hidden_rows_of_the_draft_and_more_do() -> None:
    one = Served(0, state(GREEDY, prompt=(1, 2, 3)), first=4)
    bench = Bench(World(0, V, holes=False), [one], gives_hidden=False, max_tokens=1)
    bench.step()
    assert one.accepted == [1]
    bench = Bench(World(0, V, holes=False), three(GREEDY), gives_hidden=False)
    with pytest.raises(RuntimeError, match="gave no hidden rows to go on from"):
        bench.step()


def test_a_proposal_ends_with_a_token_that_ends_the_request() -> None:
    world = World(0, V, holes=False)
    world.logits = lambda prefix: torch.nn.functional.one_hot(torch.tensor((prefix[-1] + 1) % V), V).float()
    one = Served(0, state(GREEDY, stop_ids=frozenset({4})), first=2)
    assert Bench(world, [one]).step().tokens == ((3, 4),)


@pytest.mark.parametrize(("limit", "lengths"), [(None, [K, K]), (6, [3, 0]), (4, [1, 0]), (3, [0, 0])])
def test_nothing_is_proposed_beyond_the_positions_that_the_draft_was_trained_for(
    limit: int | None, lengths: list[int]
) -> None:
    served = [Served(0, state(GREEDY), first=3)]  # three tokens so far
    bench = Bench(World(0, V, holes=False), served, max_positions=limit)
    found = [len(bench.step().tokens[0]) for _ in range(2)]
    assert found == lengths


def test_drafting_needs_no_prefill_call_but_the_target_s_hidden_rows() -> None:
    drafter = Bench(World(0, V, holes=False), []).drafter
    assert drafter.prefill(DraftContext(requests=())) is None
    assert drafter.needs_hidden
