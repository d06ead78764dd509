"""Prompt lookup: proposes what followed the last time the text ended like this. Owns no model and no cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from proa.speculative.protocol import DraftContext, DraftRequest, HiddenRows, Proposal, Verdict

Tokens = npt.NDArray[np.int64]


class NgramDrafter:
    """Looks for the longest suffix of prompt + output, of `min_match` to `max_match` tokens, that occurred before.

    Of several occurrences one with the most frequent next token, the most recent of those. Where the copied text runs
    into its own end it goes on in circles, so that a loop is proposed to its full length. The evidence of a proposal is
    the length of the suffix.

    The tokens of a request are kept as an array that grows with it; one search compares it as a whole, about 50 µs per
    100,000 tokens, and needs no index.
    """

    needs_hidden = False

    def __init__(self, *, max_tokens: int, min_match: int, max_match: int) -> None:
        self.max_tokens = max_tokens
        self._min_match = min_match
        self._max_match = max_match
        self._histories: dict[int, _History] = {}

    def observe(self, hidden: Sequence[HiddenRows]) -> None:
        """Nothing to keep: text alone is searched."""

    def prefill(self, context: DraftContext) -> None:
        """Nothing to do: `propose` reads what is new."""

    def propose(self, context: DraftContext) -> Proposal:
        found = [self._propose(request) for request in context.requests]
        return Proposal(tokens=tuple(tokens for tokens, _ in found), evidence=tuple(length for _, length in found))

    def commit(self, verdict: Verdict) -> None:
        """Nothing to do: the next `propose` brings the emitted tokens."""

    def release(self, request_ids: Sequence[int]) -> None:
        for request_id in request_ids:
            self._histories.pop(request_id, None)

    def _propose(self, request: DraftRequest) -> tuple[tuple[int, ...], int]:
        """The proposal and its evidence."""
        limit = min(request.limit, self.max_tokens)
        if limit <= 0:
            return (), 1
        history = self._histories.setdefault(request.request_id, _History()).extended_to(request.tokens)
        ends, length = _longest_matches(history, self._max_match)
        if not ends.size or length < self._min_match:
            return (), 1
        copied = history[_best_start(history, (ends + 1).tolist()) :][:limit].tolist()
        return tuple((copied * -(-limit // len(copied)))[:limit]), length


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


def _longest_matches(history: Tokens, max_match: int) -> tuple[Tokens, int]:
    """Where the earlier occurrences of the longest suffix end, in order, and its length."""
    ends = np.flatnonzero(history[:-1] == history[-1])
    length = 1
    while length < max_match and ends.size:
        longer = ends[ends >= length]
        longer = longer[history[longer - length] == history[-1 - length]] if longer.size else longer
        if not longer.size:
            break
        ends = longer
        length += 1
    return ends, length


def _best_start(history: Tokens, starts: Sequence[int]) -> int:
    """The last one of those that begin with the most frequent token."""
    if len(starts) < 3:  # each token is as frequent as the other, or there is but one
        return starts[-1]
    tokens = history[starts].tolist()
    counts = Counter(tokens)
    most = max(counts.values())
    return next(start for start, token in zip(reversed(starts), reversed(tokens), strict=True) if counts[token] == most)
