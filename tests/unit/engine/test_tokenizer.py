"""The tokenizer of a directory in the hub's layout, and what hostile input does to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as NativeTokenizer

from proa.checkpoint.types import TokenizerSource
from proa.engine.tokenizer import MAX_CHARACTERS, Tokenizer
from proa.errors import CheckpointError, RequestError
from tests.factories.tokenizer import BOS, EOS, SIZE, byte_ids, write_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hub")
    write_tokenizer(path, texts={})
    return path


def opened(folder: Path, **config: Any) -> Tokenizer:
    stored = json.loads((folder / "tokenizer_config.json").read_text())
    return Tokenizer.from_source(
        TokenizerSource(json_file=folder / "tokenizer.json", gguf=None, config={**stored, **config}, chat_template=None)
    )


def changed(folder: Path, to: Path, **entries: Any) -> Path:
    """A copy of the tokenizer with other top-level entries."""
    to.mkdir()
    document = json.loads((folder / "tokenizer.json").read_text())
    (to / "tokenizer.json").write_text(json.dumps({**document, **entries}))
    (to / "tokenizer_config.json").write_text((folder / "tokenizer_config.json").read_text())
    return to


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


@given(text=TEXT, spelled=st.lists(st.sampled_from(["<eos>", "<|user|>", " the"]), max_size=2))
def test_encoding_and_decoding_are_those_of_the_library(folder: Path, text: str, spelled: list[str]) -> None:
    tokenizer, native = opened(folder), NativeTokenizer.from_file(str(folder / "tokenizer.json"))
    whole = text.join(["", *spelled, ""])
    ids = tokenizer.encode(whole, add_special=True)
    assert ids == native.encode(whole).ids
    for skip in (True, False):
        assert tokenizer.decode(ids, skip_special=skip) == native.decode(ids, skip_special_tokens=skip)
    assert tokenizer.decode(ids, skip_special=False) == whole


@given(ids=st.lists(st.integers(0, SIZE - 1), max_size=20))
def test_any_ids_decode_as_the_library_decodes_them(folder: Path, ids: list[int]) -> None:
    native = NativeTokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer = opened(folder)
    assert tokenizer.decode(ids, skip_special=True) == native.decode(ids)
    stream = tokenizer.stream(skip_special=True)
    assert "".join([*map(stream.push, ids), stream.flush()]) == native.decode(ids)


def test_special_tokens_come_from_the_configuration(folder: Path) -> None:
    tokenizer = opened(folder)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<bos>", "<eos>")
    assert (tokenizer.specials.bos_id, tokenizer.eos_ids) == (BOS, frozenset({EOS}))
    assert tokenizer.vocab_size == SIZE
    assert tokenizer.special_ids == frozenset(range(6))


def test_a_special_token_may_be_written_as_an_object_or_be_absent(folder: Path) -> None:
    tokenizer = opened(folder, eos_token={"content": "<pad>", "lstrip": False}, bos_token=None)
    assert (tokenizer.bos_token, tokenizer.eos_token) == (None, "<pad>")


def test_bos_and_eos_are_added_only_where_the_configuration_says_so(folder: Path) -> None:
    body = byte_ids("hi")
    assert opened(folder).encode("hi", add_special=True) == body
    adding = opened(folder, add_bos_token=True, add_eos_token=True)
    assert adding.encode("hi", add_special=True) == [BOS, *body, EOS]
    assert adding.encode("hi", add_special=False) == body


def test_a_post_processor_adds_bos_once_whatever_the_flag_says(folder: Path, tmp_path: Path) -> None:
    template = [{"SpecialToken": {"id": "<bos>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    tokens = {"<bos>": {"id": "<bos>", "ids": [BOS], "tokens": ["<bos>"]}}
    processor = {
        "type": "TemplateProcessing",
        "single": template,
        "pair": template + [{"Sequence": {"id": "B", "type_id": 1}}],
    }
    path = changed(folder, tmp_path / "t", post_processor={**processor, "special_tokens": tokens})
    assert opened(path, add_bos_token=True).encode("hi", add_special=True) == [BOS, *byte_ids("hi")]
    assert opened(path, add_bos_token=True).encode("hi", add_special=False) == byte_ids("hi")


def test_a_training_runs_length_limit_and_padding_are_lifted(folder: Path, tmp_path: Path) -> None:
    limits = {
        "truncation": {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0},
        "padding": {"strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 2,
                    "pad_type_id": 0, "pad_token": "<pad>"},
    }  # fmt: skip
    path = changed(folder, tmp_path / "t", **limits)
    assert opened(path).encode("hello", add_special=False) == byte_ids("hello")


def test_a_token_that_only_the_configuration_declares_is_added_with_its_id(folder: Path) -> None:
    declared = {str(SIZE): {"content": "<tool>", "special": False}}
    tokenizer = opened(folder, added_tokens_decoder=declared)
    assert tokenizer.encode("<tool>", add_special=False) == [SIZE]
    assert tokenizer.decode([SIZE], skip_special=True) == "<tool>"


def test_a_declared_token_that_cannot_have_its_id_is_refused(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'<tool>' has id 512, but tokenizer_config.json says 600") as caught:
        opened(folder, added_tokens_decoder={"600": {"content": "<tool>"}})
    assert caught.value.slug == "tokenizer/special-unknown"


def test_an_eos_token_outside_the_vocabulary_is_refused(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="eos_token '</s>' is not in the vocabulary"):
        opened(folder, eos_token="</s>")


def test_a_file_that_is_no_tokenizer_is_refused_by_its_name(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text('{"version": "1.0", "model": {"type": "Nonsense"}}')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json") as caught:
        Tokenizer.from_source(TokenizerSource(json_file=file, gguf=None, config={}, chat_template=None))
    assert caught.value.slug == "tokenizer/unreadable"


def test_a_checkpoint_without_a_tokenizer_says_what_is_missing() -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json") as caught:
        Tokenizer.from_source(TokenizerSource(json_file=None, gguf=None, config={}, chat_template=None))
    assert caught.value.slug == "tokenizer/missing"


def test_a_panic_of_the_native_library_is_an_error_of_the_request(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    path = changed(folder, tmp_path / "t", pre_tokenizer=split)
    with pytest.raises(RequestError, match="the tokenizer failed on the text") as caught:
        opened(path).encode("a" * 30 + "b", add_special=False)
    assert caught.value.slug == "request/tokenizer-failed"
    capfd.readouterr()  # the library also prints


def test_half_a_surrogate_pair_is_refused_with_its_place(folder: Path) -> None:
    with pytest.raises(RequestError, match=r"character 2 .*\\ud83d") as caught:
        opened(folder).encode("ab\ud83d", add_special=False)
    assert caught.value.slug == "request/text-not-unicode"


def test_a_text_over_the_limit_is_refused_before_any_work(folder: Path) -> None:
    with pytest.raises(RequestError, match="4000001 characters; at most 4000000") as caught:
        opened(folder).encode("a" * (MAX_CHARACTERS + 1), add_special=False)
    assert caught.value.slug == "request/text-too-long"


def test_a_negative_id_is_refused_and_a_padding_row_has_no_text(folder: Path) -> None:
    tokenizer = opened(folder)
    assert tokenizer.decode([SIZE + 7, *byte_ids("a")], skip_special=False) == "a"
    with pytest.raises(RequestError, match="-1 is not a token id"):
        tokenizer.decode([-1], skip_special=False)


def test_a_token_alone_shows_a_replacement_where_it_is_part_of_a_character(folder: Path) -> None:
    tokenizer = opened(folder)
    first = byte_ids("é")[0]
    assert (tokenizer.token_text(first), tokenizer.token_bytes(first)) == ("\ufffd", b"\xc3")
