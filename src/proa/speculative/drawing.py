"""What drafters with a runner share: proposals in the making, each next token drawn, rows cut into forwards.

Owns no runner and no cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from proa.kernels.seam import Sampler
from proa.sampling.logits import edited, process
from proa.sampling.noise import Purpose
from proa.sampling.sampler import sample
from proa.sampling.state import SamplingRow
from proa.speculative.protocol import DraftRequest, Proposal
from proa.units import Verification


@dataclass(slots=True, kw_only=True)
class Draft:
    """One request's proposal in the making: `tokens` ends with it. `limit` is 0 once nothing may follow; `rows` of the
    request are in the draft's cache."""

    request: DraftRequest
    limit: int
    rows: int
    tokens: list[int]
    probs: list[torch.Tensor] = field(default_factory=list[torch.Tensor])

    @property
    def is_open(self) -> bool:
        return len(self.proposed) < self.limit

    @property
    def proposed(self) -> tuple[int, ...]:
        return tuple(self.tokens[len(self.request.tokens) :])

    @property
    def row(self) -> SamplingRow:
        """The row that the next proposed token is drawn from, with the proposal so far as its history."""
        state = self.request.sampling
        return SamplingRow(state=state, output=self.tokens[len(state.prompt) :])


AnyDraft = TypeVar("AnyDraft", bound=Draft)


class Drawing:
    """Draws each token as the target will: same pipeline, same noise. Under rejection it draws with noise of its own
    and keeps the distributions that the tokens came from. `vocab` is the target's; `kernels` draw."""

    def __init__(self, vocab: int, verification: Verification, kernels: Sampler) -> None:
        self._vocab = vocab
        self._kernels = kernels
        self._is_rejection = verification is Verification.REJECTION

    def extend(self, drafts: Sequence[Draft], logits: torch.Tensor) -> None:
        """Draw each draft's next token from its row of `logits` [len(drafts), the draft's vocabulary].

        A token that ends the request is its last; so is a row with nothing to draw.
        """
        rows = [draft.row for draft in drafts]
        purpose = Purpose.DRAFT if self._is_rejection else Purpose.TOKEN
        tokens = sample(self._kernels, logits, rows, range(len(rows)), purpose)
        for draft, row, raw, token in zip(drafts, rows, logits, tokens, strict=True):
            if _is_empty(raw, row, token):
                draft.limit = 0
                continue
            draft.tokens.append(token)
            if token in draft.request.sampling.stop_ids:
                draft.limit = 0
            if self._is_rejection and not draft.request.sampling.params.is_greedy:
                draft.probs.append(self._distribution(raw, row))

    def _distribution(self, raw: torch.Tensor, row: SamplingRow) -> torch.Tensor:
        probs = torch.zeros(self._vocab, dtype=torch.float64)
        probs[: raw.numel()] = process(raw, row).double().softmax(dim=0)
        return probs

    def proposal(self, drafts: Sequence[Draft]) -> Proposal:
        probs = tuple(torch.stack(draft.probs) if draft.probs else None for draft in drafts)
        return Proposal(tokens=tuple(draft.proposed for draft in drafts), probs=probs if self._is_rejection else None)


def _is_empty(raw: torch.Tensor, row: SamplingRow, token: int) -> bool:
    """Whether there was nothing to draw. Token 0 is what such a row gives."""
    return token == 0 and not edited(raw, row)[0] > -math.inf


def useful_limit(request: DraftRequest, max_positions: int | None) -> int:
    """No token is proposed for a position from `max_positions` on: the draft was not trained for those."""
    if max_positions is None:
        return request.limit
    return max(0, min(request.limit, max_positions - len(request.tokens)))


def forwards(wanted: Iterable[tuple[AnyDraft, range]], most: int) -> Iterator[list[tuple[AnyDraft, range]]]:
    """The rows wanted of each draft, cut into forwards of at most `most` rows, runs of several rows first in each."""
    batch: list[tuple[AnyDraft, range]] = []
    room = most
    for draft, rows in wanted:
        start = rows.start
        while start < rows.stop:
            part = range(start, min(rows.stop, start + room))
            batch.append((draft, part))
            room -= len(part)
            start = part.stop
            if not room:
                yield sorted(batch, key=_is_single)
                batch, room = [], most
    if batch:
        yield sorted(batch, key=_is_single)


def _is_single(entry: tuple[Draft, range]) -> bool:
    return len(entry[1]) == 1
