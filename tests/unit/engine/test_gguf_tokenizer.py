"""Tokenizers from GGUF metadata against transformers' (recorded), published cutting rules and SentencePiece's rule."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from proa.checkpoint.open import open_checkpoint
from proa.checkpoint.types import TokenizerSource
from proa.engine import gguf_tokenizer
from proa.engine.gguf_tokenizer import TokenType
from proa.engine.template import ChatTemplate
from proa.engine.tokenizer import Tokenizer
from proa.errors import CheckpointError
from tests.factories.tokenizer import byte_alphabet

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "smollm2_tokenizer.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def source(smollm2: Path) -> TokenizerSource:
    found = open_checkpoint(smollm2).tokenizer
    assert found is not None
    return found


@pytest.fixture(scope="module")
def real(source: TokenizerSource) -> Tokenizer:
    return Tokenizer.from_source(source)


@pytest.mark.model
@pytest.mark.parametrize(("text", "ids"), GOLDEN["smollm"] + GOLDEN["digits"])
def test_smollm2_encodes_as_transformers_does_with_the_same_file(real: Tokenizer, text: str, ids: list[int]) -> None:
    assert real.encode(text, add_special=False) == ids
    assert real.encode(text, add_special=True) == ids  # add_bos_token is false in this file
    assert real.decode(ids, skip_special=False) == text


@pytest.mark.model
@pytest.mark.parametrize("chat", GOLDEN["chats"])
def test_smollm2s_own_template_renders_as_transformers_does(
    real: Tokenizer, source: TokenizerSource, chat: dict[str, Any]
) -> None:
    assert source.chat_template is not None
    template = ChatTemplate(source.chat_template, real.bos_token, real.eos_token)
    text = template.render(chat["messages"], add_generation_prompt=chat["add_generation_prompt"])
    assert (template.engine, text) == ("minijinja", chat["text"])
    assert real.encode(text, add_special=False) == chat["ids"]


@pytest.mark.model
def test_smollm2s_special_tokens_are_those_of_its_file(real: Tokenizer) -> None:
    assert (real.bos_token, real.eos_token, real.eos_ids) == ("<|im_start|>", "<|im_end|>", frozenset({2}))
    assert (real.vocab_size, len(real.special_ids)) == (49152, 17)
    assert real.decode([1, 28120, 2], skip_special=True) == real.token_text(28120)


def byte_level(**changes: Any) -> dict[str, Any]:
    """Metadata of a byte-level vocabulary: 256 bytes, one merge, a control and a user-defined token."""
    alphabet = byte_alphabet()
    tokens = [*alphabet, "ab", "<|end|>", "<think now>"]
    types = [TokenType.NORMAL] * 257 + [TokenType.CONTROL, TokenType.USER_DEFINED]
    metadata = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "token_type": types, "merges": ["a b"]}
    return {**metadata, "bos_token_id": 258, "eos_token_id": 258, **changes}


def built(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_source(TokenizerSource(json_file=None, gguf=metadata, config={}, chat_template=None))


def test_control_tokens_are_special_and_user_defined_ones_whole_but_shown() -> None:
    tokenizer = built(byte_level())
    alphabet = byte_alphabet()
    ids = tokenizer.encode("ab<|end|>c<think now>", add_special=False)
    assert ids == [256, 257, alphabet.index("c"), 258]
    assert tokenizer.special_ids == {257, 258}  # 258 because the file names it as bos and eos
    plain = built(byte_level(bos_token_id=257, eos_token_id=257))
    assert plain.decode(ids, skip_special=True) == "abc<think now>"


@pytest.mark.parametrize(
    ("changes", "ids"),
    [
        ({}, [256]),
        ({"add_bos_token": True}, [258, 256]),
        ({"add_bos_token": True, "add_eos_token": True}, [258, 256, 258]),
        ({"pre": "llama-bpe"}, [258, 256]),
        ({"pre": "llama-bpe", "add_bos_token": False}, [256]),
    ],
)
def test_tokens_around_a_text_are_what_the_file_says_else_what_its_kind_implies(
    changes: dict[str, Any], ids: list[int]
) -> None:
    assert built(byte_level(**changes)).encode("ab", add_special=True) == ids
    assert built(byte_level(**changes)).encode("ab", add_special=False) == [256]


def test_every_end_token_that_the_file_names_ends_a_text() -> None:
    tokenizer = built(byte_level(eot_token_id=257))
    assert tokenizer.eos_ids == {257, 258}
    assert tokenizer.eos_token == "<think now>"  # templates write the end of text, whichever id is lower


@pytest.mark.parametrize(
    ("pre", "text", "cuts"),
    [
        ("gpt-2", "It's 1234 <=  x\n\n y", ["It", "'s", " 1234", " <=", " ", " x", "\n\n", " y"]),
        ("smollm", "a  12", ["a", "  ", "1", "2"]),
        ("smollm", "x = 34;", ["x", " =", " ", "3", "4", ";"]),
        (
            "llama-bpe",
            "It'S 12345 (f) x\n\n  y",
            ["It", "'S", " ", "123", "45", " (", "f", ")", " x", "\n\n", " ", " y"],
        ),
        ("qwen2", "v12 (ok)\n", ["v", "1", "2", " (", "ok", ")\n"]),
        ("qwen35", "e\u0301a12", ["e\u0301a", "1", "2"]),
        ("tekken", "camelCase/\n12", ["camel", "Case", "/\n", "1", "2"]),
        ("default", "a+b 12345", ["a", "+", "b", " ", "123", "45"]),
    ],
)
def test_text_is_cut_by_the_published_rule_of_its_pre_name(pre: str, text: str, cuts: list[str]) -> None:
    native = gguf_tokenizer.build(byte_level(pre=pre)).native
    alphabet = byte_alphabet()
    pieces = [piece for piece, _ in native.pre_tokenizer.pre_tokenize_str(text)]
    assert [bytes(alphabet.index(c) for c in piece).decode() for piece in pieces] == cuts


def test_a_piece_that_is_a_whole_token_is_taken_where_merges_are_ignored() -> None:
    tokens = [*byte_alphabet(), "ab", "<|end|>", "xyz"]
    metadata = byte_level(tokens=tokens, token_type=[1] * 257 + [3, 1], bos_token_id=257, eos_token_id=257)
    letters = [byte_alphabet().index(letter) for letter in "xyz"]
    assert built({**metadata, "pre": "gpt-2"}).encode("xyz", add_special=False) == letters
    assert built({**metadata, "pre": "llama3"}).encode("xyz", add_special=False) == [258]


@pytest.mark.parametrize(
    ("changes", "slug", "named"),
    [
        ({"pre": "klingon"}, "tokenizer/pre-unknown", "klingon"),
        ({"model": "rwkv"}, "tokenizer/model-unknown", "rwkv"),
        ({"model": None}, "tokenizer/model-unknown", "None"),
        ({"tokens": None}, "tokenizer/gguf-malformed", "tokens is missing"),
        ({"merges": None}, "tokenizer/gguf-malformed", "merges is missing"),
        ({"merges": ["ab"]}, "tokenizer/gguf-malformed", "'ab' is no pair"),
        ({"merges": ["a q"]}, "tokenizer/gguf-malformed", "aq"),
        ({"token_type": [1]}, "tokenizer/gguf-malformed", "token_type has 1 entries for 259"),
        ({"eos_token_id": 259}, "tokenizer/gguf-malformed", "eos_token_id = 259"),
        ({"tokens": [*byte_alphabet(), "ab", "ab", "xyz"]}, "tokenizer/gguf-malformed", "256 and 257 are both 'ab'"),
    ],
)
def test_metadata_that_does_not_make_a_tokenizer_is_refused_by_name(
    changes: dict[str, Any], slug: str, named: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        built(byte_level(**changes))
    assert caught.value.slug == slug
    assert named in str(caught.value)


def test_the_refusal_of_an_unknown_pre_lists_the_known_ones() -> None:
    with pytest.raises(CheckpointError, match="llama-bpe.*qwen2.*smollm"):
        built(byte_level(pre="klingon"))


LETTERS = ("a", "b", "c", "▁")


def sentencepiece(pieces: Sequence[str], **changes: Any) -> dict[str, Any]:
    """Metadata: unknown, bos, eos, 256 bytes, the letters, then `pieces`, the best score first."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *LETTERS, *pieces]
    types = [2, 3, 3, *[6] * 256, *[1] * (len(LETTERS) + len(pieces))]
    scores = [0.0] * 259 + [-1000.0] * len(LETTERS) + [-float(rank) for rank in range(len(pieces))]
    metadata = {"model": "llama", "tokens": tokens, "token_type": types, "scores": scores}
    return {**metadata, "unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **changes}


def join_best_neighbours(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's rule, word for word: of all neighbours whose joint piece exists, join the best; first on ties."""
    pieces = list(text)
    while True:
        pairs = [
            (-scores[a + b], i) for i, (a, b) in enumerate(zip(pieces, pieces[1:], strict=False)) if a + b in scores
        ]
        if not pairs:
            return pieces
        _, at = min(pairs)
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]


def overlaps_itself(piece: str) -> bool:
    """Begins as it ends: two equal pieces may then compete for a letter, and which cut comes first matters."""
    return any(piece.startswith(piece[i:]) for i in range(1, len(piece)))


PIECES = st.lists(st.text(st.sampled_from(LETTERS), min_size=2, max_size=4), max_size=12, unique=True)


@given(pieces=PIECES, text=st.text(st.sampled_from("abc "), max_size=20))
def test_merges_from_scores_join_what_sentencepiece_joins(pieces: list[str], text: str) -> None:
    assume(not any(overlaps_itself(piece) for piece in pieces))
    scores = {piece: -float(rank) for rank, piece in enumerate(pieces)}
    tokenizer = built(sentencepiece(pieces, add_space_prefix=False))
    expected = join_best_neighbours(text.replace(" ", "▁"), scores)
    assert [tokenizer.token_bytes(i).decode() for i in tokenizer.encode(text, add_special=False)] == [
        piece.replace("▁", " ") for piece in expected
    ]


def test_sentencepiece_falls_back_to_bytes_and_back() -> None:
    tokenizer = built(sentencepiece(["▁a", "bc"]))
    ids = tokenizer.encode("a bc é", add_special=True)
    e_acute = [3 + byte for byte in "é".encode()]
    assert ids == [1, 263, 262, 264, 262, *e_acute]
    assert tokenizer.decode(ids, skip_special=True) == "a bc é"


def test_a_continuation_keeps_the_space_that_a_beginning_loses() -> None:
    tokenizer = built(sentencepiece(["▁a"]))
    assert tokenizer.decode([263], skip_special=True) == "a"
    assert tokenizer.stream(skip_special=True).push(263) == " a"


def test_control_and_byte_tokens_are_never_the_outcome_of_merging() -> None:
    merges = gguf_tokenizer.merges_from_scores(
        ["a", "b", "c", "ab", "abc", "bc"], [0, 0, 0, -1, -2, -3], [1, 1, 1, TokenType.CONTROL, 1, 1]
    )
    assert merges == [("a", "bc"), ("b", "c")]


def test_without_space_prefix_a_text_begins_as_it_is() -> None:
    tokenizer = built(sentencepiece(["▁a"], add_space_prefix=False))
    assert tokenizer.encode("a", add_special=False) == [259]
    assert tokenizer.decode([263], skip_special=True) == " a"


def test_scores_that_are_missing_are_named() -> None:
    metadata = sentencepiece([])
    del metadata["scores"]
    with pytest.raises(CheckpointError, match="scores is missing"):
        built(metadata)
