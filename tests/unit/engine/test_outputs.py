"""Detokenisation and ends of a request, at chosen token borders (user-reports F4, F5, B15-B17)."""

from __future__ import annotations

import json
from codecs import utf_8_decode
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proa.checkpoint.types import TokenizerSource
from proa.engine.outputs import OutputState, StopStrings
from proa.engine.tokenizer import Tokenizer
from proa.sampling.params import SamplingParams
from tests.factories.tokenizer import BOS, EOS, byte_id, byte_ids, write_tokenizer

WORDS = {
    400: b" wor",
    401: b"ld\n\n",
    402: b"END",
    403: "é".encode(),
    404: b"a\xf0\x9f",
    405: b"\x99\x82b",
    406: b"STOPxSTOP",
}
NEVER = 10_000

Make = Callable[..., OutputState]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("bytes")
    write_tokenizer(folder, texts=WORDS)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    return Tokenizer.from_source(
        TokenizerSource(json_file=folder / "tokenizer.json", gguf=None, config=config, chat_template=None)
    )


@pytest.fixture
def make(tokenizer: Tokenizer) -> Make:
    def build(*, max_new: int = NEVER, stop_ids: Sequence[int] = (EOS,), **params: object) -> OutputState:
        asked = SamplingParams(max_tokens=None, **params)
        return OutputState(tokenizer, asked, prompt_len=3, stop_ids=frozenset(stop_ids), max_new=max_new)

    return build


def feed(output: OutputState, ids: Sequence[int]) -> list[str]:
    """Push until the request ends; the delta after each token."""
    deltas: list[str] = []
    for token in ids:
        ended = output.push(token)
        deltas.append(output.take_delta())
        if ended:
            break
    return deltas


def test_half_an_emoji_is_held_until_its_other_half_arrives(make: Make) -> None:
    output = make()
    assert feed(output, [404, 405]) == ["a", "🙂b"]
    assert output.text == "a🙂b"


def test_a_cjk_syllable_of_three_single_byte_tokens_appears_whole(make: Make) -> None:
    assert feed(make(), byte_ids("語!")) == ["", "", "語", "!"]


def test_a_text_that_ends_in_the_middle_of_a_character_says_so_once(make: Make) -> None:
    output = make(max_new=2)
    assert feed(output, [byte_id(0x41), 404]) == ["A", "a\ufffd"]
    assert output.finish_reason == "length"


def test_an_impossible_byte_is_replaced_and_what_follows_is_kept(make: Make) -> None:
    assert feed(make(), [byte_id(0xFF), byte_id(0x41)]) == ["\ufffd", "A"]


def test_eos_ends_the_request_without_its_text_and_without_a_stop_reason(make: Make) -> None:
    output = make()
    assert feed(output, [400, EOS, 401]) == [" wor", ""]
    assert (output.text, output.token_ids) == (" wor", [400, EOS])
    assert (output.finish_reason, output.stop_reason) == ("stop", None)


def test_a_token_out_of_stop_token_ids_is_the_stop_reason(make: Make) -> None:
    output = make(stop_ids=(EOS, 402), stop_token_ids=[402])
    feed(output, [400, 402])
    assert (output.text, output.token_ids, output.finish_reason, output.stop_reason) == (
        " wor",
        [400, 402],
        "stop",
        402,
    )


def test_a_stop_token_is_part_of_the_text_when_that_is_asked_for(make: Make) -> None:
    output = make(stop_ids=(402,), stop_token_ids=[402], include_stop_str_in_output=True)
    feed(output, [400, 402])
    assert output.text == " worEND"


def test_an_end_of_text_that_is_ignored_goes_on_and_is_skipped_as_a_special_token(make: Make) -> None:
    output = make(stop_ids=(), ignore_eos=True, max_new=3)
    feed(output, [400, EOS, 401])
    assert (output.text, output.finish_reason) == (" world\n\n", "length")


def test_special_tokens_are_shown_when_they_are_not_skipped(make: Make) -> None:
    output = make(stop_ids=(), skip_special_tokens=False)
    feed(output, [BOS, 400])
    assert output.text == "<bos> wor"


def test_a_stop_string_over_three_tokens_is_found_and_never_shown(make: Make) -> None:
    output = make(stop=["world"])
    assert feed(output, [byte_id(0x21), 400, byte_id(0x6C), byte_id(0x64), 402]) == ["!", " ", "", ""]
    assert output.text == "! "
    assert output.token_ids == [byte_id(0x21), 400, byte_id(0x6C), byte_id(0x64)]
    assert (output.finish_reason, output.stop_reason) == ("stop", "world")


def test_a_stop_string_inside_one_token_cuts_the_text_within_that_token(make: Make) -> None:
    output = make(stop="d\n")
    feed(output, [400, 401])
    assert (output.text, output.token_ids) == (" worl", [400, 401])


def test_a_stop_string_stays_when_that_is_asked_for_and_what_follows_it_is_cut(make: Make) -> None:
    output = make(stop=["d\n"], include_stop_str_in_output=True)
    assert feed(output, [400, 401]) == [" wor", "ld\n"]


def test_a_stop_string_in_the_first_token_of_a_long_run_is_found(make: Make) -> None:
    output = make(stop=["END"])
    assert feed(output, [402, *byte_ids("seven more")]) == [""]
    assert (output.text, output.token_ids) == ("", [402])


def test_the_earliest_of_several_stop_strings_counts(make: Make) -> None:
    output = make(stop=["xST", "TOP"])
    feed(output, [406])
    assert (output.text, output.stop_reason) == ("S", "TOP")


