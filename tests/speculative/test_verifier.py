"""The verifier on whole steps: several requests, ends inside accepted runs, logprobs, and sampled rejection."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import chi2

from proa.kernels.reference.sample import ReferenceSample
from proa.sampling.noise import Purpose
from proa.sampling.params import SamplingParams
from proa.sampling.sampler import sample
from proa.sampling.state import SamplingRow
from proa.speculative import verify
from proa.speculative.protocol import Proposal
from proa.speculative.verify import VerifyRequest
from proa.units import Verification
from tests.speculative.worlds import Sink, state, verifier

V = 5
GREEDY = SamplingParams(temperature=0.0)


def rows_for(*best: int) -> torch.Tensor:
    """Logits whose argmax is as given, row by row."""
    return torch.nn.functional.one_hot(torch.tensor(best), V).float() * 3


def request(request_id: int, params: SamplingParams, sink: Sink, **changes) -> VerifyRequest:
    return VerifyRequest(request_id=request_id, sampling=state(params, **changes), output=[2], sink=sink)


def test_each_request_of_a_step_has_rows_and_verdict_of_its_own() -> None:
    sinks = [Sink(), Sink(), Sink()]
    verdict = verifier(Verification.COUPLED).verify(
        [request(index + 7, GREEDY, sink) for index, sink in enumerate(sinks)],
        Proposal(tokens=((1, 2), (), (3,))),
        rows_for(1, 4, 0, 2, 3, 4),
    )
    first, second, third = verdict.requests
    assert (first.request_id, first.proposed, first.accepted, first.emitted, first.keep) == (7, 2, 1, (1, 4), 2)
    assert (second.request_id, second.proposed, second.accepted, second.emitted, second.keep) == (8, 0, 0, (2,), 1)
    assert (third.request_id, third.proposed, third.accepted, third.emitted, third.keep) == (9, 1, 1, (3, 4), 2)
    assert [sink.tokens for sink in sinks] == [[1, 4], [2], [3, 4]]
    assert not any(entry.finished for entry in verdict.requests)


@pytest.mark.parametrize("mode", Verification)
@pytest.mark.parametrize("temperature", [0.0, 0.01])
@pytest.mark.parametrize(("stop_after", "accepted"), [(1, 1), (2, 2), (3, 3), (4, 3)])
def test_a_request_that_ends_inside_an_accepted_run_is_cut_there(mode, temperature, stop_after, accepted) -> None:
    sink = Sink(stop_after)
    params = SamplingParams(temperature=temperature, logprobs=1)
    entry = (
        verifier(mode)
        .verify([request(0, params, sink)], Proposal(tokens=((1, 2, 3),)), rows_for(1, 2, 3, 4))
        .requests[0]
    )
    assert entry.emitted == tuple(sink.tokens) == (1, 2, 3, 4)[:stop_after]
    assert (entry.keep, entry.accepted, entry.finished) == (stop_after, accepted, True)
    assert [one.token for one in entry.logprobs] == list(entry.emitted)


def test_logprobs_are_of_the_raw_logits_of_each_row_and_only_where_asked() -> None:
    params = SamplingParams(temperature=0.0, logit_bias={0: 100.0}, logprobs=1)
    logits = rows_for(1, 2)
    entry = verifier(Verification.COUPLED).verify([request(0, params, Sink())], Proposal(tokens=((0,),)), logits)
    assert [one.token for one in entry.requests[0].logprobs] == [0, 0]
    expected = logits.double().log_softmax(1)[:, 0].tolist()
    assert [one.logprob for one in entry.requests[0].logprobs] == pytest.approx(expected)
    assert [one.top[0][0] for one in entry.requests[0].logprobs] == [1, 2]
    plain = verifier(Verification.COUPLED).verify([request(0, GREEDY, Sink())], Proposal(tokens=((0,),)), logits)
    assert plain.requests[0].logprobs == ()


P = [torch.tensor(row).log() for row in ([0.4, 0.3, 0.2, 0.05, 0.05], [0.1, 0.1, 0.1, 0.1, 0.6])]
Q = torch.tensor([0.1, 0.2, 0.3, 0.3, 0.1]).log()
SEEDS = 2500


def rejection_counts(purpose: Purpose, *, with_probs: bool) -> torch.Tensor:
    """First tokens emitted over many seeds, where the draft draws one token from Q with noise for `purpose`."""
    params, sinks = SamplingParams(max_tokens=None), [Sink() for _ in range(SEEDS)]
    requests = [request(seed, params, sink, seed=seed) for seed, sink in enumerate(sinks)]
    rows = [SamplingRow(state=entry.sampling, output=entry.output) for entry in requests]
    drafted = sample(ReferenceSample(), Q.expand(SEEDS, V), rows, range(SEEDS), purpose)
    probs = (Q.double().softmax(0)[None],) * SEEDS if with_probs else None
    proposal = Proposal(tokens=tuple((token,) for token in drafted), probs=probs)
    verifier(Verification.REJECTION).verify(requests, proposal, torch.stack(P * SEEDS))
    return torch.bincount(torch.tensor([sink.tokens[0] for sink in sinks]), minlength=V).double()


def surprise(counts: torch.Tensor) -> float:
    expected = P[0].double().exp() * SEEDS
    return float(chi2.sf(((counts - expected) ** 2 / expected).sum().item(), V - 1))


@pytest.mark.parametrize(
    ("purpose", "with_probs"), [(Purpose.DRAFT, True), (Purpose.DRAFT, False), (Purpose.TOKEN, False)]
)
def test_rejection_with_keyed_noise_follows_the_target_distribution(purpose: Purpose, with_probs: bool) -> None:
    assert surprise(rejection_counts(purpose, with_probs=with_probs)) > 1e-3


def test_a_draft_that_draws_with_the_noise_of_its_replacement_is_noticed() -> None:
    assert surprise(rejection_counts(Purpose.RESIDUAL, with_probs=False)) < 1e-6


def test_rejection_without_residual_resampling_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "residual", lambda p, *_: p)
    assert surprise(rejection_counts(Purpose.DRAFT, with_probs=True)) < 1e-6


def test_greedy_requests_are_greedy_under_rejection_too() -> None:
    entry = verifier(Verification.REJECTION).verify(
        [request(0, GREEDY, Sink())], Proposal(tokens=((1, 3),)), rows_for(1, 2, 4)
    )
    assert entry.requests[0].emitted == (1, 2)
