from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from proa.checkpoint.open import open_checkpoint
from proa.checkpoint.types import TokenizerSource
from proa.checkpoint.vocab import token_texts
from proa.errors import CheckpointError


def source(folder: Path, content: Any) -> TokenizerSource:
    path = folder / "tokenizer.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return TokenizerSource(json_file=path, gguf=None, config={}, chat_template=None)


def gguf_source(**metadata: Any) -> TokenizerSource:
    return TokenizerSource(json_file=None, gguf=metadata, config={}, chat_template=None)


def test_texts_by_id_are_those_of_the_tokenizers_library(tiny: Callable[..., Path]) -> None:
    folder = tiny("llama")
    library = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer = open_checkpoint(folder).tokenizer
    assert tokenizer is not None
    texts = token_texts(tokenizer)
    assert len(texts) == library.get_vocab_size(with_added_tokens=True)
    assert texts == tuple(library.id_to_token(index) for index in range(len(texts)))


def test_a_list_form_vocabulary_counts_its_ids(tmp_path: Path) -> None:
    content = {"model": {"type": "Unigram", "vocab": [["<unk>", 0.0], ["▁a", -1.5]]}, "added_tokens": []}
    assert token_texts(source(tmp_path, content)) == ("<unk>", "▁a")


def test_added_tokens_extend_the_vocabulary_and_holes_are_none(tmp_path: Path) -> None:
    content = {
        "model": {"vocab": {"a": 0, "b": 1}},
        "added_tokens": [{"id": 3, "content": "<x>"}, {"id": 1, "content": "b"}],
    }
    assert token_texts(source(tmp_path, content)) == ("a", "b", None, "<x>")


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"model": None},
        {"model": {"vocab": 3}},
        {"model": {"vocab": {"a": -1}}},
        {"model": {"vocab": {"a": True}}},
        {"model": {"vocab": {"a": 2**40}}},
        {"model": {"vocab": {"a": "0"}}},
        {"model": {"vocab": {"a": 0, "b": 0}}},
        {"model": {"vocab": ["a"]}},
        {"model": {"vocab": [[3, 0.0]]}},
        {"model": {"vocab": {}}, "added_tokens": {}},
        {"model": {"vocab": {}}, "added_tokens": [{"id": 1}]},
    ],
)
def test_a_vocabulary_of_another_form_is_refused_naming_the_file(tmp_path: Path, content: Any) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json") as error:
        token_texts(source(tmp_path, content))
    assert error.value.slug == "checkpoint/bad-tokenizer"


def test_a_token_listed_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="'a' appears twice"):
        token_texts(source(tmp_path, '{"model": {"vocab": {"a": 0, "a": 1}}}'))


def test_gguf_tokens_are_taken_as_stored_and_padding_rows_are_none() -> None:
    assert token_texts(gguf_source(tokens=("a", "<x>", "[PAD2]"), token_type=(1, 3, 5))) == ("a", "<x>", None)
    assert token_texts(gguf_source(tokens=("a", "b"))) == ("a", "b")


@pytest.mark.parametrize(
    "metadata", [{}, {"tokens": "ab"}, {"tokens": ("a", "b"), "token_type": (1,)}, {"tokens": (1, 2)}]
)
def test_a_gguf_without_a_readable_token_list_is_refused(metadata: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError) as error:
        token_texts(gguf_source(**metadata))
    assert error.value.slug == "checkpoint/bad-tokenizer"


@pytest.mark.model
def test_the_real_models_tokens_are_read(smollm2: Path) -> None:
    tokenizer = open_checkpoint(smollm2).tokenizer
    assert tokenizer is not None
    texts = token_texts(tokenizer)
    assert len(texts) == 49152 and texts[:3] == ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
