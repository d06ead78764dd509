"""The rules of `proa check`, and the reverse test: a verifier that accepts what it should not is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from proa import LLM
from proa.evals.health import health, is_rounding, useless
from proa.evals.lossless import Divergence, LosslessReport
from proa.speculative.verify import Verifier

SETTINGS = {"dtype": "float32", "threads": 1, "max_model_len": 256}
DIVERGENCE = Divergence(prompt=0, choice=0, index=3, plain=1, speculative=2, gap=0.1, margin=0.1)
REPORT = LosslessReport(prompts=4, compared=128, divergences=(), largest_logprob_difference=0.0, speculation=None)


def test_a_pair_that_verifies_properly_is_healthy(tiny: Callable[..., Path]) -> None:
    with LLM(tiny("llama"), draft=tiny("qwen3", seed=3), num_draft_tokens=4, **SETTINGS) as llm:
        found = health(llm)
    assert all(report.is_lossless for report in found.reports.values())
    assert set(found.reports) == {"greedy", "sampled"}


def test_a_verifier_that_accepts_every_proposal_is_found(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from proa.speculative import verify

    proper = Verifier.verify

    def credulous(self, requests, proposal, logits):
        logits = logits.clone()
        row = 0
        for tokens in proposal.tokens:
            for offset, token in enumerate(tokens):
                logits[row + offset] = float("-inf")
                logits[row + offset, token] = 0.0
            row += 1 + len(tokens)
        return proper(self, requests, proposal, logits)

    monkeypatch.setattr(verify.Verifier, "verify", credulous)
    with LLM(tiny("llama"), draft=tiny("qwen3", seed=3), num_draft_tokens=4, **SETTINGS) as llm:
        found = health(llm)
    assert not found.is_healthy
    assert any("greedy: prompt 0" in problem for problem in found.problems)


def test_rejection_sampling_is_compared_greedily_only(tiny: Callable[..., Path]) -> None:
    with LLM(tiny("llama"), draft=tiny("llama"), verification="rejection", **SETTINGS) as llm:
        assert set(health(llm).reports) == {"greedy"}


def test_without_proposals_there_is_nothing_to_compare_and_that_is_said(tiny: Callable[..., Path]) -> None:
    with LLM(tiny("llama"), **SETTINGS) as llm:
        found = health(llm)
    assert found.is_healthy
    assert found.notes == ("nothing proposes, so nothing was compared",)


def test_a_built_runner_that_breaks_its_plans_promise_is_a_problem(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(tiny("qwen2"), **SETTINGS) as llm:
        built, promised = llm.descriptions()["target"]
        monkeypatch.setattr(LLM, "descriptions", lambda self: {"target": ({**built, "dtype": "torch.int8"}, promised)})
        (problem,) = health(llm).problems
    assert problem == "target: the plan says dtype = torch.float32, built is torch.int8"


def test_only_a_small_gap_is_rounding_and_only_in_the_type_that_rounds_so() -> None:
    assert is_rounding(DIVERGENCE, "bfloat16")
    assert not is_rounding(DIVERGENCE, "float32")
    assert not is_rounding(replace(DIVERGENCE, gap=2.0), "bfloat16")
    assert not is_rounding(replace(DIVERGENCE, gap=None), "bfloat16")


@pytest.mark.parametrize(
    ("proposed", "accepted", "algorithm", "is_useless"),
    [
        (400, 0, "standalone", True),
        (400, 1, "standalone", False),
        (8, 0, "standalone", False),
        (400, 0, "ngram", False),
    ],
)
def test_a_draft_of_which_nothing_is_accepted_is_of_no_use(
    proposed: int, accepted: int, algorithm: str, is_useless: bool
) -> None:
    report = replace(REPORT, speculation={"num_draft_tokens": proposed, "num_accepted_tokens": accepted})
    assert bool(useless("greedy", report, algorithm)) == is_useless
