"""Lengths against every combination tried by hand, and what a policy must never do."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from proa.kernels.cost import CostTable
from proa.sampling.params import SamplingParams
from proa.speculative.acceptance import Acceptance
from proa.speculative.draft_length import (
    LOOK_EVERY,
    PROBE_AFTER,
    QUIET_AFTER,
    WINDOW,
    FixedLengths,
    MeasuredLengths,
    Step,
    StepCosts,
    best_lengths,
)
from proa.speculative.protocol import DraftContext, DraftRequest, Proposal, RequestVerdict, Verdict
from tests.speculative.worlds import state

LONGEST = 6
FLAT = CostTable(rows=(1, 64), seconds=(1.0, 1.0))
NATIVE = CostTable(rows=(1, 4, 8, 16, 32), seconds=(1.0, 1.1, 1.3, 1.75, 2.8))
LINEAR = CostTable(rows=(1, 64), seconds=(1.0, 64.0))
CHEAP_DRAFT = CostTable(rows=(1, 64), seconds=(0.1, 0.2))
DEAR_DRAFT = CostTable(rows=(1, 64), seconds=(0.9, 0.9))
ONE = Step(decoding=1, prefill=0)

tables = st.lists(st.floats(0, 1), min_size=4, max_size=4).map(
    lambda steps: CostTable(rows=(1, 4, 8, 32), seconds=tuple(1 + sum(steps[: i + 1]) for i in range(4)))
)


def policy(
    target: CostTable, draft: CostTable | None = None, note: Callable[[str], None] = lambda text: None
) -> MeasuredLengths:
    return MeasuredLengths(
        longest=LONGEST, costs=StepCosts(target=target, draft=draft), prior=(0.4, 0.6, 0.8), note=note
    )


def by_trying(survival: Sequence[Sequence[float]], step: Step, costs: StepCosts) -> float:
    """The best rate over every combination of lengths."""
    rates: list[float] = []
    for lengths in itertools.product(*(range(len(row) + 1) for row in survival)):
        tokens = step.decoding + sum(sum(row[:length]) for row, length in zip(survival, lengths, strict=True))
        drafting = sum(
            costs.draft.of(sum(length >= depth for length in lengths)) if costs.draft else 0
            for depth in range(1, max(lengths, default=0) + 1)
        )
        rows = step.decoding + step.prefill
        verify = costs.target.of(rows + sum(lengths)) - costs.target.of(rows) + costs.target.of(step.decoding)
        rates.append(tokens / (verify + drafting))
    return max(rates)


@given(
    st.lists(st.lists(st.floats(0.06, 1), max_size=4), min_size=1, max_size=3),
    tables,
    st.sampled_from([None, CostTable(rows=(1,), seconds=(0.05,))]),
    st.integers(0, 3),
    st.integers(0, 20),
)
def test_no_combination_of_lengths_is_better(chances, target, draft, others, prefill) -> None:
    survival = [list(itertools.accumulate(row, lambda a, b: a * b)) for row in chances]
    survival = [[chance for chance in row if chance >= 0.05] for row in survival]
    step = Step(decoding=len(survival) + others, prefill=prefill)
    costs = StepCosts(target=target, draft=draft)
    lengths = best_lengths(survival, step, costs)
    assert all(0 <= length <= len(row) for length, row in zip(lengths, survival, strict=True))
    chosen = by_trying([row[:length] for row, length in zip(survival, lengths, strict=True)], step, costs)
    wanted = by_trying(survival, step, costs)
    # A draft pays for the deepest proposal and not for each token, so there the likeliest first is only nearly best.
    assert chosen == pytest.approx(wanted) if draft is None else chosen >= 0.95 * wanted


@pytest.mark.parametrize(
    ("chances", "target", "draft", "decoding", "lengths"),
    [
        # On paper, one request: plain 1 per s; 1 token 1.9/1.033; ... 7 tokens (1-0.9^8)/0.1 = 5.70 per 1.3 s.
        ([[0.9**n for n in range(1, 8)]], NATIVE, None, 1, [7]),
        ([[0.5, 0.25, 0.125, 0.0625]], NATIVE, None, 1, [3]),  # 1.875/1.1 = 1.705 against 1.9375/1.15 = 1.685
        ([[0.02, 0.02]], NATIVE, None, 1, [0]),
        ([[0.02, 0.02]], FLAT, None, 1, [0]),  # below what a row costs outside of the forward
        ([[1.0] * 4], LINEAR, None, 1, [0]),  # five times the rows in five times the time is no gain
        ([[1.0] * 4], FLAT, None, 1, [4]),
        ([[0.7, 0.49]], NATIVE, DEAR_DRAFT, 1, [0]),  # 1.7/(1.033 + 0.9) < 1
        ([[0.7, 0.49]], NATIVE, CHEAP_DRAFT, 1, [2]),
        # Eight requests: the ninth row costs 0.056 and must bring a share of it, 8 tokens in 1.3 s.
        ([[0.3], [0.9, 0.8]], NATIVE, None, 8, [0, 2]),
        ([], NATIVE, None, 3, []),
    ],
)
def test_lengths_on_paper(chances, target, draft, decoding, lengths) -> None:
    step = Step(decoding=decoding, prefill=0)
    assert best_lengths(chances, step, StepCosts(target=target, draft=draft)) == lengths


def test_prompt_rows_beside_the_step_are_not_taken_for_a_cost_of_its_tokens() -> None:
    """Plain decoding of one request in a step that prefills 500 rows is not 500 times as slow; extra rows are dear."""
    costs = StepCosts(target=NATIVE, draft=None)
    assert best_lengths([[0.05]], Step(decoding=1, prefill=500), costs) == [0]
    assert costs.verify(Step(decoding=1, prefill=500), 0) == pytest.approx(1.0)


def context(tokens: Sequence[int], limit: int, request_id: int = 0) -> DraftContext:
    return DraftContext(
        requests=(DraftRequest(request_id=request_id, tokens=tokens, sampling=state(SamplingParams()), limit=limit),)
    )


def decide(lengths: MeasuredLengths | FixedLengths, proposed: Sequence[int], kind: int = 1, request_id: int = 0) -> int:
    """The length of one step with one request, whoever drafts."""
    limit = lengths.limits({request_id: len(proposed)}, ONE)[request_id]
    proposal = Proposal(tokens=(tuple(proposed[:limit]),), evidence=(kind,))
    return len(lengths.cut(context([1], limit, request_id), proposal, ONE).tokens[0]) if limit else 0


def judged(proposed: int, accepted: int, request_id: int = 0, *, finished: bool = False) -> Verdict:
    emitted = tuple(range(accepted if finished else accepted + 1))
    entry = RequestVerdict(
        request_id=request_id,
        proposed=proposed,
        accepted=accepted,
        emitted=emitted,
        keep=len(emitted),
        finished=finished,
        logprobs=(),
    )
    return Verdict(requests=(entry,))


def play(lengths: MeasuredLengths, steps: int, right: Callable[[int, int], int]) -> list[int]:
    """Steps of one request; `right(step, proposed)` tokens of a proposal are accepted."""
    chosen: list[int] = []
    for number in range(steps):
        chosen.append(decide(lengths, range(LONGEST)))
        lengths.record(judged(chosen[-1], min(right(number, chosen[-1]), chosen[-1])))
    return chosen


DRAFTS = (None, CHEAP_DRAFT)


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("target", [FLAT, NATIVE])
def test_where_nothing_is_accepted_it_ends_in_plain_decoding_with_ever_rarer_tries(target, draft) -> None:
    chosen = play(policy(target, draft), 2000, lambda number, proposed: 0)
    tries = [number for number, length in enumerate(chosen) if length]
    assert set(chosen[200:]) == {0, 1} and sum(chosen[200:]) <= 5
    gaps = [later - earlier for earlier, later in itertools.pairwise(tries[-4:])]
    slack = 1 if draft else 2 * LOOK_EVERY  # a text with nothing to propose is looked at in every fourth step
    assert all(later == pytest.approx(2 * earlier, abs=slack) for earlier, later in itertools.pairwise(gaps))


def test_a_text_in_which_nothing_is_found_is_looked_at_in_every_fourth_step() -> None:
    lengths = policy(NATIVE)

    def looks(steps: int) -> list[bool]:
        asked: list[bool] = []
        for _ in range(steps):
            asked.append(lengths.limits({0: LONGEST, 1: 0}, ONE) == {0: LONGEST, 1: 0})
            lengths.record(judged(0, 0))
        return asked

    assert looks(QUIET_AFTER) == [True] * QUIET_AFTER
    assert looks(8) == [True, False, False, False] * 2
    lengths.record(judged(2, 1))  # found something after all
    assert looks(QUIET_AFTER) == [True] * QUIET_AFTER
    with_model = policy(NATIVE, CHEAP_DRAFT)
    first = with_model.limits({0: LONGEST}, ONE)
    assert first[0] > 0
    for _ in range(3 * QUIET_AFTER):  # whether a model runs is decided by its cost alone
        assert with_model.limits({0: LONGEST}, ONE) == first
        with_model.record(judged(0, 0))


@pytest.mark.parametrize("draft", DRAFTS)
def test_where_everything_is_accepted_it_goes_to_the_longest(draft) -> None:
    assert set(play(policy(FLAT, draft), 60, lambda number, proposed: proposed)[30:]) == {LONGEST}


def test_what_cannot_pay_is_never_tried() -> None:
    assert set(play(policy(LINEAR), 500, lambda number, proposed: proposed)) == {0}
    assert set(play(policy(NATIVE, DEAR_DRAFT), 300, lambda number, proposed: 0)[40:]) >= {0}


def test_a_try_that_proves_right_brings_proposals_back() -> None:
    lengths = policy(NATIVE)
    play(lengths, 100, lambda number, proposed: 0)
    chosen = play(lengths, 3000, lambda number, proposed: proposed)
    assert chosen[0] == 0 and set(chosen[-50:]) == {LONGEST}


def test_a_try_comes_after_so_many_zeros_and_is_one_token_of_one_request() -> None:
    lengths = policy(NATIVE)
    for _ in range(40):  # both requests learn that nothing is accepted
        for key in (0, 1):
            if length := decide(lengths, range(LONGEST), request_id=key):
                lengths.record(judged(length, 0, key))
    rows: list[list[int]] = []
    for _ in range(PROBE_AFTER + 3):
        lengths.limits({0: 3, 1: 3}, Step(decoding=2, prefill=0))
        both = DraftContext(requests=context([1], 3, 0).requests + context([1], 3, 1).requests)
        made = Proposal(tokens=((1, 2, 3), (4, 5, 6)), evidence=(1, 1))
        rows.append([len(tokens) for tokens in lengths.cut(both, made, Step(decoding=2, prefill=0)).tokens])
        lengths.record(Verdict(requests=tuple(judged(n, 0, key).requests[0] for key, n in enumerate(rows[-1]))))
    assert sum(map(sum, rows)) == 1


@given(st.lists(st.integers(0, LONGEST), max_size=30), st.integers(0, 9), st.sampled_from(DRAFTS), tables)
def test_a_length_never_exceeds_what_is_of_use(outcomes, useful, draft, target) -> None:
    lengths = policy(target, draft)
    for right in outcomes:
        chosen = decide(lengths, range(useful))
        assert 0 <= chosen <= min(useful, LONGEST)
        lengths.record(judged(chosen, min(right, chosen)))


@given(
    st.lists(st.integers(0, LONGEST), min_size=1, max_size=30),
    st.lists(st.lists(st.integers(0, 99), min_size=LONGEST, max_size=LONGEST), min_size=30, max_size=30),
    st.sampled_from(DRAFTS),
    st.data(),
)
def test_a_decision_reads_no_token_and_no_later_outcome(outcomes, tokens, draft, data) -> None:
    """Two runs with the same outcomes up to a step and anything after it, over different proposed tokens."""
    same = data.draw(st.integers(0, len(outcomes)))
    other = outcomes[:same] + data.draw(
        st.lists(st.integers(0, LONGEST), min_size=len(outcomes) - same, max_size=len(outcomes) - same)
    )
    runs: list[list[int]] = []
    for rights, ids in ((outcomes, tokens), (other, tokens[::-1])):
        lengths, chosen = policy(NATIVE, draft), []
        for right, proposed in zip(rights, ids, strict=False):
            chosen.append(decide(lengths, proposed))
            lengths.record(judged(chosen[-1], min(right, chosen[-1])))
        runs.append(chosen)
    assert runs[0][: same + 1] == runs[1][: same + 1]


@given(st.lists(st.integers(0, LONGEST), max_size=40), st.sampled_from(DRAFTS))
def test_a_step_that_failed_is_answered_the_same_when_it_is_asked_again(outcomes, draft) -> None:
    once, again = policy(NATIVE, draft), policy(NATIVE, draft)
    for right in outcomes:
        chosen = decide(once, range(LONGEST))
        assert [decide(again, range(LONGEST)) for _ in range(3)] == [chosen] * 3
        for lengths in (once, again):
            lengths.record(judged(chosen, min(right, chosen)))


def test_a_new_request_starts_from_what_the_others_taught() -> None:
    lengths = policy(NATIVE)
    first = decide(lengths, range(LONGEST), request_id=7)
    for _ in range(60):
        lengths.record(judged(decide(lengths, range(LONGEST)), 0))
    assert decide(lengths, range(LONGEST), request_id=8) < first
    lengths.release([0])
    assert decide(lengths, range(LONGEST), request_id=0) < first  # forgotten itself, but not by the estimate of all


def test_evidence_of_one_kind_says_nothing_about_another() -> None:
    lengths = policy(NATIVE)
    for _ in range(50):
        length = decide(lengths, [5], kind=1)
        lengths.record(judged(length, 0))
    assert decide(lengths, [5], kind=1) == 0
    chosen = []
    for _ in range(LOOK_EVERY):
        chosen.append(decide(lengths, range(LONGEST), kind=3))
        lengths.record(judged(0, 0))
    assert max(chosen) > 1


def test_probabilities_are_cut_with_their_tokens() -> None:
    lengths = policy(NATIVE)
    for _ in range(30):
        lengths.record(judged(decide(lengths, range(LONGEST)), 1))
    lengths.limits({0: 4}, ONE)
    proposal = Proposal(tokens=((1, 2, 3, 4),), probs=(torch.eye(4),), evidence=(1,))
    kept = lengths.cut(context([1], 4), proposal, ONE)
    assert 0 < len(kept.tokens[0]) < 4
    assert kept.probs is not None and kept.probs[0] is not None and len(kept.probs[0]) == len(kept.tokens[0])


def test_it_is_said_once_when_speculation_does_not_pay() -> None:
    notes: list[str] = []
    lengths = policy(LINEAR, note=notes.append)
    play(lengths, WINDOW - LOOK_EVERY, lambda number, proposed: 0)  # each look stands for so many steps
    assert not notes and lengths.metrics()["pays"]
    play(lengths, 3 * WINDOW, lambda number, proposed: 0)
    assert len(notes) == 1 and notes[0].startswith("speculative/does-not-pay: ") and LINEAR.digest[:8] in notes[0]
    assert not lengths.metrics()["pays"]


def test_where_it_pays_nothing_is_said() -> None:
    notes: list[str] = []
    play(policy(NATIVE, note=notes.append), 300, lambda number, proposed: proposed)
    assert not notes


def test_metrics_count_decisions() -> None:
    lengths = policy(FLAT)
    for right in (6, 6, 0):
        lengths.record(judged(decide(lengths, range(6)), right))
    lengths.record(judged(decide(lengths, range(2)), 2))
    found = lengths.metrics()
    assert found["histogram"] == [0, 0, 1, 0, 0, 0, 3] and found["mean"] == 20 / 4
    assert (found["mode"], found["longest"], found["probes"], found["pays"]) == ("measured", 6, 0, True)
    assert found["costs"] == {"target": FLAT.digest, "draft": None}
    assert FixedLengths(3).metrics() == {"mode": "fixed", "longest": 3}


def test_a_fixed_length_stays_whatever_is_accepted() -> None:
    lengths = FixedLengths(4)
    for right in (0, 0, 4, 0):
        assert decide(lengths, range(9)) == 4
        lengths.record(judged(4, right))
    assert decide(lengths, range(2)) == 2


def test_acceptance_on_paper() -> None:
    shared = Acceptance((0.5, 0.8), above=None, weight=2, memory=100)
    own = Acceptance((0.5, 0.8), above=shared, weight=1, memory=100)
    assert own.chance(1) == 0.5 and own.chance(2) == own.chance(9) == 0.8
    # Of a proposal with evidence 1, two were right and the third wrong: kind 1 right, kind 2 right and wrong.
    for one in (shared, own):
        one.record(1, accepted=2, is_rejected=True)
    assert shared.chance(1) == pytest.approx((1 + 2 * 0.5) / 3)
    assert shared.chance(2) == pytest.approx((1 + 2 * 0.8) / 4)
    assert own.chance(2) == pytest.approx((1 + 1 * 2.6 / 4) / 3)
    assert own.survival(1, 3) == pytest.approx(
        [own.chance(1), own.chance(1) * own.chance(2), own.chance(1) * own.chance(2) ** 2]
    )


def test_old_outcomes_fade() -> None:
    lasting, fading = (Acceptance((0.5,), above=None, weight=1, memory=memory) for memory in (10**6, 20))
    for accepted in [1] * 200 + [0] * 40:
        for one in (lasting, fading):
            one.record(1, accepted=accepted, is_rejected=not accepted)
    assert lasting.chance(1) > 0.8 and fading.chance(1) < 0.2


def test_an_end_within_accepted_tokens_is_no_rejection() -> None:
    """The request ended with the second of four right tokens: nothing was wrong."""
    ended, rejected = policy(NATIVE), policy(NATIVE)
    for lengths, verdict in ((ended, judged(4, 2, finished=True)), (rejected, judged(4, 2))):
        for _ in range(20):
            lengths.limits({0: 4}, ONE)
            lengths.cut(context([1], 4), Proposal(tokens=((1, 2, 3, 4),), evidence=(1,)), ONE)
            lengths.record(verdict)
    assert decide(ended, range(LONGEST)) > decide(rejected, range(LONGEST))
