"""Builds a tokenizer from GGUF metadata (`tokenizer.ggml.*`). Owns the table of `pre` names; owns no encoding.

Two kinds: `gpt2`, byte-level BPE with stored merges, and `llama`, SentencePiece BPE whose merges follow from scores.
Text is not normalised: that is how files of this format are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType
from typing import Any, cast

from tokenizers import AddedToken, Regex, decoders, pre_tokenizers
from tokenizers import Tokenizer as NativeTokenizer
from tokenizers.models import BPE

from proa.errors import CheckpointError

WORD_MARK = "▁"


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class PreTokenizer:
    """How text is cut before merging: each expression in turn isolates its matches within the pieces so far.

    `ignore_merges`: a piece that is a token as a whole is taken as it is. `add_bos`: where the file does not say.
    """

    splits: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GROUPS = (
    (("default",), PreTokenizer(splits=(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))),
    (("gpt-2", "phi-2", "olmo", "mpt"), PreTokenizer(splits=(_GPT2,))),
    (("smollm", "starcoder", "refact", "command-r", "codeshell"), PreTokenizer(splits=(r"\p{N}", _GPT2))),
    (("llama-bpe", "llama3", "llama-v3"), PreTokenizer(splits=(_LLAMA3,), ignore_merges=True, add_bos=True)),
    (("dbrx", "smaug-bpe"), PreTokenizer(splits=(_LLAMA3,))),
    (("qwen2", "deepseek-r1-qwen", "stablelm2"), PreTokenizer(splits=(_QWEN2,))),
    (("qwen35",), PreTokenizer(splits=(_QWEN35,))),
    (("tekken",), PreTokenizer(splits=(_TEKKEN,), ignore_merges=True, add_bos=True)),
)
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = MappingProxyType({name: pre for names, pre in _GROUPS for name in names})


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFTokenizer:
    """The tokenizer, and what the file says (or its kind implies) of tokens around a text."""

    native: NativeTokenizer
    vocab_size: int
    add_bos: bool
    add_eos: bool
    bos_id: int | None
    eos_id: int | None
    eos_ids: frozenset[int]


def build(metadata: Mapping[str, Any]) -> GGUFTokenizer:
    """`metadata`: the values of `tokenizer.ggml.*`, without that prefix."""
    vocabulary = _read_vocabulary(metadata)
    match metadata.get("model"):
        case "gpt2":
            pre = _pre_tokenizer(metadata)
            native, add_bos = _byte_level(vocabulary, metadata, pre), pre.add_bos
        case "llama":
            native, add_bos = _sentencepiece(vocabulary, metadata), True
        case other:
            raise CheckpointError(
                "tokenizer/model-unknown",
                f"tokenizer.ggml.model = {other!r} is not read.",
                facts=["known: gpt2, llama"],
            )
    ids = {key: vocabulary.token_id(metadata, key) for key in ("bos", "eos", "eot", "eom")}
    marked = {index for index in (*ids.values(), vocabulary.token_id(metadata, "unknown")) if index is not None}
    special = vocabulary.special(marked)
    whole = [text for text in vocabulary.of_type(TokenType.USER_DEFINED) if text not in special]
    adder = cast("Any", native)  # the stubs leave the element type of these lists open
    adder.add_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    adder.add_tokens([AddedToken(text, normalized=False, special=False) for text in whole])
    ends = (ids["eos"], ids["eot"], ids["eom"])
    return GGUFTokenizer(
        native=native,
        vocab_size=len(vocabulary.tokens),
        add_bos=bool(metadata.get("add_bos_token", add_bos)),
        add_eos=bool(metadata.get("add_eos_token", False)),
        bos_id=ids["bos"],
        eos_id=ids["eos"],
        eos_ids=frozenset(index for index in ends if index is not None),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Vocabulary:
    tokens: Sequence[str]
    types: Sequence[int]
    ids: Mapping[str, int]

    def of_type(self, kind: TokenType) -> list[str]:
        return [token for token, stored in zip(self.tokens, self.types, strict=True) if stored == kind]

    def special(self, also: set[int]) -> dict[str, None]:
        """Control tokens and those that the file names by their role, in the order of ids."""
        kinds = (TokenType.CONTROL, TokenType.UNKNOWN)
        stored = enumerate(zip(self.tokens, self.types, strict=True))
        return {token: None for index, (token, kind) in stored if kind in kinds or index in also}

    def token_id(self, metadata: Mapping[str, Any], role: str) -> int | None:
        index = metadata.get(f"{role}_token_id")
        if index is None:
            return None
        if not 0 <= index < len(self.tokens):
            raise _malformed(f"tokenizer.ggml.{role}_token_id = {index}, but there are {len(self.tokens)} tokens.")
        return int(index)


def _read_vocabulary(metadata: Mapping[str, Any]) -> _Vocabulary:
    tokens = _array(metadata, "tokens", None)
    ids = {token: index for index, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        second = next(index for index, token in enumerate(tokens) if ids[token] != index)
        token = tokens[second]
        raise _malformed(f"tokenizer.ggml.tokens: ids {second} and {ids[token]} are both {token!r}.")
    types = (
        _array(metadata, "token_type", len(tokens)) if "token_type" in metadata else [TokenType.NORMAL] * len(tokens)
    )
    return _Vocabulary(tokens=tokens, types=types, ids=ids)


def _array(metadata: Mapping[str, Any], key: str, length: int | None) -> Sequence[Any]:
    values = metadata.get(key)
    if values is None:
        raise _malformed(f"tokenizer.ggml.{key} is missing.")
    if length is not None and len(values) != length:
        raise _malformed(f"tokenizer.ggml.{key} has {len(values)} entries for {length} tokens.")
    return values


def _malformed(message: str) -> CheckpointError:
    return CheckpointError(
        "tokenizer/gguf-malformed", message, hint="the file was converted wrongly; fetch another one"
    )


def _pre_tokenizer(metadata: Mapping[str, Any]) -> PreTokenizer:
    name = metadata.get("pre", "default")  # files older than the key are read as if it said so
    pre = PRE_TOKENIZERS.get(name)
    if pre is None:
        raise CheckpointError(
            "tokenizer/pre-unknown",
            f"tokenizer.ggml.pre = {name!r}: how this tokenizer cuts text is not known.",
            facts=[f"known: {', '.join(sorted(PRE_TOKENIZERS))}"],
            hint="use the model's directory in the Hugging Face layout, whose tokenizer.json says it",
        )
    return pre


def _byte_level(vocabulary: _Vocabulary, metadata: Mapping[str, Any], pre: PreTokenizer) -> NativeTokenizer:
    merges = _merges(_array(metadata, "merges", None))
    native = NativeTokenizer(_bpe(vocabulary, merges, ignore_merges=pre.ignore_merges))
    cuts = [pre_tokenizers.Split(Regex(expression), behavior="isolated") for expression in pre.splits]
    native.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    native.decoder = decoders.ByteLevel()
    return native


def _merges(lines: Sequence[str]) -> list[tuple[str, str]]:
    """Both sides of each line. Three plain loops: a call per line would double the time of 49,000 (25 ms)."""
    parts = [line.partition(" ") for line in lines]
    for left, space, right in parts:
        if not (left and right):
            raise _malformed(f"tokenizer.ggml.merges: {left + space + right!r} is no pair.")
    return [(left, right) for left, _, right in parts]


def _bpe(vocabulary: _Vocabulary, merges: list[tuple[str, str]], **options: Any) -> BPE:
    try:
        return BPE(vocab=dict(vocabulary.ids), merges=merges, **options)
    except Exception as error:  # the library raises bare Exception, naming the token that a merge lacks
        raise _malformed(f"tokenizer.ggml.merges do not fit the tokens: {error}.") from error


def _sentencepiece(vocabulary: _Vocabulary, metadata: Mapping[str, Any]) -> NativeTokenizer:
    scores = _array(metadata, "scores", len(vocabulary.tokens))
    unknown = vocabulary.token_id(metadata, "unknown")
    options = {} if unknown is None else {"unk_token": vocabulary.tokens[unknown]}
    merges = merges_from_scores(vocabulary.tokens, scores, vocabulary.types)
    native = NativeTokenizer(_bpe(vocabulary, merges, fuse_unk=True, byte_fallback=True, **options))
    prefix = bool(metadata.get("add_space_prefix", True))
    native.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement=WORD_MARK, prepend_scheme="first" if prefix else "never", split=False
    )
    steps = [decoders.Replace(WORD_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    native.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return native


def merges_from_scores(tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    """The merges that SentencePiece's rule "join the neighbours whose piece scores best" amounts to.

    Every cut of a piece into two pieces is a merge with the piece's score. Cuts of one piece: longest left part first.
    Only pieces that text may form take part.
    """
    usable = (TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED)
    pieces = {token: score for token, score, kind in zip(tokens, scores, types, strict=True) if kind in usable}
    ranked = [
        (-score, -cut, piece[:cut], piece[cut:])
        for piece, score in pieces.items()
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
    ranked.sort(key=lambda entry: entry[:2])
    return [(left, right) for _, _, left, right in ranked]
