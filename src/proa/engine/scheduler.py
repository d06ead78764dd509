"""Who runs in the next step, with how many rows. Integers only: owns no tensors and no pages. Torch-free.

Requests stand in arrival order, the running ones before the waiting ones, and that order decides everything: pages are
taken from the latest arrival and prompt tokens go to the earliest, so the oldest request moves in every step and nobody
starves. A request holds pages for its whole prompt and state slots for its longest step from admission on; only
decoding can run out of pages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from proa.cache.tables import BlockTables
from proa.engine.request import Request, Status
from proa.engine.reuse import CachedRunner, PrefixReuse
from proa.errors import CacheExhausted, RequestError
from proa.plan.runner_plan import SchedulePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Rows [start, stop) of a request's prompt, or of its earlier tokens after a preemption.

    `is_replay`: these are generated tokens of a model with states, and computed as such, one after the other.
    `snapshots`: after how many rows of the request its state is to be kept.
    """

    request_id: int
    start: int
    stop: int
    is_replay: bool = False
    snapshots: tuple[int, ...] = ()


class Row(NamedTuple):
    """The anchor of one request, followed by at most `limit` proposed tokens."""

    request_id: int
    limit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step: `decode` rows, then `prefill` chunks. Before it what `preempted` requests hold is to be given back, and
    room made for so many free `pages` of each runner."""

    decode: tuple[Row, ...]
    prefill: tuple[Chunk, ...]
    preempted: tuple[int, ...]
    pages: tuple[int, ...]


class _Budget:
    """Pages of every runner that nobody uses or has claimed, as they will be after the step being planned.

    A request claims pages before it gets them. A draft runner counts as if it held as many rows of a request as the
    target: it never holds more.
    """

    def __init__(self, runners: Sequence[BlockTables], held_rows: Mapping[int, int]) -> None:
        """`held_rows` by request id, of those that run and may lack pages."""
        self._runners = runners
        self.claimed = [0] * len(runners)
        self._free = [tables.pool.num_free + tables.pool.num_idle for tables in runners]
        for request_id, rows in held_rows.items():
            self._claim(self._missing(request_id, rows))

    def take(self, held: int, wanted: int, *, spare: int) -> bool:
        """Grow a request from `held` to `wanted` rows, if that leaves `spare` pages in every pool."""
        more = [tables.pages_for(wanted) - tables.pages_for(held) for tables in self._runners]
        if not any(more):  # 15 of 16 decode rows at a page size of 16
            return True
        if not self._leaves(more, spare):
            return False
        self._claim(more)
        return True

    def admit(self, rows: int, found: Sequence[Sequence[int]], *, spare: int) -> bool:
        """Take in a request of `rows` rows that begins with the pages `found`, which are there already, by runner."""
        more = [tables.pages_for(rows) - len(pages) for tables, pages in zip(self._runners, found, strict=True)]
        idle = [
            sum(not tables.pool.users(page) for page in pages)
            for tables, pages in zip(self._runners, found, strict=True)
        ]
        if not self._leaves([new + known for new, known in zip(more, idle, strict=True)], spare):
            return False
        self._claim(more)
        self._free = [free - known for free, known in zip(self._free, idle, strict=True)]
        return True

    def give_back(self, request_id: int, held: int) -> None:
        """What it claims and what it alone uses."""
        self._claim([-missing for missing in self._missing(request_id, held)])
        for index, tables in enumerate(self._runners):
            self._free[index] += sum(tables.pool.users(page) == 1 for page in tables.pages(request_id))

    def _missing(self, request_id: int, rows: int) -> list[int]:
        return [max(0, tables.pages_for(rows) - tables.num_pages(request_id)) for tables in self._runners]

    def _leaves(self, pages: Sequence[int], spare: int) -> bool:
        return all(count <= 0 or free - count >= spare for count, free in zip(pages, self._free, strict=True))

    def _claim(self, pages: Sequence[int]) -> None:
        self._free = [free - count for free, count in zip(self._free, pages, strict=True)]
        self.claimed = [claimed + count for claimed, count in zip(self.claimed, pages, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slots:
    """State slots of one runner: in all, and as many as one request may need at once."""

    total: int
    each: int

    @classmethod
    def of(cls, runner: CachedRunner, num_draft_tokens: int) -> _Slots:
        if runner.states is None:
            return cls(total=0, each=0)
        tentative = runner.states.slots_for(1 + num_draft_tokens, is_revocable=num_draft_tokens > 0)
        return cls(total=runner.states.pool.num_pages, each=1 + tentative)


class Scheduler:
    """Continuous batching over what the target and, with a draft runner, the draft have to give.

    `num_draft_tokens` is the longest proposal, 0 without a drafter. Committed lengths are read from the target's
    tables, the first of `runners`, so a step that was rolled back is simply planned again. `reuse` None: every request
    begins with nothing.
    """

    def __init__(
        self,
        schedule: SchedulePlan,
        runners: Sequence[CachedRunner],
        num_draft_tokens: int,
        reuse: PrefixReuse | None,
    ) -> None:
        self.max_num_seqs = schedule.max_num_seqs.value
        self.max_model_len = schedule.max_model_len.value
        self.prefill_chunk = schedule.prefill_chunk.value
        self.num_draft_tokens = num_draft_tokens
        self._alignment = schedule.prefill_alignment.value
        self._is_recurrent = runners[0].states is not None
        self._runners = tuple(runner.tables for runner in runners)
        self._slots = tuple(_Slots.of(runner, num_draft_tokens) for runner in runners)
        self._most_running = min([self.max_num_seqs, *(s.total // s.each for s in self._slots if s.each)])
        self._lengths = self._runners[0]
        self._reuse = reuse
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
        self._check_room(request)
        self._waiting.append(request)

    def remove(self, request: Request) -> None:
        """Forget a request that has finished or was aborted."""
        (self._running if request.status is Status.RUNNING else self._waiting).remove(request)
        request.become(Status.FINISHED)

    def schedule(self) -> StepPlan:
        """Plan one step: anchors first, then prompt chunks, then new requests, then draft lengths.

        Drafts come last in the claim for pages: a proposal is shortened before anyone is preempted or kept waiting.
        """
        decoding = [request for request in self._running if self._can_decode(request)]
        # A request that decodes has all its pages in the target, if not in a draft.
        lacking = self._running if len(decoding) < len(self._running) or len(self._runners) > 1 else ()
        budget = _Budget(self._runners, {request.request_id: self._held(request) for request in lacking})
        preempted = self._claim_anchors(decoding, budget)
        if not preempted:  # Pages of a preempted request are not free before the plan is carried out.
            self._admit(budget)
        decode = tuple(self._decode_row(one, budget) for one in decoding if one.status is Status.RUNNING)
        if self._reuse is not None:
            self._reuse.fit([slots.total - slots.each * len(self._running) for slots in self._slots])
        return StepPlan(
            decode=decode,
            prefill=tuple(self._chunks()) if len(decode) < len(self._running) else (),
            preempted=tuple(request.request_id for request in preempted),
            pages=tuple(budget.claimed),
        )

    def _claim_anchors(self, decoding: Sequence[Request], budget: _Budget) -> list[Request]:
        """Claim one row for each request that decodes, the earliest first, at the cost of the latest arrivals."""
        preempted: list[Request] = []
        for request in decoding:
            held = self._lengths.length(request.request_id)
            while request.status is Status.RUNNING and not budget.take(held, held + 1, spare=0):
                victim = self._running.pop()
                budget.give_back(victim.request_id, self._held(victim))
                victim.become(Status.PREEMPTED)
                self._waiting.appendleft(victim)
                preempted.append(victim)
        return preempted

    def _admit(self, budget: _Budget) -> None:
        """Start waiting requests while prompt tokens, pages and state slots are left, in order of arrival.

        One page stays for each request that runs, or the next steps would preempt what is admitted here.
        """
        if not self._waiting:
            return
        tokens = self.prefill_chunk - sum(self._pending(request) for request in self._running)
        while self._waiting and len(self._running) < self._most_running and tokens > 0:
            request = self._waiting[0]
            hit = None if self._reuse is None else self._reuse.find(request)
            found = [[] if hit is None else hit.pages(index) for index in range(len(self._runners))]
            if not budget.admit(request.prefill_rows, found, spare=len(self._running)):
                return
            if hit is not None and self._reuse is not None:
                self._reuse.adopt(request, hit)
            self._running.append(self._waiting.popleft())
            request.become(Status.RUNNING)
            tokens -= self._pending(request)

    def _chunks(self) -> Iterable[Chunk]:
        tokens = self.prefill_chunk
        for request in self._running:
            start = self._lengths.length(request.request_id)
            stop = self._chunk_stop(request, start, tokens)
            if stop > start:
                yield Chunk(
                    request_id=request.request_id,
                    start=start,
                    stop=stop,
                    is_replay=self._is_replay(request, start),
                    snapshots=self._snapshots(request, range(start, stop)),
                )
                tokens -= stop - start

    def _chunk_stop(self, request: Request, start: int, tokens: int) -> int:
        """How far `tokens` tokens bring the request: to an aligned row, or to the end of what it lacks."""
        if self._is_replay(request, start):  # few enough to share a forward with verified rows
            return min(request.prefill_rows, start + min(tokens, self._alignment))
        end = min(len(request.prompt), request.prefill_rows) if self._is_recurrent else request.prefill_rows
        stop = min(end, start + tokens)
        return stop if stop == end else stop // self._alignment * self._alignment

    def _is_replay(self, request: Request, start: int) -> bool:
        return self._is_recurrent and start >= len(request.prompt)

    def _snapshots(self, request: Request, rows: range) -> tuple[int, ...]:
        return () if self._reuse is None else self._reuse.snapshots(0, request.request_id, rows)

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

    def _check_room(self, request: Request) -> None:
        """The last token emitted never gets a row."""
        self._check_slots()
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

    def _check_slots(self) -> None:
        for slots in self._slots:
            if slots.each > slots.total:
                raise CacheExhausted(
                    "cache/request-too-large",
                    f"the request needs {slots.each} state slots and the runner has {slots.total} in all.",
                    hint="propose fewer tokens (--num-draft-tokens)",
                )
