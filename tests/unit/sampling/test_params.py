"""What a request may ask, and how it is told what it may not."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields, replace

import pytest

from proa.errors import RequestError
from proa.sampling.params import SamplingParams, check_vocab
from proa.sampling.state import SamplingState

# As published: interfaces.md, "Python".
NAMES = [
    "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "seed", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens",
    "max_tokens", "logprobs", "prompt_logprobs", "bad_words", "allowed_token_ids", "structured_outputs",
    "skip_special_tokens", "speculative",
]  # fmt: skip


def test_the_names_are_the_published_ones() -> None:
    assert [entry.name for entry in fields(SamplingParams)] == NAMES


def test_defaults_sample_from_the_whole_distribution_and_stop_after_16_tokens() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, 0, 0.0)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.0, 0.0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.n, params.seed) == (16, 0, 1, None)
    assert params.speculative is True


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("n", [1, 8], [0, -1, 1.0, True, "2"]),
        ("temperature", [0, 0.0, 1e-9, 5], [-0.1, float("nan"), float("inf"), "1", True]),
        ("top_p", [1e-9, 1], [0, 1.1, -1]),
        ("top_k", [-1, 0, 1, 10**6], [-2, 1.5]),
        ("min_p", [0, 1], [-0.1, 1.1]),
        ("presence_penalty", [-2, 2], [-2.1, 2.1]),
        ("frequency_penalty", [-2, 2], [-2.1, 2.1]),
        ("repetition_penalty", [0.1, 3], [0, -1]),
        ("logit_bias", [{}, {1: 100}, {"7": -100.0}, None], [{1: 101}, {-1: 1}, {"x": 1}, [1]]),
        ("seed", [None, 0, -1, -(2**63), 2**64 - 1], [2**64, 1.0, "1"]),
        ("stop", ["a", ["a", "b"], None, ()], ["", ["a", ""], [1], b"a"]),
        ("stop_token_ids", [[], [0, 5], None], [[-1], ["1"], "12", 3]),
        ("ignore_eos", [True, False], [1, None]),
        ("include_stop_str_in_output", [True, False], [0, "yes"]),
        ("skip_special_tokens", [True, False], [0]),
        ("speculative", [True, False], [None, 0]),
        ("min_tokens", [0, 16], [-1, 17]),
        ("max_tokens", [1, None], [0, -1, 2.0]),
        ("logprobs", [None, 0, -1, 20], [-2, True]),
        ("prompt_logprobs", [None, 0, -1], [-2]),
        ("bad_words", [[], ["a b"], "word"], [[""], [3]]),
        ("allowed_token_ids", [None, [0]], [[], [-1], [0.5]]),
    ],
)
def test_a_value_out_of_range_is_refused_by_field_and_value(name: str, good: list, bad: list) -> None:
    for value in good:
        SamplingParams(**{name: value})
    for value in bad:
        with pytest.raises(RequestError) as error:
            SamplingParams(**{name: value})
        assert error.value.slug == "request/sampling-params"
        assert name in error.value.message
        assert repr(value) in error.value.message or isinstance(value, dict | list)


def test_an_unknown_name_is_refused_with_the_nearest_known_one() -> None:
    for make in (lambda: SamplingParams(temprature=1), lambda: SamplingParams.from_mapping({"temprature": 1})):
        with pytest.raises(RequestError, match=r"request/unknown-sampling-param.*temprature(.|\n)*mean temperature\?"):
            make()
    with pytest.raises(RequestError, match=r"xyzzy(.|\n)*known names: n, temperature"):
        SamplingParams(xyzzy=1)


def test_structured_outputs_are_refused_by_name_until_there_is_a_grammar() -> None:
    assert SamplingParams(structured_outputs=None).structured_outputs is None
    with pytest.raises(RequestError, match="request/not-supported.*structured_outputs"):
        SamplingParams(structured_outputs={"json": {}})


def test_several_greedy_choices_are_refused() -> None:
    with pytest.raises(RequestError, match="n = 2"):
        SamplingParams(n=2, temperature=0)


def test_params_are_frozen_hashable_and_keep_no_reference_to_what_was_given() -> None:
    words, bias = ["a"], {3: 1.0}
    params = SamplingParams(stop=words, logit_bias=bias)
    words.append("b")
    bias[4] = 2.0
    assert params.stop == ("a",)
    assert dict(params.logit_bias) == {3: 1.0}
    assert hash(params) == hash(replace(params))
    with pytest.raises(FrozenInstanceError):
        params.n = 2
    with pytest.raises(TypeError):
        params.logit_bias[3] = 2.0


def test_a_replaced_value_is_checked_like_a_given_one() -> None:
    assert replace(SamplingParams(), max_tokens=3).max_tokens == 3
    with pytest.raises(RequestError, match="max_tokens = 0"):
        replace(SamplingParams(), max_tokens=0)


@pytest.mark.parametrize("field", ["logit_bias", "allowed_token_ids", "stop_token_ids"])
def test_a_token_id_that_the_model_does_not_have_is_refused(field: str) -> None:
    def asked(token: int) -> SamplingParams:
        return SamplingParams(**{field: {token: 1.0} if field == "logit_bias" else [token]})

    check_vocab(asked(9), 10)
    with pytest.raises(RequestError, match=rf"{field} = 10 .*0 to 9"):
        check_vocab(asked(10), 10)


def make_state(params: SamplingParams, **changes) -> SamplingState:
    return SamplingState(
        **{"params": params, "seed": 0, "choice": 0, "prompt": (1,), "stop_ids": frozenset(), **changes}
    )


def test_bad_words_that_were_not_tokenised_cannot_be_forgotten() -> None:
    params = SamplingParams(bad_words=["no"])
    assert make_state(params, bad_sequences=((4,),)).bad_sequences == ((4,),)
    for sequences in ((), ((),)):
        with pytest.raises(ValueError, match="bad"):
            make_state(params, bad_sequences=sequences)


def test_a_request_that_allows_only_what_min_tokens_forbids_is_refused() -> None:
    make_state(SamplingParams(allowed_token_ids=[3, 4], min_tokens=1), stop_ids=frozenset({3}))
    with pytest.raises(RequestError, match="request/nothing-to-sample"):
        make_state(SamplingParams(allowed_token_ids=[3], min_tokens=1), stop_ids=frozenset({3}))
