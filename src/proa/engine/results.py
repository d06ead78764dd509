"""What a caller gets for a prompt. Owns the shapes that programs read; engine/session.py fills them. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprob:
    """Log probability of a token under the raw logits; `rank` 1 is the most likely token of its position."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One choice. `text`, `token_ids` and `logprobs` end at the same token.

    `logprobs[i]` maps token ids to their Logprob at output position i, the emitted token first. `finish_reason` is
    stop, length or abort; `stop_reason` is the stop string or stop token id that ended the choice, None for the
    model's own end of text.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Mapping[int, Logprob], ...] | None
    cumulative_logprob: float | None
    finish_reason: str
    stop_reason: int | str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics:
    """Seconds are wall time since admission. `tokens_per_second` counts the output tokens of all choices, first token
    excluded, over the time after the first one. `speculative_decoding` is None when nothing was proposed for it."""

    time_to_first_token: float
    total_seconds: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    tokens_per_second: float
    speculative_decoding: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """One prompt's answer, with `n` choices. `prompt_logprobs[0]` is None: nothing stands before the first token."""

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: tuple[Mapping[int, Logprob] | None, ...] | None
    outputs: tuple[CompletionOutput, ...]
    metrics: RequestMetrics
