"""The comparison finds the first difference, whatever kind it is, and measures it in the plain run's row."""

from __future__ import annotations

import math

import pytest

from proa.engine.results import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from proa.evals.lossless import Divergence, common_prefix, compare

METRICS = RequestMetrics(
    time_to_first_token=0.1,
    total_seconds=0.2,
    num_prompt_tokens=1,
    num_output_tokens=3,
    num_cached_tokens=0,
    tokens_per_second=1.0,
    speculative_decoding=None,
)


def output(tokens: list[int], *, text: str = "t", finish: str = "length", probs: list[dict[int, float]] | None = None):
    rows = None
    if probs is not None:
        ranked = [sorted(row.items(), key=lambda entry: -entry[1]) for row in probs]
        rows = tuple(
            {t: Logprob(logprob=math.log(p), rank=rank, decoded_token="") for rank, (t, p) in enumerate(row, 1)}
            for row in ranked
        )
    choice = CompletionOutput(
        index=0,
        text=text,
        token_ids=tuple(tokens),
        logprobs=rows,
        cumulative_logprob=None,
        finish_reason=finish,
        stop_reason=None,
    )
    return RequestOutput(prompt=None, prompt_token_ids=(1,), prompt_logprobs=None, outputs=(choice,), metrics=METRICS)


def test_equal_answers_are_lossless_and_every_token_was_compared() -> None:
    report = compare([output([1, 2, 3]), output([4])], [output([1, 2, 3]), output([4])], None)
    assert report.is_lossless
    assert (report.prompts, report.compared) == (2, 4)


def test_a_divergence_has_its_position_gap_and_margin_from_the_plain_row() -> None:
    probs = [{1: 0.9, 2: 0.1}, {2: 0.5, 9: 0.4, 7: 0.1}, {3: 1.0}]
    report = compare([output([1, 2, 3], probs=probs)], [output([1, 7, 3])], None)
    (found,) = report.divergences
    assert (found.prompt, found.index, found.plain, found.speculative) == (0, 1, 2, 7)
    assert found.gap == pytest.approx(math.log(5))
    assert found.margin == pytest.approx(math.log(0.5 / 0.4))
    assert "output token 1: plain 2, speculative 7; logit gap 1.61" in str(found)


def test_a_token_outside_the_kept_best_has_no_gap() -> None:
    report = compare([output([1], probs=[{1: 0.9, 2: 0.1}])], [output([8])], None)
    assert report.divergences[0].gap is None
    assert "more than the best five" in str(report.divergences[0])


@pytest.mark.parametrize(
    "other",
    [
        output([1, 2]),
        output([1, 2, 3, 4]),
        output([1, 2, 3], text="other"),
        output([1, 2, 3], finish="stop"),
    ],
    ids=["shorter", "longer", "text", "finish reason"],
)
def test_whatever_differs_is_a_divergence(other: RequestOutput) -> None:
    assert not compare([output([1, 2, 3])], [other], None).is_lossless


def test_log_probabilities_are_compared_up_to_the_divergence() -> None:
    plain = output([1, 2], probs=[{1: 0.5}, {2: 0.5}])
    drafted = output([1, 3], probs=[{1: 0.25}, {3: 0.001}])
    assert compare([plain], [drafted], None).largest_logprob_difference == pytest.approx(math.log(2))


def test_the_common_prefix_of_unequal_lengths_ends_with_the_shorter() -> None:
    assert common_prefix([1, 2, 3], [1, 2]) == 2
    assert common_prefix([], [1]) == 0
    assert common_prefix([1, 2], [1, 9]) == 1


def test_a_divergence_without_a_plain_token_still_prints() -> None:
    found = Divergence(prompt=1, choice=0, index=3, plain=None, speculative=5, gap=None, margin=None)
    assert "margin unknown" in str(found)
