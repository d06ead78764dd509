"""The n-gram drafter against a search that tries every suffix at every place."""

from __future__ import annotations

import time
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from proa.sampling.params import SamplingParams
from proa.speculative.drafters.ngram import NgramDrafter
from proa.speculative.protocol import DraftContext, DraftRequest, Verdict
from tests.speculative.worlds import state

STATE = state(SamplingParams())


def request(tokens, limit: int = 4, request_id: int = 0) -> DraftRequest:
    return DraftRequest(request_id=request_id, tokens=tuple(tokens), sampling=STATE, limit=limit)


def drafter(max_tokens: int = 4, min_match: int = 2, max_match: int = 5) -> NgramDrafter:
    return NgramDrafter(max_tokens=max_tokens, min_match=min_match, max_match=max_match)


def propose(one: NgramDrafter, *requests: DraftRequest) -> tuple[tuple[int, ...], ...]:
    proposal = one.propose(DraftContext(requests=requests))
    assert proposal.probs is None
    return proposal.tokens


def by_trying(tokens: list[int], limit: int, min_match: int, max_match: int) -> tuple[int, ...]:
    for length in range(min(max_match, len(tokens) - 1), min_match - 1, -1):
        ends = [end for end in range(length, len(tokens)) if tokens[end - length : end] == tokens[-length:]]
        if ends:
            votes = Counter(tokens[end] for end in ends)
            end = max(end for end in ends if votes[tokens[end]] == max(votes.values()))
            text = list(tokens)
            for index in range(limit):
                text.append(text[end + index])
            return tuple(text[len(tokens) :])
    return ()


@given(st.lists(st.integers(0, 2), min_size=1, max_size=40), st.integers(1, 3), st.integers(0, 3), st.integers(0, 6))
def test_a_proposal_continues_the_longest_match_as_it_mostly_went_on(tokens, min_match, more, limit) -> None:
    one = drafter(6, min_match, min_match + more)
    # The same answer whether the text came at once or token by token.
    at_once = propose(one, request(tokens, limit))
    step_by_step = [propose(one, request(tokens[: stop + 1], limit, 1)) for stop in range(len(tokens))][-1]
    assert at_once == step_by_step == (by_trying(tokens, limit, min_match, min_match + more),)


def test_cases_on_paper() -> None:
    one = drafter()
    assert propose(one, request([1, 2, 3, 9, 1, 2], request_id=1)) == ((3, 9, 1, 2),)
    assert propose(one, request([1, 2, 3, 1, 2, 4, 1, 2], 1, request_id=2)) == ((4,),)  # the most recent
    often = [1, 2, 3, 8, 1, 2, 3, 9, 1, 2, 4, 1, 2]
    assert propose(one, request(often, 2, request_id=7)) == ((3, 9),)  # the most frequent, and its most recent place
    assert propose(one, request([5, 1, 2, 3, 6, 1, 2, 4, 5, 1, 2], 1, request_id=3)) == ((3,),)  # the longest
    assert propose(one, request([7, 8, 7, 8], request_id=4)) == ((7, 8, 7, 8),)  # a loop goes on
    assert propose(one, request([1, 2, 3], request_id=5)) == ((),)
    assert propose(one, request([1, 2, 1, 2], 0, request_id=6)) == ((),)


def test_the_limit_is_the_smaller_of_the_request_s_and_the_drafter_s() -> None:
    one = drafter(3)
    assert [len(tokens) for tokens in propose(one, request([4, 4, 4], 9), request([5, 5, 5], 2, 1))] == [3, 2]


def test_a_released_request_leaves_nothing_behind_for_one_with_the_same_id() -> None:
    one = drafter()
    context = DraftContext(requests=(request([1, 2, 1, 2, 1, 2]),))
    one.prefill(context)
    assert one.propose(context).tokens == ((1, 2, 1, 2),)
    one.commit(Verdict(requests=()))
    one.release([0, 99])
    assert propose(one, request([3, 4, 3, 4, 3, 4])) == ((3, 4, 3, 4),)


def test_a_long_text_costs_little_per_step() -> None:
    one, tokens = drafter(), [(7919 * index) % 9973 for index in range(100_000)]
    propose(one, request(tokens))
    began = time.perf_counter()
    for _ in range(20):
        tokens.append(1)
        one.propose(DraftContext(requests=(DraftRequest(request_id=0, tokens=tokens, sampling=STATE, limit=4),)))
    # 0.1 ms when nothing else runs; indexing the text anew each time would take 20 ms and more.
    assert (time.perf_counter() - began) / 20 < 0.005


def test_the_evidence_is_the_length_of_the_match() -> None:
    one = drafter(min_match=1)
    asked = ([9, 9], [1, 2, 3, 8, 1, 2, 3], [5, 1, 2, 3], [4] * 40)
    requests = tuple(request(tokens, request_id=number) for number, tokens in enumerate(asked))
    proposal = one.propose(DraftContext(requests=requests))
    assert proposal.evidence == (1, 3, 1, 5) and proposal.tokens[2] == ()
