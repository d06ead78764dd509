"""SamplingParams: what a request asks of sampling and stopping, validated on construction. Torch-free.

Names, meanings, ranges and defaults are vLLM's. Owns no tokeniser: `bad_words` and `stop` stay text here.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, TypeVar

from proa.errors import RequestError

P = TypeVar("P")


class _Validated(type):
    """Reads and checks every keyword before the frozen instance exists; what is not a field is refused by name."""

    def __call__(cls: type[P], **given: Any) -> P:
        _refuse_unknown(given)
        values = {name: _READERS[name](name, value) for name, value in given.items()}
        instance: P = type.__call__(cls, **values)
        return instance


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(metaclass=_Validated):
    """Frozen and hashable; sequences are kept as tuples, `logit_bias` as a read-only mapping.

    `temperature` 0 is greedy: top_k, top_p and min_p are then without effect. `top_k` 0 or -1: no limit.
    `repetition_penalty` looks at prompt and output, the other two penalties at the output only.
    `seed` None (or -1): a fresh one per request. `stop` takes one string or several. `max_tokens` None: until the
    context is full; the default is 16, as in vLLM. `logprobs` k: the emitted token's and the best k, of the raw logits;
    0: the emitted token's only; -1: of the whole vocabulary; None: none. `speculative` False: this request decodes
    plainly, which changes its speed and nothing else.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}), hash=False)
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 16
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    bad_words: Sequence[str] = ()
    allowed_token_ids: Sequence[int] | None = None
    structured_outputs: object | None = None
    skip_special_tokens: bool = True
    speculative: bool = True

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _bad("min_tokens", self.min_tokens, f"it must not exceed max_tokens = {self.max_tokens}")
        if self.n > 1 and self.is_greedy:
            raise _bad("n", self.n, "it must be 1 when temperature is 0: greedy choices are all the same")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> SamplingParams:
        """As the constructor, from names that came as data (JSON, generation_config.json)."""
        return cls(**values)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0


def check_vocab(params: SamplingParams, vocab: int) -> None:
    """Refuse token ids that a model of `vocab` tokens does not have. Called at admission."""
    for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
        ids: Sequence[int] | Mapping[int, float] = getattr(params, name) or ()
        unknown = [token for token in ids if token >= vocab]
        if unknown:
            raise _bad(name, unknown[0], f"token ids of this model are 0 to {vocab - 1}")


def _bad(name: str, value: object, rule: str) -> RequestError:
    return RequestError("request/sampling-params", f"{name} = {value!r} cannot be used: {rule}.")


def _refuse_unknown(given: Mapping[str, object]) -> None:
    known = [entry.name for entry in fields(SamplingParams)]
    for name in given:
        if name in known:
            continue
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known names: {', '.join(known)}"
        raise RequestError("request/unknown-sampling-param", f"{name} is not a sampling parameter.", hint=hint)


# Readers: (name, value as given) -> value as kept.
Reader = Callable[[str, Any], Any]


def _integer(low: int, high: int | None = None) -> Reader:
    rule = f"an integer from {low} to {high} is needed" if high is not None else f"an integer >= {low} is needed"

    def read(name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
            raise _bad(name, value, rule)
        return value

    return read


def _number(low: float, high: float = math.inf, *, above: bool = False) -> Reader:
    rule = f"a finite number {'above' if above else '>='} {low:g}" + (f" and <= {high:g}" if high < math.inf else "")

    def read(name: str, value: Any) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or not low <= value <= high or (above and value == low):
            raise _bad(name, value, f"{rule} is needed")
        return float(value)

    return read


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _bad(name, value, "true or false is needed")
    return value


def _or_none(read: Reader) -> Reader:
    return lambda name, value: None if value is None else read(name, value)


def _texts(name: str, value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    entries = (value,) if isinstance(value, str) else value
    is_list = isinstance(entries, Sequence) and not isinstance(entries, bytes)
    if not is_list or not all(isinstance(entry, str) and entry for entry in entries):
        raise _bad(name, value, "strings that are not empty are needed")
    return tuple(entries)


def _ids(name: str, value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise _bad(name, value, "a list of token ids is needed")
    return tuple(_token_id(name, entry) for entry in value)


def _some_ids(name: str, value: Any) -> tuple[int, ...]:
    ids = _ids(name, value)
    if not ids:
        raise _bad(name, value, "at least one token id is needed")
    return ids


def _bias(name: str, value: Any) -> Mapping[int, float]:
    if value is None:
        return MappingProxyType({})
    if not isinstance(value, Mapping):
        raise _bad(name, value, "a mapping from token id to bias is needed")
    number = _number(-100, 100)
    entries = {
        # JSON has no integer keys.
        _token_id(name, int(key) if isinstance(key, str) and key.isdecimal() else key): number(f"{name}[{key}]", bias)
        for key, bias in value.items()
    }
    return MappingProxyType(dict(sorted(entries.items())))


def _seed(name: str, value: Any) -> int | None:
    return None if value is None or value == -1 else _integer(-(2**63), 2**64 - 1)(name, value)


def _unsupported(name: str, value: Any) -> None:
    if value is not None:
        raise RequestError("request/not-supported", f"{name} is not supported in this version.")


_token_id = _integer(0)

_READERS: Mapping[str, Reader] = MappingProxyType(
    {
        "n": _integer(1),
        "temperature": _number(0),
        "top_p": _number(0, 1, above=True),
        "top_k": _integer(-1),
        "min_p": _number(0, 1),
        "presence_penalty": _number(-2, 2),
        "frequency_penalty": _number(-2, 2),
        "repetition_penalty": _number(0, above=True),
        "logit_bias": _bias,
        "seed": _seed,
        "stop": _texts,
        "stop_token_ids": _ids,
        "include_stop_str_in_output": _flag,
        "ignore_eos": _flag,
        "min_tokens": _integer(0),
        "max_tokens": _or_none(_integer(1)),
        "logprobs": _or_none(_integer(-1)),
        "prompt_logprobs": _or_none(_integer(-1)),
        "bad_words": _texts,
        "allowed_token_ids": _or_none(_some_ids),
        "structured_outputs": _unsupported,
        "skip_special_tokens": _flag,
        "speculative": _flag,
    }
)
