"""Coupled verification: whatever the logits and whatever is proposed, what is emitted is what plain decoding emits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from proa.sampling import sampler
from proa.sampling.params import SamplingParams
from proa.sampling.state import SamplingRow, SamplingState
from proa.speculative.protocol import Proposal, TokenLogprobs
from proa.speculative.verify import VerifyRequest
from proa.units import Verification
from tests.speculative.worlds import Sink, World, state, verifier

V, LENGTH, K = 8, 10, 4
tokens = st.integers(0, V - 1)

# One proposal per step; True stands for the right token, so that runs are accepted too.
proposals = st.lists(st.lists(tokens | st.just(True), max_size=K), min_size=LENGTH, max_size=LENGTH)


@st.composite
def states(draw: st.DrawFn) -> SamplingState:
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.7, 1.0, 3.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.4])),
        presence_penalty=draw(st.sampled_from([0.0, 1.5])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.7])),
        logit_bias=draw(st.dictionaries(tokens, st.sampled_from([-3.0, 2.0]), max_size=2)),
        top_k=draw(st.sampled_from([0, 3])),
        top_p=draw(st.sampled_from([1.0, 0.8])),
        min_p=draw(st.sampled_from([0.0, 0.1])),
        min_tokens=draw(st.sampled_from([0, 5])),
        max_tokens=None,
        logprobs=2,
    )
    sequences = draw(st.lists(st.lists(tokens, min_size=1, max_size=3).map(tuple), max_size=2))
    return state(
        params,
        seed=draw(st.integers(0, 2**64 - 1)),
        choice=draw(st.integers(0, 2)),
        prompt=tuple(draw(st.lists(tokens, min_size=1, max_size=4))),
        stop_ids=draw(st.frozensets(st.integers(0, 1), max_size=1)),
        bad_sequences=tuple(sequences),
    )


Result = tuple[list[int], list[TokenLogprobs]]


def decode(
    world: World,
    sampling: SamplingState,
    propose: Callable[[int, Sequence[int]], Sequence[int]],
    *,
    length: int = LENGTH,
) -> Result:
    """Tokens and logprobs of one request that is verified step by step with what `propose(step, output)` gives."""
    output, logprobs = [], []
    sink = Sink(length)
    for step in range(length):
        proposed = tuple(propose(step, output))
        prefixes = [(*sampling.prompt, *output, *proposed[:count]) for count in range(len(proposed) + 1)]
        verdict = (
            verifier(Verification.COUPLED)
            .verify(
                [VerifyRequest(request_id=0, sampling=sampling, output=output, sink=sink)],
                Proposal(tokens=(proposed,)),
                torch.stack([world.logits(prefix) for prefix in prefixes]),
            )
            .requests[0]
        )
        assert verdict.keep == len(verdict.emitted)
        assert verdict.emitted[: verdict.accepted] == proposed[: verdict.accepted]
        output += verdict.emitted
        logprobs += verdict.logprobs
        if verdict.finished:
            break
    assert sink.tokens == output
    return output, logprobs


def check_equal(seed: int, sampling: SamplingState, steps: Sequence[Sequence[int | bool]]) -> None:
    world = World(seed, V, holes=False)
    plain = decode(world, sampling, lambda *_: ())

    def propose(step: int, output: Sequence[int]) -> list[int]:
        right = plain[0][len(output) :]
        return [
            (right[index] if index < len(right) else 0) if token is True else token
            for index, token in enumerate(steps[step])
        ]

    assert decode(world, sampling, propose) == plain


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 10**6), states(), proposals)
def test_any_proposal_gives_the_tokens_and_logprobs_of_plain_decoding(seed, sampling, steps) -> None:
    check_equal(seed, sampling, steps)


FIXED = [(seed, [[True, True, 3]] * LENGTH) for seed in range(5)]


def sampled(seed: int) -> SamplingState:
    return state(SamplingParams(temperature=1.0, max_tokens=None, logprobs=0), seed=seed)


def test_the_fixed_cases_below_hold_for_the_real_verifier() -> None:
    for seed, steps in FIXED:
        check_equal(seed, sampled(seed), steps)


def test_noise_keyed_by_row_instead_of_position_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real, rows = sampler.noise_key, iter(range(10**9))
    monkeypatch.setattr(sampler, "noise_key", lambda seed, choice, _, purpose: real(seed, choice, next(rows), purpose))
    with pytest.raises(AssertionError):
        for seed, steps in FIXED:
            check_equal(seed, sampled(seed), steps)


def test_penalties_that_do_not_see_the_proposal_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from proa.speculative import verify

    def blind(rows, index: int) -> SamplingRow:
        return SamplingRow(state=rows.request.sampling, output=list(rows.request.output))

    monkeypatch.setattr(verify._Rows, "row", blind)
    params = SamplingParams(temperature=0, presence_penalty=2.0, frequency_penalty=2.0, max_tokens=None)
    with pytest.raises(AssertionError):
        for seed, steps in FIXED:
            check_equal(seed, state(params), steps)
