"""What a request's tokens amount to: text, stream pieces, and when it ends. Owns no sampling and no logprobs.

Tokens come one at a time, accepted proposals like any other, so speculative and plain decoding end at the same token.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from proa.engine.tokenizer import Tokenizer
from proa.sampling.params import SamplingParams


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class OutputState:
    """One choice of a request; the verifier's TokenSink.

    The token that completes a stop string, or is a stop token, is the last of `token_ids`; `text` ends before the stop
    string or stop token, or with it under `include_stop_str_in_output`. The first `min_tokens` tokens end nothing; a
    stop string counts once one of its characters comes from a later token.
    `stop_reason`: the stop string, or the id out of `stop_token_ids`; None for the model's own end of text.
    `stop_ids` are all token ids that end the request; `max_new` is the most tokens that it may emit.
    """

    def __init__(
        self, tokenizer: Tokenizer, params: SamplingParams, prompt_len: int, stop_ids: frozenset[int], max_new: int
    ) -> None:
        self.prompt_len = prompt_len
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self._params = params
        self._stop_ids = stop_ids
        self._max_new = max_new
        self._stream = tokenizer.stream(params.skip_special_tokens)
        self._stops = StopStrings([params.stop] if isinstance(params.stop, str) else params.stop)
        self._unread: list[int] = []
        self._sent: list[str] = []
        self._unsent: list[str] = []

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def text(self) -> str:
        """All text so far, that which `take_delta` still holds back included."""
        self._read()
        return "".join([*self._sent, *self._unsent])

    def push(self, token: int) -> bool:
        """Record the token; True when the request ends with it."""
        if self.finished:
            raise RuntimeError(f"token {token} was pushed after the request had ended ({self.finish_reason})")
        self.token_ids.append(token)
        may_stop = len(self.token_ids) > self._params.min_tokens
        if may_stop and token in self._stop_ids:
            self._end_at_stop_token(token)
        else:
            self._unread.append(token)
            if self._stops.any:
                self._look_for_stop(self._read(), may_stop)
        if not self.finished and len(self.token_ids) >= self._max_new:
            self._end(FinishReason.LENGTH)
        return self.finished

    def abort(self) -> None:
        """The caller has gone, or the request failed. What is out stays as it is."""
        if not self.finished:
            self._end(FinishReason.ABORT)

    def take_delta(self) -> str:
        """The text since the last call. What may be the beginning of a stop string waits until that is decided."""
        self._read()
        text = "".join(self._unsent)
        held = 0 if self.finished or self._params.include_stop_str_in_output else self._stops.held()
        ready = text[: len(text) - held]
        self._sent.append(ready)
        self._unsent = [text[len(ready) :]]
        return ready

    def _read(self) -> str:
        """The text of the tokens that nobody has read yet. Only stop strings need it within a step."""
        piece = "".join(map(self._stream.push, self._unread))
        self._unread.clear()
        self._unsent.append(piece)
        return piece

    def _look_for_stop(self, piece: str, may_stop: bool) -> None:
        hit = self._stops.feed(piece) if piece else None
        if hit is None or not may_stop:
            return
        start, stop = hit
        end = start + len(stop) if self._params.include_stop_str_in_output else start
        text = "".join(self._unsent)
        self._unsent = [text[: len(text) - len(piece) + end]]
        self.finish_reason, self.stop_reason = FinishReason.STOP, stop

    def _end_at_stop_token(self, token: int) -> None:
        if self._params.include_stop_str_in_output:
            self._unread.append(token)
        self.stop_reason = token if token in self._params.stop_token_ids else None
        self._end(FinishReason.STOP)

    def _end(self, reason: FinishReason) -> None:
        self._read()
        self._unsent.append(self._stream.flush())
        self.finish_reason = reason


class StopStrings:
    """Finds stop strings in text that arrives in pieces. Keeps only as much text as an unfinished one may take."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._reach = max((len(stop) for stop in self._stops), default=1) - 1
        self._tail = ""

    @property
    def any(self) -> bool:
        return bool(self._stops)

    def feed(self, piece: str) -> tuple[int, str] | None:
        """The earliest stop string that ends within `piece`, and where it starts, counted from the start of `piece`
        (negative: in earlier text). Of several that start together, the first one listed."""
        border = len(self._tail)
        window = self._tail + piece
        found = ((window.find(stop, max(0, border + 1 - len(stop))) - border, stop) for stop in self._stops)
        hits = [hit for hit in found if hit[0] >= -border]
        self._tail = window[len(window) - min(self._reach, len(window)) :]
        return min(hits, key=lambda hit: hit[0], default=None)

    def held(self) -> int:
        """How many last characters could be the beginning of a stop string."""
        sizes = range(len(self._tail), 0, -1)
        return next((n for n in sizes if any(stop.startswith(self._tail[-n:]) for stop in self._stops)), 0)