def test_what_was_held_back_is_shown_when_it_turns_out_to_be_no_stop_string(make: Make) -> None:
    output = make(stop=["worse"])
    assert feed(output, [400, byte_id(0x6B)]) == [" ", "work"]


def test_what_is_held_back_is_flushed_at_the_end_of_a_short_answer(make: Make) -> None:
    output = make(stop=["world"])
    assert feed(output, [400, EOS]) == [" ", "wor"]


def test_a_stop_string_within_min_tokens_is_not_looked_at(make: Make) -> None:
    output = make(stop=["END"], min_tokens=2)
    feed(output, [402, 400, 402])
    assert (output.text, output.token_ids) == ("END wor", [402, 400, 402])


def test_a_stop_string_that_a_later_token_completes_counts_although_it_began_within_min_tokens(make: Make) -> None:
    output = make(stop=["world"], min_tokens=1)
    feed(output, [400, byte_id(0x6C), byte_id(0x64)])
    assert (output.text, output.finish_reason) == (" ", "stop")


def test_a_stop_token_within_min_tokens_does_not_end_the_request(make: Make) -> None:
    output = make(min_tokens=1)
    feed(output, [EOS, 400, EOS])
    assert output.token_ids == [EOS, 400, EOS]


def test_a_stop_string_completed_by_the_last_allowed_token_is_a_stop_not_a_length(make: Make) -> None:
    output = make(stop=["END"], max_new=1)
    feed(output, [402])
    assert output.finish_reason == "stop"


def test_an_aborted_request_keeps_its_text_and_takes_no_more_tokens(make: Make) -> None:
    output = make(stop=["world"])
    output.push(400)
    output.abort()
    assert (output.take_delta(), output.finish_reason) == (" wor", "abort")
    with pytest.raises(RuntimeError, match="after the request had ended"):
        output.push(401)


def test_aborting_a_finished_request_changes_nothing(make: Make) -> None:
    output = make()
    output.push(EOS)
    output.abort()
    assert output.finish_reason == "stop"


def text_of(ids: Sequence[int], *, final: bool) -> str:
    """All tokens decoded at once; without `final` an unfinished last character is left out."""
    data = b"".join(WORDS.get(i) or bytes([i - byte_id(0)]) for i in ids)
    return utf_8_decode(data, "replace", final)[0]


def by_definition(ids: Sequence[int], stops: Sequence[str], include: bool, min_tokens: int) -> tuple[str, int]:
    """Text and number of tokens: decode ever longer beginnings whole, stop at the first that shows a stop string which
    reaches beyond the first `min_tokens` tokens."""
    immune = len(text_of(ids[:min_tokens], final=False))
    for count in range(min_tokens + 1, len(ids) + 1):
        text = text_of(ids[:count], final=False)
        starts = [i for i in range(len(text)) for s in stops if text.startswith(s, i) and i + len(s) > immune]
        if starts:
            start = min(starts)
            stop = next(s for s in stops if text.startswith(s, start) and start + len(s) > immune)
            return text[: start + len(stop)] if include else text[:start], count
    return text_of(ids, final=True), len(ids)


PIECES = st.sampled_from(
    [400, 401, 402, 403, 404, 405, *(byte_id(b) for b in b"abENDworl \n\xc3\xa9\xf0\x9f\x99\x82\xff")]
)
STOPS = st.lists(
    st.sampled_from(["END", "DE", "wor", "ld\n", "\n\n", "aa", "aab", "é", "🙂", "l w"]), max_size=3, unique=True
)


@given(ids=st.lists(PIECES, max_size=24), stops=STOPS, include=st.booleans(), min_tokens=st.integers(0, 4))
def test_token_by_token_equals_decoding_all_at_once_and_cutting(
    tokenizer: Tokenizer, ids: list[int], stops: list[str], include: bool, min_tokens: int
) -> None:
    params = SamplingParams(
        stop=stops, include_stop_str_in_output=include, min_tokens=min_tokens, max_tokens=None, ignore_eos=True
    )
    output = OutputState(tokenizer, params, prompt_len=1, stop_ids=frozenset(), max_new=NEVER)
    deltas = feed(output, ids)
    if not output.finished:
        output.abort()
        deltas.append(output.take_delta())
    expected, count = by_definition(ids, stops, include, min_tokens)
    assert output.text == expected
    assert output.token_ids == ids[:count]
    assert "".join(deltas) == output.text


@given(
    text=st.text("ab", max_size=30),
    borders=st.lists(st.integers(0, 30), max_size=6),
    stop=st.text("ab", min_size=1, max_size=4),
)
def test_a_stop_string_is_found_wherever_the_borders_of_pieces_lie(text: str, borders: list[int], stop: str) -> None:
    stops = StopStrings([stop])
    places = sorted({0, len(text), *(b for b in borders if b < len(text))})
    found = None
    for start, end in zip(places, places[1:], strict=False):
        hit = stops.feed(text[start:end])
        if hit is not None:
            found = start + hit[0]
            break
    assert found == (text.index(stop) if stop in text else None)


@given(text=st.text("ab", min_size=1, max_size=12), stop=st.text("ab", min_size=1, max_size=5))
def test_held_back_is_the_longest_ending_that_begins_the_stop_string(text: str, stop: str) -> None:
    stops = StopStrings([stop])
    stops.feed(text)
    expected = max(n for n in range(min(len(text), len(stop) - 1) + 1) if stop.startswith(text[len(text) - n :]))
    assert stops.held() == expected
