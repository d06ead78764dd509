"""Who runs in the next step, with how many rows. Integers only: owns no tensors, moves no pages. Torch-free.

Requests stand in arrival order, the running ones before the waiting ones, and that order decides everything: pages are
taken from the latest arrival and prompt tokens go to the earliest, so the oldest request moves in every step and nobody
starves. A request holds pages for its whole prompt from admission on; only decoding can run out of pages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from proa.cache.tables import BlockTables
from proa.engine.request import Request, Status
from proa.errors import CacheExhausted, RequestError
from proa.plan.runner_plan import SchedulePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Rows [start, stop) of a request's prompt, or of its earlier tokens after a preemption."""

    request_id: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The anchor of one request, followed by at most `limit` proposed tokens."""

    request_id: int
    limit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step: `decode` rows, then `prefill` chunks. The pages of `preempted` requests are to be freed first."""

    decode: tuple[Row, ...]
    prefill: tuple[Chunk, ...]
    preempted: tuple[int, ...]


class _Budget:
    """Free pages of every runner, as they will be after the step being planned.

    A draft runner counts as if it held as many rows of a request as the target: it never holds more.
    """

    def __init__(self, runners: Sequence[BlockTables], held_rows: Iterable[int]) -> None:
        self._runners = runners
        held = list(held_rows)
        self._free = [tables.pool.num_pages - sum(map(tables.pages_for, held)) for tables in runners]

    def take(self, held: int, wanted: int, *, spare: int) -> bool:
        """Grow a request from `held` to `wanted` rows, if that leaves `spare` pages in every pool."""
        more = [tables.pages_for(wanted) - tables.pages_for(held) for tables in self._runners]
        if not any(more):  # 15 of 16 decode rows at a page size of 16
            return True
        if any(pages > 0 and free - pages < spare for pages, free in zip(more, self._free, strict=True)):
            return False
        self._change(more, -1)
        return True

    def give_back(self, held: int) -> None:
        self._change([tables.pages_for(held) for tables in self._runners], 1)

    def _change(self, pages: Sequence[int], sign: int) -> None:
        self._free = [free + sign * count for free, count in zip(self._free, pages, strict=True)]


