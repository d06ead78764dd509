"""Text to token ids and back, whatever the checkpoint keeps its tokenizer in. Owns no chat template, no stop strings.

The library underneath is native code: what it raises, panics included, becomes a RequestError here. Torch-free.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from tokenizers import AddedToken
from tokenizers import Tokenizer as NativeTokenizer

from proa.checkpoint.types import TokenizerSource
from proa.engine import gguf_tokenizer
from proa.engine.pieces import Utf8Stream, piece_decoder
from proa.errors import CheckpointError, RequestError

MAX_CHARACTERS = 4_000_000
"""Longest text that is encoded. Encoding 1 M characters takes up to half a second."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Specials:
    """Tokens with a role. `add_bos`, `add_eos`: put around a text by Proa, because the native tokenizer does not.

    `eos_id` is the end of text; `eos_ids` adds the ends of turns and messages that the tokenizer's own files name.
    generation_config.json may name more.
    """

    bos_id: int | None
    eos_id: int | None
    eos_ids: frozenset[int]
    add_bos: bool
    add_eos: bool


class Tokenizer:
    """Safe to share between threads. `special_ids` are left out of text where special tokens are skipped."""

    def __init__(self, native: NativeTokenizer, specials: Specials, vocab_size: int, where: str) -> None:
        native.no_truncation()  # a tokenizer.json may carry a training run's length limit and padding
        native.no_padding()
        self._native = native
        self._pieces = piece_decoder(_decoder_of(native), where)
        self._bytes: dict[int, bytes] = {}
        self.specials = specials
        self.special_ids = frozenset(i for i, token in native.get_added_tokens_decoder().items() if token.special)
        self.vocab_size = vocab_size

    @classmethod
    def from_source(cls, source: TokenizerSource) -> Tokenizer:
        if source.json_file is not None:
            native = _load(source.json_file)
            _add_configured(native, source.config, source.json_file)
            specials = _configured_specials(native, source.config, source.json_file)
            vocab_size = max(native.get_vocab(with_added_tokens=True).values(), default=-1) + 1
            return cls(native, specials, vocab_size, str(source.json_file))
        if source.gguf is None:
            raise CheckpointError(
                "tokenizer/missing", "the checkpoint has no tokenizer.", hint="add its tokenizer.json to the directory"
            )
        built = gguf_tokenizer.build(source.gguf)
        specials = Specials(
            bos_id=built.bos_id,
            eos_id=built.eos_id,
            eos_ids=built.eos_ids,
            add_bos=built.add_bos,
            add_eos=built.add_eos,
        )
        # Asking the native tokenizer would copy its whole vocabulary, 28 ms for 49,152 tokens.
        return cls(built.native, specials, built.vocab_size, "tokenizer.ggml")

    @property
    def eos_ids(self) -> frozenset[int]:
        return self.specials.eos_ids

    @property
    def bos_token(self) -> str | None:
        """The text of the token that begins a sequence, as chat templates name it."""
        return self._text_of(self.specials.bos_id)

    @property
    def eos_token(self) -> str | None:
        return self._text_of(self.specials.eos_id)

    def _text_of(self, token: int | None) -> str | None:
        return None if token is None else self._native.id_to_token(token)

    def encode(self, text: str, add_special: bool) -> list[int]:
        """Token ids of `text`, special tokens that it spells out included. `add_special`: with BOS or EOS around it,
        if that is the model's habit; not for the output of a chat template, which writes them itself."""
        if len(text) > MAX_CHARACTERS:
            raise RequestError(
                "request/text-too-long", f"the text has {len(text)} characters; at most {MAX_CHARACTERS} are encoded."
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                "request/text-not-unicode",
                f"character {error.start} of the text is half a surrogate pair ({text[error.start]!a}).",
            ) from error
        try:
            ids = _guarded(lambda: self._native.encode(text, add_special_tokens=add_special).ids)
        except _NativeFailure as error:
            raise RequestError("request/tokenizer-failed", f"the tokenizer failed on the text: {error}.") from error
        if not add_special:
            return ids
        before = self.specials.bos_id if self.specials.add_bos else None
        after = self.specials.eos_id if self.specials.add_eos else None
        return [*(() if before is None else (before,)), *ids, *(() if after is None else (after,))]

    def decode(self, ids: Sequence[int], skip_special: bool) -> str:
        """The text of `ids` from the start of a text on. Ids beyond the vocabulary (padding rows) have no text."""
        skipped: frozenset[int] = self.special_ids if skip_special else frozenset()
        data = b"".join(self.token_bytes(token) for token in ids if token not in skipped)
        text = data.decode("utf-8", "replace")
        return text.removeprefix(" ") if self._pieces.strip_first else text

    def token_bytes(self, token: int) -> bytes:
        """What one token adds to a text, in UTF-8; may be part of a character."""
        known = self._bytes.get(token)
        if known is not None:
            return known
        if token < 0:
            raise RequestError("request/token-id", f"{token} is not a token id.")
        piece = self._native.id_to_token(token) if token < self.vocab_size else None
        if piece is None:
            return b""
        return self._bytes.setdefault(token, self._pieces.to_bytes(piece))

    def token_text(self, token: int) -> str:
        """One token alone as text, for logprobs; U+FFFD where it is part of a character."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def token_id(self, text: str) -> int | None:
        """The id of the token that the vocabulary spells `text`."""
        return self._native.token_to_id(text)

    def stream(self, skip_special: bool) -> TokenStream:
        """Text of tokens that arrive one at a time, as the continuation of a prompt."""
        return TokenStream(self, skip_special)


class TokenStream:
    """Text from tokens, each at constant cost. Unlike `decode` it keeps a leading space: a prompt stands before it."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped: frozenset[int] = tokenizer.special_ids if skip_special else frozenset()
        self._utf8 = Utf8Stream()

    def push(self, token: int) -> str:
        """The characters that this token completes."""
        return "" if token in self._skipped else self._utf8.push(self._tokenizer.token_bytes(token))

    def flush(self) -> str:
        return self._utf8.flush()


