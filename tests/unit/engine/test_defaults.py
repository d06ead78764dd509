"""What generation_config.json means: sampling defaults and the ids that end a text."""

from __future__ import annotations

import pytest

from proa.engine.defaults import default_sampling, ids_of


@pytest.mark.parametrize(
    ("generation", "fields"),
    [
        ({}, {}),
        ({"temperature": 0.6, "top_k": 20}, {"temperature": 0.6, "top_k": 20}),
        (
            {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": None, "min_p": 0.05, "penalty_alpha": 1.0},
            {"temperature": 0.6, "top_k": 20, "min_p": 0.05},
        ),
        ({"do_sample": True}, {}),
        ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.0}),
        ({"do_sample": False, "repetition_penalty": 1.1}, {"temperature": 0.0, "repetition_penalty": 1.1}),
    ],
)
def test_sampling_defaults_follow_do_sample(generation: dict[str, object], fields: dict[str, float]) -> None:
    assert default_sampling(generation) == fields


@pytest.mark.parametrize(
    ("entry", "ids"), [(5, {5}), ([5, 6], {5, 6}), ((5,), {5}), (None, set()), ("5", set()), ([True, 7], {7})]
)
def test_end_of_text_ids_come_alone_or_in_a_list(entry: object, ids: set[int]) -> None:
    assert ids_of(entry) == ids