class Scheduler:
    """Continuous batching over the block tables of the target and, with a draft runner, of the draft.

    `num_draft_tokens` is the longest proposal, 0 without a drafter. Committed lengths are read from the target's
    tables, the first of `runners`, so a step that was rolled back is simply planned again.
    """

    def __init__(self, schedule: SchedulePlan, runners: Sequence[BlockTables], num_draft_tokens: int) -> None:
        self.max_num_seqs = schedule.max_num_seqs.value
        self.max_model_len = schedule.max_model_len.value
        self.prefill_chunk = schedule.prefill_chunk.value
        self.num_draft_tokens = num_draft_tokens
        self._runners = tuple(runners)
        self._lengths = runners[0]
        self._running: list[Request] = []
        self._waiting: deque[Request] = deque()

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def add(self, request: Request) -> None:
        """Queue the request. RequestError or CacheExhausted when it could not run even alone."""
        self._check_length(request)
        self._check_pages(request)
        self._waiting.append(request)

    def remove(self, request: Request) -> None:
        """Forget a request that has finished or was aborted."""
        (self._running if request.status is Status.RUNNING else self._waiting).remove(request)
        request.become(Status.FINISHED)

    def schedule(self) -> StepPlan:
        """Plan one step: anchors first, then prompt chunks, then new requests, then draft lengths.

        Drafts come last in the claim for pages: a proposal is shortened before anyone is preempted or kept waiting.
        """
        budget = _Budget(self._runners, (self._held(request) for request in self._running))
        decoding = [request for request in self._running if self._can_decode(request)]
        preempted = self._claim_anchors(decoding, budget)
        if not preempted:  # Pages of a preempted request are not free before the plan is carried out.
            self._admit(budget)
        decode = tuple(self._decode_row(one, budget) for one in decoding if one.status is Status.RUNNING)
        return StepPlan(
            decode=decode,
            prefill=tuple(self._chunks()) if len(decode) < len(self._running) else (),
            preempted=tuple(request.request_id for request in preempted),
        )

    def _claim_anchors(self, decoding: Sequence[Request], budget: _Budget) -> list[Request]:
        """Claim one row for each request that decodes, the earliest first, at the cost of the latest arrivals."""
        preempted: list[Request] = []
        for request in decoding:
            held = self._held(request)
            while request.status is Status.RUNNING and not budget.take(held, held + 1, spare=0):
                victim = self._running.pop()
                budget.give_back(self._held(victim))
                victim.become(Status.PREEMPTED)
                self._waiting.appendleft(victim)
                preempted.append(victim)
        return preempted

    def _admit(self, budget: _Budget) -> None:
        """Start waiting requests while prompt tokens and pages are left, in order of arrival.

        One page stays for each request that runs, or the next steps would preempt what is admitted here.
        """
        if not self._waiting:
            return
        tokens = self.prefill_chunk - sum(self._pending(request) for request in self._running)
        while self._waiting and len(self._running) < self.max_num_seqs and tokens > 0:
            request = self._waiting[0]
            if not budget.take(0, request.prefill_rows, spare=len(self._running)):
                return
            self._running.append(self._waiting.popleft())
            request.become(Status.RUNNING)
            tokens -= self._pending(request)

    def _chunks(self) -> Iterable[Chunk]:
        tokens = self.prefill_chunk
        for request in self._running:
            count = min(self._pending(request), tokens)
            if count:
                start = self._lengths.length(request.request_id)
                yield Chunk(request_id=request.request_id, start=start, stop=start + count)
                tokens -= count

    def _decode_row(self, request: Request, budget: _Budget) -> Row:
        limit = 0
        if self.num_draft_tokens and request.sampling.params.speculative:
            remaining = request.max_output(self.max_model_len) - len(request.output)
            limit = max(0, min(self.num_draft_tokens, remaining - 1))
            claimed = self._held(request) + 1
            while limit and not budget.take(claimed, claimed + limit, spare=0):
                limit -= 1
        return Row(request_id=request.request_id, limit=limit)

    def _pending(self, request: Request) -> int:
        """Rows that prefill has still to fill."""
        return max(0, request.prefill_rows - self._lengths.length(request.request_id))

    def _can_decode(self, request: Request) -> bool:
        return self._lengths.length(request.request_id) >= request.prefill_rows

    def _held(self, request: Request) -> int:
        """Rows that the request holds pages for, or has claimed them: its whole prompt from admission on."""
        return max(request.prefill_rows, self._lengths.length(request.request_id))

    def _check_length(self, request: Request) -> None:
        if not request.prompt:
            raise RequestError("request/empty-prompt", "the prompt has no tokens.")
        if len(request.prompt) >= self.max_model_len:
            raise RequestError(
                "request/too-long",
                f"the prompt has {len(request.prompt)} tokens and the model length is {self.max_model_len}, which has "
                "to hold the prompt and at least one token of output.",
                hint="shorten the prompt, or raise --max-model-len if the model was trained for more",
            )

    def _check_pages(self, request: Request) -> None:
        """The last token emitted never gets a row."""
        rows = len(request.prompt) + request.max_output(self.max_model_len) - 1
        for tables in self._runners:
            needed = tables.pages_for(rows)
            if needed > tables.pool.num_pages:
                raise CacheExhausted(
                    "cache/request-too-large",
                    f"the request needs {needed} cache pages and the runner has {tables.pool.num_pages} in all.",
                    facts=(
                        f"prompt {len(request.prompt)} tokens, output at most {rows + 1 - len(request.prompt)}",
                        f"page size {tables.page_size} rows",
                    ),
                    hint="lower max_tokens or --max-model-len, or give the cache more memory (--kv-memory)",
                )
