"""Drafts with an independent smaller model: one forward per proposed token, over all requests at once.

Owns no cache: its runner's block tables are a participant of the step's transaction, in which `propose` is called. Rows
of tokens before the anchor are final and settled at once; the anchor's and those of proposed tokens are tentative.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from proa.cache.tables import BlockTables
from proa.errors import CacheExhausted
from proa.runner.batch import ForwardOutput, RowSpan
from proa.sampling.logits import process
from proa.sampling.noise import Purpose
from proa.sampling.sampler import sample
from proa.sampling.state import SamplingRow
from proa.speculative.protocol import DraftContext, DraftRequest, Proposal, Verdict
from proa.units import Phase, Verification


class DraftRunner(Protocol):
    """All that drafting needs of a runner."""

    @property
    def tables(self) -> BlockTables: ...

    def forward(self, spans: Sequence[RowSpan]) -> ForwardOutput: ...


@dataclass(slots=True, kw_only=True)
class _Draft:
    """One request's proposal in the making: `tokens` ends with it. Their first `rows` are in the draft's cache."""

    request: DraftRequest
    limit: int
    rows: int
    tokens: list[int]
    probs: list[torch.Tensor] = field(default_factory=list[torch.Tensor])

    @property
    def proposed(self) -> tuple[int, ...]:
        return tuple(self.tokens[len(self.request.tokens) :])

    @property
    def row(self) -> SamplingRow:
        """The row that the next proposed token is drawn from, with the proposal so far as its history."""
        state = self.request.sampling
        return SamplingRow(state=state, output=self.tokens[len(state.prompt) :])


class StandaloneDrafter:
    """Draws each token as the target will: same pipeline, same noise. Under rejection it draws with noise of its own
    from the distribution that it returns.

    The first `draft_vocab` logits of the draft mean the same tokens as the target's. A request with another token in it
    gets no proposal, and neither does one for which the draft has no pages; nothing fails. `vocab` is the target's,
    `prefill_chunk` bounds the rows of one forward. No token is proposed for a position from `max_positions` on: the
    draft was not trained for those. None: there is no such limit.
    """

    def __init__(
        self,
        *,
        runner: DraftRunner,
        max_tokens: int,
        draft_vocab: int,
        vocab: int,
        prefill_chunk: int,
        verification: Verification,
        max_positions: int | None = None,
    ) -> None:
        self.max_tokens = max_tokens
        self._runner = runner
        self._tables = runner.tables
        self._draft_vocab = min(draft_vocab, vocab)
        self._vocab = vocab
        self._prefill_chunk = prefill_chunk
        self._max_positions = max_positions
        self._is_rejection = verification is Verification.REJECTION

    def prefill(self, context: DraftContext) -> None:
        """Nothing yet: `propose` catches up on whatever the draft lacks, inside the step's transaction."""

    def propose(self, context: DraftContext) -> Proposal:
        drafts = [self._start(request) for request in context.requests]
        active = drafts
        for _ in range(self.max_tokens):
            active = [draft for draft in active if len(draft.proposed) < draft.limit and self._reserve(draft)]
            if not active:
                break
            self._extend(active, self._forward(active))
        probs = tuple(torch.stack(draft.probs) if draft.probs else None for draft in drafts)
        return Proposal(tokens=tuple(draft.proposed for draft in drafts), probs=probs if self._is_rejection else None)

    def commit(self, verdict: Verdict) -> None:
        """Nothing to do: the transaction kept the rows of accepted tokens, and `propose` reads what is new."""

    def release(self, request_ids: Sequence[int]) -> None:
        for request_id in request_ids:
            self._tables.release(request_id)

    def _start(self, request: DraftRequest) -> _Draft:
        rows = self._tables.length(request.request_id)
        is_known = all(token < self._draft_vocab for token in request.tokens[rows:])
        limit = request.limit if is_known else 0
        if self._max_positions is not None:
            limit = max(0, min(limit, self._max_positions - len(request.tokens)))
        return _Draft(request=request, limit=limit, rows=rows, tokens=list(request.tokens))

    def _reserve(self, draft: _Draft) -> bool:
        """Room for the rows of the next forward. Everything before the anchor is settled, the first time."""
        request_id = draft.request.request_id
        committed = self._tables.length(request_id)
        try:
            self._tables.reserve(request_id, len(draft.tokens) - committed)
        except CacheExhausted:
            return False
        self._tables.settle(request_id, len(draft.request.tokens) - 1 - committed)
        return True

    def _forward(self, drafts: Sequence[_Draft]) -> torch.Tensor:
        """Fill in the rows that the drafts lack; return the logits [len(drafts), draft_vocab] of their last rows."""
        last: dict[int, torch.Tensor] = {}
        for spans in self._batches(drafts):
            logits = self._runner.forward([span for _, span in spans]).logits
            ending = [draft for draft, span in spans if span.logits]
            last |= {draft.request.request_id: row for draft, row in zip(ending, logits, strict=True)}
        for draft in drafts:
            draft.rows = len(draft.tokens)
        return torch.stack([last[draft.request.request_id] for draft in drafts])[:, : self._draft_vocab]

    def _batches(self, drafts: Sequence[_Draft]) -> Iterator[list[tuple[_Draft, RowSpan]]]:
        """Spans of missing rows, at most `prefill_chunk` rows per forward, runs of several rows first."""
        batch: list[tuple[_Draft, RowSpan]] = []
        room = self._prefill_chunk
        for draft in drafts:
            start = draft.rows
            while start < len(draft.tokens):
                stop = min(len(draft.tokens), start + room)
                batch.append((draft, self._span(draft, start, stop)))
                room -= stop - start
                start = stop
                if not room:
                    yield sorted(batch, key=_is_decode)
                    batch, room = [], self._prefill_chunk
        if batch:
            yield sorted(batch, key=_is_decode)

    def _span(self, draft: _Draft, start: int, stop: int) -> RowSpan:
        return RowSpan(
            phase=Phase.DECODE if stop - start == 1 else Phase.PREFILL,
            tokens=draft.tokens[start:stop],
            start=start,
            pages=self._tables.pages(draft.request.request_id),
            logits=(stop - start - 1,) if stop == len(draft.tokens) else (),
        )

    def _extend(self, drafts: Sequence[_Draft], logits: torch.Tensor) -> None:
        """Draw each draft's next token. A token that ends the request is its last; so is a row with nothing to draw."""
        rows = [draft.row for draft in drafts]
        processed = process(logits, rows)
        has_any = processed.isfinite().any(dim=1).tolist()
        tokens = sample(processed, rows, Purpose.DRAFT if self._is_rejection else Purpose.TOKEN)
        for draft, values, can_draw, token in zip(drafts, processed, has_any, tokens, strict=True):
            if not can_draw:
                draft.limit = 0
                continue
            draft.tokens.append(token)
            if token in draft.request.sampling.stop_ids:
                draft.limit = 0
            if self._is_rejection and not draft.request.sampling.params.is_greedy:
                probs = torch.zeros(self._vocab, dtype=torch.float64, device=values.device)
                probs[: values.numel()] = values.double().softmax(dim=0)
                draft.probs.append(probs)


def _is_decode(entry: tuple[_Draft, RowSpan]) -> bool:
    return entry[1].phase is Phase.DECODE
