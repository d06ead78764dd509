"""Drafts with an independent smaller model: one forward per proposed token, over all requests at once.

Owns no cache: what its runner holds takes part in the step's transaction, in which `propose` is called. Rows of tokens
before the anchor are final and settled at once; the anchor's and those of proposed tokens are tentative.

A model with states computes a prompt by blocks and generated rows one by one (arch/delta_blocks.py: BLOCK). There, what
is missing before the anchor is filled in ahead of the step, in a transaction of its own. Within the step's, a request
would need a slot more: for the state after those rows, beside the one before them and the tentative one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from proa.arch.delta_blocks import BLOCK
from proa.cache.state import StateTables
from proa.cache.transaction import CacheTransaction
from proa.errors import CacheExhausted
from proa.runner.batch import RowSpan
from proa.speculative.drawing import Draft, Drawing, forwards, useful_limit
from proa.speculative.protocol import DraftContext, DraftRequest, DraftRunner, HiddenRows, Proposal, Verdict
from proa.units import Phase, Verification


class StandaloneDrafter:
    """Draws each token as the target will (speculative/drawing.py).

    The first `draft_vocab` logits of the draft mean the same tokens as the target's. A request with another token in it
    gets no proposal, and neither does one for which the draft has no pages or slots; nothing fails. `vocab` is the
    target's, `prefill_chunk` bounds the rows of one forward. No token is proposed for a position from `max_positions`
    on: the draft was not trained for those. None: there is no such limit.
    """

    needs_hidden = False

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
        self._tables, self._states = runner.tables, runner.states
        self._draft_vocab = min(draft_vocab, vocab)
        self._prefill_chunk = prefill_chunk
        self._max_positions = max_positions
        self._drawing = Drawing(vocab, verification, runner.kernels)

    def observe(self, hidden: Sequence[HiddenRows]) -> None:
        """Nothing to keep: this draft reads tokens only."""

    def prefill(self, context: DraftContext) -> None:
        """Fill in what a model with states lacks before the anchors. Others do so within `propose`."""
        states = self._states
        behind = [self._start(request) for request in context.requests if self._is_behind(request)]
        if states is None or not behind:
            return
        with CacheTransaction((self._tables, states)) as transaction:
            for draft in behind:
                if draft.is_open:
                    self._fill_in(draft, states)
            transaction.commit({})

    def propose(self, context: DraftContext) -> Proposal:
        drafts = [self._start(request) for request in context.requests]
        active = [draft for draft in drafts if not self._is_behind(draft.request)]
        for _ in range(self.max_tokens):
            active = [draft for draft in active if draft.is_open and self._reserve(draft)]
            if not active:
                break
            self._drawing.extend(active, self._forward(active))
        return self._drawing.proposal(drafts)

    def commit(self, verdict: Verdict) -> None:
        """Nothing to do: the transaction kept the rows of accepted tokens, and `propose` reads what is new."""

    def release(self, request_ids: Sequence[int]) -> None:
        for request_id in request_ids:
            self._tables.release(request_id)
            if self._states is not None:
                self._states.release(request_id)

    def _start(self, request: DraftRequest) -> Draft:
        rows = self._tables.length(request.request_id)
        is_known = all(token < self._draft_vocab for token in request.tokens[rows:])
        limit = useful_limit(request, self._max_positions) if is_known else 0
        return Draft(request=request, limit=limit, rows=rows, tokens=list(request.tokens))

    def _is_behind(self, request: DraftRequest) -> bool:
        """A model with states lacks rows before the anchor: of the prompt, or more than the single generated row that
        goes with the anchor, that of a proposed token which was accepted."""
        if self._states is None:
            return False
        begin, end = self._tables.length(request.request_id), len(request.tokens) - 1
        return begin < len(request.sampling.prompt) or end - begin > 1

    def _fill_in(self, draft: Draft, states: StateTables) -> None:
        """The rows before the anchor, settled; none where pages or slots are missing."""
        request_id, begin, end = draft.request.request_id, draft.rows, len(draft.request.tokens) - 1
        snapshots = draft.request.snapshots if states.pool.num_free > len(draft.request.snapshots) else ()
        if not states.pool.num_free:
            return
        try:
            self._tables.reserve(request_id, end - begin)
        except CacheExhausted:
            return
        self._tables.settle(request_id, end - begin)
        states.settle(request_id, end - begin)
        for rows in _blocks(begin, len(draft.request.sampling.prompt), end, self._prefill_chunk):
            made = [after for after in snapshots if rows.start < after <= rows.stop]
            states.extend(request_id, len(rows), is_revocable=False, snapshots=made)
            self._runner.forward([self._span(draft, rows)])

    def _reserve(self, draft: Draft) -> bool:
        """Room for the rows of the next forward. Everything before the anchor is settled, the first time."""
        request_id = draft.request.request_id
        committed = self._tables.length(request_id)
        try:
            self._tables.reserve(request_id, len(draft.tokens) - committed)
            if self._states is not None:
                self._extend(draft, self._states, committed)
        except CacheExhausted:
            return False
        final = len(draft.request.tokens) - 1 - committed
        self._tables.settle(request_id, final)
        if self._states is not None:
            self._states.settle(request_id, final)
        return True

    def _extend(self, draft: Draft, states: StateTables, committed: int) -> None:
        """Slots for the rows of the next forward, or as many reserved rows as before."""
        request_id = draft.request.request_id
        try:
            states.extend(request_id, len(draft.tokens) - draft.rows, is_revocable=True)
        except CacheExhausted:
            self._tables.discard(request_id)
            self._tables.reserve(request_id, draft.rows - committed)
            raise

    def _forward(self, drafts: Sequence[Draft]) -> torch.Tensor:
        """Fill in the rows that the drafts lack; return the logits [len(drafts), draft_vocab] of their last rows."""
        last: dict[int, torch.Tensor] = {}
        wanted = [(draft, range(draft.rows, len(draft.tokens))) for draft in drafts]
        # With states these are anchors and few more: rows of one request must not be cut.
        most = self._prefill_chunk if self._states is None else sum(len(rows) for _, rows in wanted)
        for part in forwards(wanted, most):
            logits = self._runner.forward([self._span(draft, rows) for draft, rows in part]).logits
            ending = [draft for draft, rows in part if rows.stop == len(draft.tokens)]
            last |= {draft.request.request_id: row for draft, row in zip(ending, logits, strict=True)}
        for draft in drafts:
            draft.rows = len(draft.tokens)
        return torch.stack([last[draft.request.request_id] for draft in drafts])[:, : self._draft_vocab]

    def _span(self, draft: Draft, rows: range) -> RowSpan:
        return RowSpan(
            phase=self._phase(draft, rows),
            tokens=draft.tokens[rows.start : rows.stop],
            start=rows.start,
            pages=self._tables.pages(draft.request.request_id),
            logits=(len(rows) - 1,) if rows.stop == len(draft.tokens) else (),
            state=None if self._states is None else self._states.span(draft.request.request_id),
        )

    def _phase(self, draft: Draft, rows: range) -> Phase:
        if self._states is not None and rows.start < len(draft.request.sampling.prompt):
            return Phase.PREFILL
        if len(rows) == 1:
            return Phase.DECODE
        return Phase.PREFILL if self._states is None else Phase.VERIFY


def _blocks(begin: int, border: int, end: int, most: int) -> Iterator[range]:
    """Rows [begin, end), cut at `border`, where the prompt ends: those before it at whole blocks, in parts of about
    `most`; few of those after it at once, as of proposals."""
    part = max(1, most // BLOCK) * BLOCK
    for start in range(begin, border, part):
        yield range(start, min(start + part, border))
    for start in range(max(begin, border), end, BLOCK):
        yield range(start, min(start + BLOCK, end))
