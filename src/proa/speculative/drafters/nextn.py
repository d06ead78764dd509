"""Drafts with the target's own next-token layer (NextN, MTP): row i joins the target's hidden row of position i and the
embedding of token i + 1, and proposes token i + 2.

Rows with the target's hidden rows are final and settled at once. To go on it joins its own output row and its own
token; such rows serve the proposal at hand and are never kept: the target's rows of these positions come later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from proa.errors import CacheExhausted
from proa.runner.batch import ForwardOutput, RowSpan
from proa.speculative.drawing import Draft, Drawing, forwards, useful_limit
from proa.speculative.protocol import DraftContext, DraftRequest, DraftRunner, HiddenRows, Proposal, Verdict
from proa.units import Phase, Verification


@dataclass(slots=True, kw_only=True)
class _Draft(Draft):
    """`final` rows have the target's hidden rows. `own` [1, D] is what the draft's last row put out."""

    final: int
    own: torch.Tensor | None = None

    @property
    def wanted(self) -> range:
        """The rows that the next token needs: the last token begins none, it ends the last one."""
        return range(self.rows, len(self.tokens) - 1)


class NextNDrafter:
    """Draws each token as the target will (speculative/drawing.py). `vocab` is the target's, whose embedding and head
    the draft has borrowed; `prefill_chunk` bounds the rows of one forward.

    The target's hidden rows are kept from `observe` until the step that used them is kept. A request for which the
    draft has no pages gets no proposal. No token is proposed for a position from `max_positions` on; None: no limit.
    """

    needs_hidden = True

    def __init__(
        self,
        *,
        runner: DraftRunner,
        max_tokens: int,
        vocab: int,
        prefill_chunk: int,
        verification: Verification,
        max_positions: int | None,
    ) -> None:
        self.max_tokens = max_tokens
        self._runner = runner
        self._tables = runner.tables
        self._prefill_chunk = prefill_chunk
        self._max_positions = max_positions
        self._drawing = Drawing(vocab, verification, runner.kernels)
        self._observed: dict[int, _Observed] = {}

    def observe(self, hidden: Sequence[HiddenRows]) -> None:
        for entry in hidden:
            if entry.request_id not in self._observed:
                cached = self._tables.length(entry.request_id)
                self._observed[entry.request_id] = _Observed(entry.request_id, cached)
            self._observed[entry.request_id].add(entry)

    def prefill(self, context: DraftContext) -> None:
        """Nothing yet: `propose` catches up on whatever the draft lacks, inside the step's transaction."""

    def propose(self, context: DraftContext) -> Proposal:
        drafts = [self._start(request) for request in context.requests]
        active = drafts
        for _ in range(self.max_tokens):
            active = [draft for draft in active if draft.is_open and self._reserve(draft)]
            if not active:
                break
            self._drawing.extend(active, self._forward(active))
        for draft in drafts:
            self._tables.discard(draft.request.request_id)
        return self._drawing.proposal(drafts)

    def commit(self, verdict: Verdict) -> None:
        """The step's rows are in the cache for good: what they were made from is not needed any more."""
        for entry in verdict.requests:
            if entry.request_id in self._observed:
                self._observed[entry.request_id].drop_before(self._tables.length(entry.request_id))

    def release(self, request_ids: Sequence[int]) -> None:
        for request_id in request_ids:
            self._observed.pop(request_id, None)
            self._tables.release(request_id)

    def _start(self, request: DraftRequest) -> _Draft:
        return _Draft(
            request=request,
            limit=useful_limit(request, self._max_positions),
            rows=self._tables.length(request.request_id),
            tokens=list(request.tokens),
            final=len(request.tokens) - 1,
        )

    def _reserve(self, draft: _Draft) -> bool:
        """Room for the rows of the next forward. The final ones are settled, the first time."""
        request_id = draft.request.request_id
        committed = self._tables.length(request_id)
        try:
            self._tables.reserve(request_id, draft.wanted.stop - committed)
        except CacheExhausted:
            return False
        self._tables.settle(request_id, draft.final - committed)
        return True

    def _forward(self, drafts: Sequence[_Draft]) -> torch.Tensor:
        """Fill in the rows that the drafts lack; return the logits [len(drafts), V] of their last rows."""
        last: dict[int, torch.Tensor] = {}
        for part in forwards([(draft, draft.wanted) for draft in drafts], self._prefill_chunk):
            output = self._runner.forward([self._span(draft, rows) for draft, rows in part])
            ending = [draft for draft, rows in part if rows.stop == draft.wanted.stop]
            last |= {draft.request.request_id: row for draft, row in zip(ending, output.logits, strict=True)}
            self._take_own(part, output)
        for draft in drafts:
            draft.rows = draft.wanted.stop
        return torch.stack([last[draft.request.request_id] for draft in drafts])

    def _span(self, draft: _Draft, rows: range) -> RowSpan:
        return RowSpan(
            phase=Phase.DECODE if len(rows) == 1 else Phase.PREFILL,
            tokens=draft.tokens[rows.start + 1 : rows.stop + 1],
            start=rows.start,
            pages=self._tables.pages(draft.request.request_id),
            logits=(len(rows) - 1,) if rows.stop == draft.wanted.stop else (),
            hidden=self._hidden(draft, rows),
        )

    def _hidden(self, draft: _Draft, rows: range) -> torch.Tensor:
        """[len(rows), D]: the target's, or for the one row after those the draft's own."""
        if rows.start < draft.final:
            request_id = draft.request.request_id
            return self._observed.get(request_id, _Observed(request_id, 0)).read(rows)
        if draft.own is None:
            raise RuntimeError(
                f"request {draft.request.request_id}: the draft runner gave no hidden rows to go on from"
            )
        return draft.own

    def _take_own(self, part: Sequence[tuple[_Draft, range]], output: ForwardOutput) -> None:
        if output.hidden is None:  # one token per proposal: nothing goes on
            return
        end = 0
        for draft, rows in part:
            end += len(rows)
            draft.own = output.hidden[end - 1 : end]


class _Observed:
    """The target's hidden rows of one request from position `start` on, in the pieces in which they come."""

    def __init__(self, request_id: int, start: int) -> None:
        self._request_id = request_id
        self._start = self._stop = start
        self._pieces: deque[torch.Tensor] = deque()

    def add(self, hidden: HiddenRows) -> None:
        if hidden.start != self._stop:
            raise RuntimeError(
                f"request {self._request_id}: hidden rows from {hidden.start} on follow those up to {self._stop}"
            )
        self._pieces.append(hidden.rows.clone())
        self._stop += len(hidden.rows)

    def read(self, rows: range) -> torch.Tensor:
        """[len(rows), D]"""
        if not self._start <= rows.start <= rows.stop <= self._stop:
            raise RuntimeError(
                f"request {self._request_id}: hidden rows {rows.start} to {rows.stop - 1} are needed, and "
                f"{self._start} to {self._stop - 1} are there"
            )
        found: list[torch.Tensor] = []
        first = self._start
        for piece in self._pieces:
            wanted = piece[max(0, rows.start - first) : max(0, rows.stop - first)]
            if len(wanted):
                found.append(wanted)
            first += len(piece)
        return torch.cat(found)

    def drop_before(self, position: int) -> None:
        """Whole pieces only: they end where steps did."""
        while self._pieces and self._start + len(self._pieces[0]) <= position:
            self._start += len(self._pieces.popleft())
