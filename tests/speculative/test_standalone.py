"""Drafting with a model of its own, over a made-up runner that reads its history back from the cache it wrote."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from proa.cache.pages import PagePool
from proa.cache.tables import BlockTables
from proa.cache.transaction import CacheTransaction
from proa.kernels.reference.sample import ReferenceSample
from proa.runner.batch import ForwardOutput, RowSpan
from proa.sampling.params import SamplingParams
from proa.sampling.state import SamplingState
from proa.speculative.drafters.standalone import StandaloneDrafter
from proa.speculative.protocol import DraftContext, DraftRequest, Proposal, Verdict
from proa.speculative.verify import VerifyRequest
from proa.units import Phase, Verification
from tests.speculative.worlds import Sink, World, state, verifier

V, K, PAGE = 8, 4, 3


class CacheRunner:
    """Logits of a row are the world's after the tokens that lie in the request's pages: a wrong row, wrong logits."""

    states = None
    kernels = ReferenceSample()

    def __init__(self, world: World, num_pages: int = 64) -> None:
        self.tables = BlockTables(PagePool(num_pages), PAGE)
        self.world = world
        self.cache = [-1] * (num_pages * PAGE)
        self.rows_per_forward: list[int] = []

    def forward(self, spans: Sequence[RowSpan]) -> ForwardOutput:
        phases = [span.phase for span in spans]
        assert phases == sorted(phases, key=lambda phase: phase is Phase.DECODE)
        self.rows_per_forward.append(sum(len(span.tokens) for span in spans))
        logits = []
        for span in spans:
            rows = [span.pages[row // PAGE] * PAGE + row % PAGE for row in range(span.start + len(span.tokens))]
            for row, token in zip(rows[span.start :], span.tokens, strict=True):
                self.cache[row] = token
            for index in span.logits:
                logits.append(self.world.logits(tuple(self.cache[row] for row in rows[: span.start + index + 1])))
        return ForwardOutput(logits=torch.stack(logits) if logits else torch.zeros(0, self.world.vocab))


def drafter_on(runner: CacheRunner, **changes) -> StandaloneDrafter:
    fields = {
        "max_tokens": K,
        "draft_vocab": V,
        "vocab": V,
        "prefill_chunk": 5,
        "verification": Verification.COUPLED,
    }
    return StandaloneDrafter(runner=runner, **{**fields, **changes})


class Served:
    """One request as an engine would serve it: its tokens, and one step of drafting and verifying."""

    def __init__(self, request_id: int, sampling: SamplingState, first: int) -> None:
        self.request_id = request_id
        self.sampling = sampling
        self.output = [first]
        self.accepted: list[int] = []

    def draft_request(self, limit: int = K) -> DraftRequest:
        tokens = (*self.sampling.prompt, *self.output)
        return DraftRequest(request_id=self.request_id, tokens=tokens, sampling=self.sampling, limit=limit)


def step(
    drafter: StandaloneDrafter,
    runner: CacheRunner,
    target: World,
    served: Sequence[Served],
    mode: Verification = Verification.COUPLED,
    limits: Sequence[int] = (),
) -> Proposal:
    requests = [one.draft_request(limit) for one, limit in zip(served, limits or [K] * len(served), strict=True)]
    with CacheTransaction([runner.tables]) as transaction:
        proposal = drafter.propose(DraftContext(requests=tuple(requests)))
        rows = [
            target.logits((*request.tokens, *proposed[:count]))
            for request, proposed in zip(requests, proposal.tokens, strict=True)
            for count in range(len(proposed) + 1)
        ]
        verified = [
            VerifyRequest(request_id=one.request_id, sampling=one.sampling, output=one.output, sink=Sink())
            for one in served
        ]
        verdict = verifier(mode).verify(verified, proposal, torch.stack(rows))
        transaction.commit({entry.request_id: entry.keep for entry in verdict.requests})
    for one, entry in zip(served, verdict.requests, strict=True):
        one.output += entry.emitted
        one.accepted.append(entry.accepted)
    drafter.commit(verdict)
    return proposal


def plain(target: World, sampling: SamplingState, first: int, count: int) -> list[int]:
    output = [first]
    while len(output) < count:
        request = VerifyRequest(request_id=0, sampling=sampling, output=output, sink=Sink())
        logits = target.logits((*sampling.prompt, *output))[None]
        output += verifier(Verification.COUPLED).verify([request], Proposal(tokens=((),)), logits).requests[0].emitted
    return output


ALL = SamplingParams(
    temperature=0.9,
    repetition_penalty=1.3,
    presence_penalty=0.5,
    frequency_penalty=0.3,
    min_p=0.05,
    logit_bias={2: 1.0},
)


@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SamplingParams(), ALL])
def test_a_draft_equal_to_the_target_is_accepted_whole(params: SamplingParams) -> None:
    target = World(3, V, holes=False)
    runner = CacheRunner(target)
    served = [Served(index, state(params, seed=index, prompt=range(index + 1)), first=index) for index in range(3)]
    drafter = drafter_on(runner)
    for _ in range(5):
        step(drafter, runner, target, served)
    for one in served:
        assert one.accepted == [K] * 5
        assert one.output == plain(target, one.sampling, one.output[0], 1 + 5 * (K + 1))


class Between(World):
    """A target that agrees with the draft now and then."""

    def __init__(self, draft: World, seed: int) -> None:
        super().__init__(seed, draft.vocab, holes=False)
        self.draft = draft

    def logits(self, prefix: tuple[int, ...]) -> torch.Tensor:
        return 0.6 * self.draft.logits(prefix) + 0.4 * super().logits(prefix)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 10**6),
    st.lists(st.lists(st.integers(0, K), min_size=2, max_size=2), min_size=1, max_size=8),
    st.integers(1, 7),
)
def test_after_any_outcomes_the_draft_proposes_what_a_fresh_one_would(seed, limits, chunk) -> None:
    draft = World(seed, V, holes=False)
    target, runner = Between(draft, seed + 1), CacheRunner(draft)
    drafter = drafter_on(runner, prefill_chunk=chunk)
    served = [Served(index, state(ALL, seed=index, prompt=(1, 2) * (index + 1)), first=5) for index in range(2)]
    for both in limits:
        fresh_runner = CacheRunner(draft)
        fresh = drafter_on(fresh_runner)
        context = DraftContext(requests=tuple(one.draft_request(n) for one, n in zip(served, both, strict=True)))
        with CacheTransaction([fresh_runner.tables]) as transaction:
            expected = fresh.propose(context)
            transaction.commit({})
        assert step(drafter, runner, target, served, limits=both) == expected
        for one in served:
            assert runner.tables.length(one.request_id) <= len(one.sampling.prompt) + len(one.output) - 1
        runner.tables.pool.check()
    for one in served:
        assert one.output == plain(target, one.sampling, 5, len(one.output))
    assert max(runner.rows_per_forward, default=0) <= chunk


def test_only_the_missing_rows_are_computed() -> None:
    world = World(0, V, holes=False)
    runner = CacheRunner(world)
    drafter = drafter_on(runner, prefill_chunk=100)
    one = Served(0, state(SamplingParams(temperature=0), prompt=range(7)), first=0)
    step(drafter, runner, world, [one])
    assert runner.rows_per_forward == [8, 1, 1, 1]
    step(drafter, runner, world, [one])
    # All accepted: the row of the last proposed token is missing, and the bonus token is the new anchor.
    assert runner.rows_per_forward[4:] == [2, 1, 1, 1]


def test_a_request_without_pages_gets_no_proposal_and_the_others_get_theirs() -> None:
    world = World(0, V, holes=False)
    runner = CacheRunner(world, num_pages=3)
    drafter = drafter_on(runner)
    small = Served(0, state(ALL, prompt=(1, 2)), first=3)
    large = Served(1, state(ALL, prompt=range(8), seed=2), first=3)
    proposal = step(drafter, runner, world, [small, large])
    assert [len(tokens) for tokens in proposal.tokens] == [K, 0]
    assert not runner.tables.has(1)
    runner.tables.pool.check()


def test_pages_that_run_out_on_the_way_shorten_the_proposal() -> None:
    world = World(0, V, holes=False)
    runner = CacheRunner(world, num_pages=2)
    one = Served(0, state(SamplingParams(temperature=0), prompt=(1, 2, 3, 4)), first=3)
    assert [len(tokens) for tokens in step(drafter_on(runner), runner, world, [one]).tokens] == [2]
    assert one.accepted == [2]


def test_a_released_request_is_drafted_from_the_start_again() -> None:
    world = World(0, V, holes=False)
    runner = CacheRunner(world)
    drafter = drafter_on(runner)
    one = Served(0, state(ALL, prompt=(1, 2, 3)), first=4)
    step(drafter, runner, world, [one])
    drafter.release([0, 1])
    assert runner.tables.pool.num_free == 64
    step(drafter, runner, world, [one])
    assert one.accepted == [K, K]


def test_a_failed_step_leaves_the_draft_s_rows_as_they_were() -> None:
    world = World(0, V, holes=False)
    runner = CacheRunner(world)
    drafter = drafter_on(runner)
    one = Served(0, state(ALL, prompt=(1, 2, 3)), first=4)
    step(drafter, runner, world, [one])
    before = runner.tables.length(0)
    with pytest.raises(KeyError), CacheTransaction([runner.tables]):
        drafter.propose(DraftContext(requests=(one.draft_request(),)))
        raise KeyError
    assert runner.tables.length(0) == before
    step(drafter, runner, world, [one])
    assert one.accepted == [K, K]


def test_logits_beyond_the_common_vocabulary_are_never_proposed() -> None:
    draft = World(0, V + 3, holes=False)
    draft.logits = lambda prefix: torch.arange(V + 3).float()  # the best tokens are those that the target lacks
    runner = CacheRunner(draft)
    one = Served(0, state(SamplingParams(temperature=0)), first=1)
    assert step(drafter_on(runner), runner, World(0, V, holes=False), [one]).tokens == ((V - 1,) * K,)


def test_a_request_with_a_token_that_the_draft_does_not_know_gets_no_proposal() -> None:
    world = World(0, V, holes=False)
    runner = CacheRunner(world)
    one = Served(0, state(SamplingParams(temperature=0), prompt=(1, V - 1)), first=1)
    assert step(drafter_on(runner, draft_vocab=V - 1), runner, world, [one]).tokens == ((),)
    assert runner.rows_per_forward == []


def test_a_proposal_ends_with_a_token_that_ends_the_request() -> None:
    world = World(0, V, holes=False)
    world.logits = lambda prefix: torch.nn.functional.one_hot(torch.tensor((prefix[-1] + 1) % V), V).float()
    runner = CacheRunner(world)
    one = Served(0, state(SamplingParams(temperature=0), stop_ids=frozenset({4})), first=2)
    assert step(drafter_on(runner), runner, world, [one]).tokens == ((3, 4),)


def test_a_row_with_nothing_to_draw_ends_the_proposal() -> None:
    world = World(0, V, holes=False)
    runner = CacheRunner(world)
    one = Served(0, state(SamplingParams(allowed_token_ids=[V - 1])), first=1)
    assert step(drafter_on(runner, draft_vocab=V - 1), runner, world, [one]).tokens == ((),)


def test_under_rejection_each_token_comes_with_the_distribution_it_was_drawn_from() -> None:
    draft = World(5, V - 2, holes=False)
    runner = CacheRunner(draft)
    drafter = drafter_on(runner, draft_vocab=V - 2, verification=Verification.REJECTION)
    hot = Served(0, state(SamplingParams(temperature=0.7), prompt=(1,)), first=2)
    cold = Served(1, state(SamplingParams(temperature=0), prompt=(1,)), first=2)
    proposal = step(drafter, runner, World(6, V, holes=False), [hot, cold], Verification.REJECTION)
    assert proposal.probs is not None
    q, point_mass = proposal.probs
    assert point_mass is None
    prefixes = [(1, 2, *proposal.tokens[0][:count]) for count in range(K)]
    expected = torch.stack([(draft.logits(prefix) / 0.7).double().softmax(0) for prefix in prefixes])
    torch.testing.assert_close(q[:, : V - 2], expected, rtol=1e-6, atol=1e-6)
    assert q[:, V - 2 :].abs().max() == 0


def test_drafting_needs_no_prefill_call() -> None:
    assert drafter_on(CacheRunner(World(0, V, holes=False))).prefill(DraftContext(requests=())) is None


def test_a_drafter_equal_to_the_target_is_always_accepted_under_rejection() -> None:
    world = World(5, V, holes=False)
    runner = CacheRunner(world)
    drafter = drafter_on(runner, verification=Verification.REJECTION)
    one = Served(0, state(SamplingParams()), first=2)
    for _ in range(10):
        step(drafter, runner, world, [one], Verification.REJECTION)
    assert one.accepted == [K] * 10
    assert drafter.commit(Verdict(requests=())) is None


@pytest.mark.parametrize(("limit", "lengths"), [(None, [K, K]), (6, [3, 0]), (4, [1, 0]), (3, [0, 0]), (2, [0, 0])])
def test_nothing_is_proposed_beyond_the_positions_that_the_draft_was_trained_for(
    limit: int | None, lengths: list[int]
) -> None:
    world = World(0, V, holes=False)
    runner = CacheRunner(world)
    drafter = drafter_on(runner, max_positions=limit)
    served = [Served(0, state(SamplingParams(temperature=0)), first=3)]  # three tokens so far
    found = [len(step(drafter, runner, world, served).tokens[0]) for _ in range(2)]
    assert found == lengths
