"""Prompt lookup: proposes what followed the last time the text ended like this. Owns no model and no cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from proa.speculative.protocol import DraftContext, DraftRequest, Proposal, Verdict

Tokens = npt.NDArray[np.int64]


class NgramDrafter:
    """Looks for the longest suffix of prompt + output, of `min_match` to `max_match` tokens, that occurred before.

    Of several occurrences the most recent. Where the copied text runs into its own end it goes on in circles, so that a
    loop is proposed to its full length.

    The tokens of a request are kept as an array that grows with it; one search compares it as a whole, about 50 µs per
    100,000 tokens, and needs no index.
    """

    def __init__(self, *, max_tokens: int, min_match: int, max_match: int) -> None:
        self.max_tokens = max_tokens
        self._min_match = min_match
        self._max_match = max_match
        self._histories: dict[int, _History] = {}

    def prefill(self, context: DraftContext) -> None:
        """Nothing to do: `propose` reads what is new."""

    def propose(self, context: DraftContext) -> Proposal:
        return Proposal(tokens=tuple(self._propose(request) for request in context.requests))

    def commit(self, verdict: Verdict) -> None:
        """Nothing to do: the next `propose` brings the emitted tokens."""

    def release(self, request_ids: Sequence[int]) -> None:
        for request_id in request_ids:
            self._histories.pop(request_id, None)

    def _propose(self, request: DraftRequest) -> tuple[int, ...]:
        limit = min(request.limit, self.max_tokens)
        if limit <= 0:
            return ()
        history = self._histories.setdefault(request.request_id, _History()).extended_to(request.tokens)
        start = _after_last_match(history, self._min_match, self._max_match)
        if start is None:
            return ()
        period = history.size - start
        return tuple(int(history[start + index % period]) for index in range(limit))


class _History:
    """A growing array: appending costs the new tokens only."""

    def __init__(self) -> None:
        self._buffer: Tokens = np.empty(256, np.int64)
        self._size = 0

    def extended_to(self, tokens: Sequence[int]) -> Tokens:
        if len(tokens) > self._buffer.size:
            self._buffer = np.resize(self._buffer, 2 * len(tokens))
        self._buffer[self._size : len(tokens)] = tokens[self._size :]
        self._size = len(tokens)
        return self._buffer[: self._size]


def _after_last_match(history: Tokens, min_match: int, max_match: int) -> int | None:
    """Where the text continues after the chosen earlier occurrence of the suffix; None without one."""
    ends = np.flatnonzero(history[:-1] == history[-1])
    length = 1
    while length < max_match and ends.size:
        longer = ends[ends >= length]
        longer = longer[history[longer - length] == history[-1 - length]] if longer.size else longer
        if not longer.size:
            break
        ends = longer
        length += 1
    return int(ends[-1]) + 1 if ends.size and length >= min_match else None
