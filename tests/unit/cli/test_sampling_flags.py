"""The flags of `proa run` are fields of SamplingParams, and only those that are given count."""

from __future__ import annotations

import argparse
from dataclasses import fields

import pytest

from proa import SamplingParams
from proa.cli.sampling_flags import FLAGS, add_sampling_flags, given_sampling


def given(*arguments: str) -> dict[str, object]:
    parser = argparse.ArgumentParser()
    add_sampling_flags(parser)
    return given_sampling(parser.parse_args(arguments))


def test_what_is_not_given_is_left_to_the_checkpoint() -> None:
    assert given() == {}


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        (("--temperature", "0.5", "--top-k", "3"), {"temperature": 0.5, "top_k": 3}),
        (("--max-tokens", "none"), {"max_tokens": None}),
        (("--stop", "a", "--stop", "b c"), {"stop": ["a", "b c"]}),
        (("--stop-token-id", "4"), {"stop_token_ids": [4]}),
        (("--bad-word", "no", "--ignore-eos"), {"bad_words": ["no"], "ignore_eos": True}),
    ],
)
def test_a_flag_becomes_the_value_of_its_field(arguments: tuple[str, ...], values: dict[str, object]) -> None:
    assert given(*arguments) == values
    assert SamplingParams(**values)


def test_every_flag_names_a_field_and_has_help() -> None:
    known = {entry.name for entry in fields(SamplingParams)}
    assert all(flag.field in known and flag.help for flag in FLAGS)