class _NativeFailure(Exception):
    """The tokenizers library raised, or panicked."""


def _guarded(call: Callable[[], T]) -> T:
    try:
        return call()
    except Exception as error:
        raise _NativeFailure(str(error)) from error
    except BaseException as error:
        # A panic of the native library is a BaseException of its own, which no `except Exception` further up sees.
        if type(error).__name__ != "PanicException":
            raise
        raise _NativeFailure(str(error)) from error


def _decoder_of(native: NativeTokenizer) -> Mapping[str, Any] | None:
    """The decoder as tokenizer.json describes it, without serialising the vocabulary beside it."""
    decoder: Any = native.decoder
    return None if decoder is None else json.loads(decoder.__getstate__())


def _load(file: Path) -> NativeTokenizer:
    try:
        text = file.read_text(encoding="utf-8")
        return _guarded(lambda: NativeTokenizer.from_str(text))
    except (OSError, UnicodeDecodeError, _NativeFailure) as error:
        raise CheckpointError(
            "tokenizer/unreadable", f"{file}: not a tokenizer that can be read.", facts=[str(error)]
        ) from error


def _add_configured(native: NativeTokenizer, config: Mapping[str, Any], file: Path) -> None:
    """Tokens that only tokenizer_config.json declares; each must get the id that it is declared with."""
    declared = cast("Mapping[str, Mapping[str, Any]]", config.get("added_tokens_decoder") or {})
    for index, token in sorted((int(key), token) for key, token in declared.items()):
        text = token["content"]
        if native.token_to_id(text) is None:
            flags = {key: bool(token.get(key, False)) for key in ("single_word", "lstrip", "rstrip", "normalized")}
            adder = cast("Any", native)  # the stubs leave the list's element type open
            adder.add_tokens([AddedToken(text, special=bool(token.get("special", False)), **flags)])
        if native.token_to_id(text) != index:
            raise CheckpointError(
                "tokenizer/special-unknown",
                f"{file}: {text!r} has id {native.token_to_id(text)}, but tokenizer_config.json says {index}.",
            )


def _configured_specials(native: NativeTokenizer, config: Mapping[str, Any], file: Path) -> Specials:
    bos, eos = (_configured_id(native, config, role, file) for role in ("bos_token", "eos_token"))
    # Where tokenizer.json has a post-processor, that is what adds tokens, and the flags only repeat it.
    flags: Mapping[str, Any] = config if native.post_processor is None else {}
    return Specials(
        bos_id=bos,
        eos_id=eos,
        eos_ids=frozenset() if eos is None else frozenset((eos,)),
        add_bos=bool(flags.get("add_bos_token", False)),
        add_eos=bool(flags.get("add_eos_token", False)),
    )


def _configured_id(native: NativeTokenizer, config: Mapping[str, Any], role: str, file: Path) -> int | None:
    entry = config.get(role)
    text = cast("Mapping[str, Any]", entry).get("content") if isinstance(entry, Mapping) else entry
    if text is None:
        return None
    index = native.token_to_id(str(text))
    if index is None:
        raise CheckpointError(
            "tokenizer/special-unknown", f"{file}: tokenizer_config.json's {role} {text!r} is not in the vocabulary."
        )
    return index
