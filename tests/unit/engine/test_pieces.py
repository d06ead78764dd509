"""Pieces as bytes: the tokenizers library's own decoders are the reference."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders

from proa.engine.pieces import PieceDecoder, Utf8Stream, byte_alphabet, piece_decoder
from proa.errors import CheckpointError

BYTE_LEVEL = decoders.ByteLevel()
SENTENCEPIECE = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)


def read(decoder: Any) -> PieceDecoder:
    return piece_decoder(json.loads(decoder.__getstate__()), "tokenizer.json")


def decode(pieces: PieceDecoder, tokens: list[str]) -> str:
    text = b"".join(pieces.to_bytes(token) for token in tokens).decode("utf-8", "replace")
    return text.removeprefix(" ") if pieces.strip_first else text


SPELLED = st.text(st.sampled_from(byte_alphabet()), max_size=4)


@given(tokens=st.lists(st.one_of(SPELLED, st.sampled_from(["<|im_end|>", "<a b>", "語", "Ġ"])), max_size=8))
def test_byte_level_pieces_mean_what_the_library_says(tokens: list[str]) -> None:
    assert decode(read(BYTE_LEVEL), tokens) == BYTE_LEVEL.decode(tokens)


@given(
    words=st.lists(st.sampled_from(["▁the", "▁", "▁▁", "é", "a b", "<0xZZ>", "<0x41", "語", "🙂"]), max_size=8),
    spelled=st.text(max_size=3),
)
def test_sentencepiece_pieces_mean_what_the_library_says(words: list[str], spelled: str) -> None:
    # Whole characters only: for byte pieces that form none, the library prints one U+FFFD per byte, and Proa one per
    # sequence, as Unicode recommends.
    tokens = [*words, *(f"<0x{byte:02X}>" for byte in spelled.encode()), "▁end"]
    assert decode(read(SENTENCEPIECE), tokens) == SENTENCEPIECE.decode(tokens)


def test_a_leading_space_stays_where_the_decoder_does_not_strip_it() -> None:
    kept = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    assert decode(read(kept), ["▁a"]) == " a"


@pytest.mark.parametrize(
    ("description", "named"),
    [
        ({"type": "WordPiece", "prefix": "##", "cleanup": True}, "WordPiece"),
        ({"type": "Sequence", "decoders": [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]}, "Strip"),
        ({"type": "Replace", "pattern": {"Regex": "a+"}, "content": " "}, "Replace"),
        (None, "none"),
    ],
)
def test_a_decoder_that_is_not_bytes_per_piece_is_refused_by_name(description: Any, named: str) -> None:
    with pytest.raises(CheckpointError, match=named) as caught:
        piece_decoder(description, "some/tokenizer.json")
    assert caught.value.slug == "tokenizer/decoder-unknown"
    assert "some/tokenizer.json" in caught.value.message


@given(data=st.binary(max_size=30), borders=st.lists(st.integers(0, 30), max_size=8))
def test_bytes_in_any_portions_give_the_text_of_all_bytes(data: bytes, borders: list[int]) -> None:
    stream = Utf8Stream()
    places = sorted({0, len(data), *(b for b in borders if b < len(data))})
    parts = [stream.push(data[a:b]) for a, b in zip(places, places[1:], strict=False)]
    assert "".join(parts) + stream.flush() == data.decode("utf-8", "replace")
