"""What users read about acceptance, counted on paper."""

from __future__ import annotations

from proa.speculative.protocol import RequestVerdict
from proa.speculative.stats import SpeculativeStats


def verdict(proposed: int, accepted: int, emitted: int) -> RequestVerdict:
    return RequestVerdict(
        request_id=0,
        proposed=proposed,
        accepted=accepted,
        emitted=tuple(range(emitted)),
        keep=emitted,
        finished=False,
        logprobs=(),
    )


def test_figures_count_drafts_of_any_length_and_no_plain_steps() -> None:
    stats = SpeculativeStats(4)
    # Two full drafts (all accepted; one accepted), a short one (none), one cut by the end of the request; plain steps.
    for entry in (
        verdict(4, 4, 5),
        verdict(4, 1, 2),
        verdict(2, 0, 1),
        verdict(4, 2, 2),
        verdict(0, 0, 1),
        verdict(0, 0, 1),
    ):
        stats.record(entry)
    assert stats.metrics() == {
        "num_drafts": 4,
        "num_draft_tokens": 14,
        "num_accepted_tokens": 7,
        "mean_acceptance_length": 10 / 4,
        "acceptance_rate": 0.5,
        "acceptance_rate_per_position": [3 / 4, 2 / 4, 1 / 3, 1 / 3],
        "acceptance_histogram": [1, 1, 1, 0, 1],
    }


def test_without_a_draft_there_is_no_gain_and_no_division_by_zero() -> None:
    stats = SpeculativeStats(2)
    stats.record(verdict(0, 0, 1))
    assert stats.metrics() == {
        "num_drafts": 0,
        "num_draft_tokens": 0,
        "num_accepted_tokens": 0,
        "mean_acceptance_length": 1.0,
        "acceptance_rate": 0.0,
        "acceptance_rate_per_position": [0.0, 0.0],
        "acceptance_histogram": [0, 0, 0],
    }
