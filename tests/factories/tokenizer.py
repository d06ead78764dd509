"""A byte-level BPE tokenizer of 512 tokens, written as plain JSON: every id has a known text, many can be chosen.

Layout of ids: 0..5 specials, 6..261 the 256 bytes in order, then merged words, then fillers up to `size`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

SPECIALS = ("<bos>", "<eos>", "<pad>", "<|user|>", "<|assistant|>", "<|system|>")
BOS, EOS, PAD = 0, 1, 2
FIRST_BYTE = len(SPECIALS)
FIRST_WORD = FIRST_BYTE + 256
SIZE = 512
WORDS = ("the", " the", " and", " of", " engine", " token", "ing", " draft", " model", " target", "er", " in", " plan")
CHAT_TEMPLATE = (
    "<bos>{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_id(byte: int) -> int:
    """The id of the token that is this one byte."""
    return FIRST_BYTE + byte


def byte_ids(text: str) -> list[int]:
    """`text` as one token per byte."""
    return [byte_id(byte) for byte in text.encode()]


def write_tokenizer(path: Path, *, texts: Mapping[int, bytes], size: int = SIZE, merges: bool = True) -> None:
    """Write tokenizer.json and tokenizer_config.json (chat template inside) into `path`.

    `texts` gives chosen ids (>= FIRST_WORD) chosen bytes; they decode but are never the outcome of encoding.
    """
    vocab, pairs = _vocabulary(texts, size, merges)
    added = [
        {"id": i, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
        for i, text in enumerate(SPECIALS)
    ]  # fmt: skip
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    document = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": vocab, "merges": pairs},
    }  # fmt: skip
    (path / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8")
    config = {
        "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "add_bos_token": False,
        "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT_TEMPLATE,
    }  # fmt: skip
    (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def _vocabulary(texts: Mapping[int, bytes], size: int, merges: bool) -> tuple[dict[str, int], list[list[str]]]:
    alphabet = byte_alphabet()
    vocab = {text: i for i, text in enumerate(SPECIALS)}
    vocab |= {alphabet[byte]: byte_id(byte) for byte in range(256)}
    chosen = {i: "".join(alphabet[b] for b in data) for i, data in texts.items()}
    bad = [i for i, text in chosen.items() if not FIRST_WORD <= i < size or text in vocab]
    if bad or len(set(chosen.values())) != len(chosen):
        raise ValueError(f"texts: ids {bad} are out of range or their texts are taken")
    free = iter(i for i in range(FIRST_WORD, size) if i not in chosen)
    vocab |= {text: i for i, text in chosen.items()}
    pairs: list[list[str]] = []
    for word in WORDS if merges else ():
        text = "".join(alphabet[b] for b in word.encode())
        for end in range(2, len(text) + 1):
            if text[:end] not in vocab:
                vocab[text[:end]] = next(free)
                pairs.append([text[: end - 1], text[end - 1]])
    vocab |= {f"{alphabet[ord(' ')]}{i}": i for i in free}
    return vocab, pairs


def byte_alphabet() -> tuple[str, ...]:
    """GPT-2's printable stand-in for each byte."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(256, 512))
    return tuple(chr(b) if b in printable else chr(next(spare)) for b in range(256))
