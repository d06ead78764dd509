"""Engine.step(): schedule, propose, forward, verify, commit. Owns the live requests; decides nothing about tokens.

Everything a step writes into caches is under one transaction, so a step that fails is as if it had not begun.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from proa.cache.transaction import CacheTransaction, Participant
from proa.engine.delivery import Delivery, StepOutput
from proa.engine.request import Request, Status
from proa.engine.reuse import CachedRunner, PrefixReuse
from proa.engine.rows import NOTHING, Drafted, StepRows
from proa.engine.scheduler import Row, Scheduler, StepPlan
from proa.plan.runner_plan import DraftContract, SchedulePlan
from proa.runner.batch import ForwardOutput, RowSpan
from proa.sampling.sampler import TokenLogprobs
from proa.speculative.draft_length import DraftLengths, FixedLengths, Step
from proa.speculative.drift import AcceptWatch, SpeculativeHealth
from proa.speculative.protocol import DraftContext, Drafter, DraftRequest, HiddenRows, Verdict
from proa.speculative.stats import SpeculativeStats
from proa.speculative.verify import Verifier
from proa.units import Switch

Logprobs = Callable[[torch.Tensor, int, int], TokenLogprobs]
"""(raw logits [V], token, how many of the best) -> its log probabilities."""


class EngineRunner(CachedRunner, Protocol):
    """All that the engine needs of a runner."""

    @property
    def participants(self) -> Sequence[Participant]: ...

    def forward(self, spans: Sequence[RowSpan]) -> ForwardOutput: ...


class Engine:
    """Serves many requests at once on a target runner and, optionally, a drafter with or without a runner of its own.

    Without a drafter every proposal has length 0: plain decoding takes the same path. `lengths` None: proposals always
    have the contract's length. `watch` None: nobody judges what came of them. Not thread-safe; `abort` may be called
    from a sink in the middle of a step.
    """

    def __init__(
        self,
        *,
        runner: EngineRunner,
        draft: EngineRunner | None,
        drafter: Drafter | None,
        verifier: Verifier,
        schedule: SchedulePlan,
        contract: DraftContract | None,
        logprobs: Logprobs,
        lengths: DraftLengths | None = None,
        watch: AcceptWatch | None = None,
    ) -> None:
        self._runner = runner
        self._drafter = drafter
        self._verifier = verifier
        self._logprobs = logprobs
        self._watch = watch
        self._needs_hidden = drafter is not None and drafter.needs_hidden
        self._runners = [runner] if draft is None else [runner, draft]
        self._num_draft_tokens = 0
        if drafter is not None and contract is not None:
            self._num_draft_tokens = min(contract.num_draft_tokens.value, drafter.max_tokens)
        self.lengths = lengths or FixedLengths(self._num_draft_tokens)
        self.reuse = None
        if schedule.prefix_cache.value is Switch.ON:
            self.reuse = PrefixReuse(self._runners, is_bound=self._needs_hidden)
        self._scheduler = Scheduler(schedule, self._runners, self._num_draft_tokens, self.reuse)
        self._live: dict[int, Delivery] = {}
        self._drafting: set[int] = set()
        self._observed: set[int] = set()
        self._ready: list[StepOutput] = []
        self._aborted: set[int] = set()
        self._is_stepping = False
        self.stats = SpeculativeStats(self._num_draft_tokens)

    @property
    def has_work(self) -> bool:
        return bool(self._live or self._ready)

    @property
    def num_running(self) -> int:
        return self._scheduler.num_running

    @property
    def num_waiting(self) -> int:
        return self._scheduler.num_waiting

    def health(self) -> SpeculativeHealth | None:
        """What became of the proposals of late; None where nobody watches."""
        return None if self._watch is None else self._watch.health()

    def add(self, request: Request) -> None:
        """Queue a new request. RequestError or CacheExhausted when it could not be served even alone."""
        if request.request_id in self._live:
            raise ValueError(f"request {request.request_id} is being served already")
        self._scheduler.add(request)
        limit = request.max_output(self._scheduler.max_model_len)
        self._live[request.request_id] = Delivery(request, limit, self._num_draft_tokens)

    def abort(self, request_id: int) -> None:
        """End the request; what it has emitted stands. The next step reports it. A finished one stays as it ended."""
        if self._is_stepping:
            self._aborted.add(request_id)
        elif request_id in self._live:
            self._ready.append(self._live[request_id].abort())
            self._finish([request_id])

    def step(self) -> list[StepOutput]:
        """Run one step and return what it changed, one entry per request concerned.

        When it raises, caches and requests are as before; call it again, or abort the request that is to blame.
        """
        plan = self._scheduler.schedule()
        self._release([self._live[request_id].request for request_id in plan.preempted])
        if self.reuse is not None:
            self.reuse.make_room(plan.pages)
        self._is_stepping = True
        try:
            if plan.decode or plan.prefill:
                self._run(plan)
        finally:
            self._is_stepping = False
            for request_id in sorted(self._aborted):
                self.abort(request_id)
            self._aborted.clear()
        outputs, self._ready = self._ready, []
        return outputs

    def _run(self, plan: StepPlan) -> None:
        size = Step(decoding=len(plan.decode), prefill=sum(chunk.stop - chunk.start for chunk in plan.prefill))
        context = self._draft_context(plan.decode, size)
        self._start_drafting(context)
        with CacheTransaction([part for runner in self._runners for part in runner.participants]) as transaction:
            drafted = self._propose(context, size)
            rows = StepRows(self._runner)
            for row in plan.decode:
                rows.add_row(self._live[row.request_id], drafted.get(row.request_id, NOTHING))
            for chunk in plan.prefill:
                rows.add_chunk(self._live[chunk.request_id], chunk)
            output = self._forward(rows)
            self._score_prompts(rows, output.logits)
            verdict = self._verify(rows, output.logits)
            kept = {entry.request_id: entry.keep for entry in verdict.requests} | rows.kept_chunks
            transaction.commit(kept)
        moved = [self._live[request_id].request for request_id in kept]
        if self.reuse is not None:
            self.reuse.collect(moved)
        hidden = output.hidden if self._needs_hidden else None
        self._record(verdict, drafted, [] if hidden is None else rows.hidden_rows(hidden, kept))
        if self.reuse is not None:
            self.reuse.keep_prompts([request for request in moved if request.status is Status.RUNNING])

    def _draft_context(self, rows: Sequence[Row], size: Step) -> DraftContext:
        """The requests for which a proposal is of use in this step. The others decode plainly."""
        limits = self.lengths.limits({row.request_id: row.limit for row in rows if row.limit}, size)
        requests = [(self._live[request_id].request, limit) for request_id, limit in limits.items() if limit]
        return DraftContext(
            requests=tuple(
                DraftRequest(
                    request_id=request.request_id,
                    tokens=request.tokens(0, request.num_tokens),
                    sampling=request.sampling,
                    limit=limit,
                    snapshots=self._draft_snapshots(request),
                )
                for request, limit in requests
            )
        )

    def _draft_snapshots(self, request: Request) -> tuple[int, ...]:
        if self.reuse is None or len(self._runners) == 1:
            return ()
        begun = self._runners[1].tables.length(request.request_id)
        return self.reuse.snapshots(1, request.request_id, range(begun, len(request.prompt)))

    def _start_drafting(self, context: DraftContext) -> None:
        """Let the drafter catch up: with a prompt before its first proposal, not earlier, as many requests never need
        one.

        It is outside of the step's transaction, since these rows stay whatever becomes of the step.
        """
        if self._drafter is None or not context.requests:
            return
        self._drafter.prefill(context)
        self._drafting.update(request.request_id for request in context.requests)
        if self.reuse is not None:
            self.reuse.collect([self._live[request.request_id].request for request in context.requests])

    def _propose(self, context: DraftContext, size: Step) -> Mapping[int, Drafted]:
        """What is proposed for each request of the context."""
        if self._drafter is None or not context.requests:
            return {}
        proposal = self.lengths.cut(context, self._drafter.propose(context), size)
        probs = proposal.probs or (None,) * len(proposal.tokens)
        drafted: dict[int, Drafted] = {}
        for request, tokens, row_probs in zip(context.requests, proposal.tokens, probs, strict=True):
            if len(tokens) > request.limit:
                raise RuntimeError(f"the drafter proposed {len(tokens)} tokens where {request.limit} were of use")
            drafted[request.request_id] = Drafted(tokens=tokens, probs=row_probs)
        return drafted

    def _forward(self, rows: StepRows) -> ForwardOutput:
        output = self._runner.forward(rows.spans)
        given = output.logits.shape[0]  # not len(): torch's is thirty calls in Python
        if given != rows.num_logits:
            raise RuntimeError(f"the runner returned {given} rows of logits instead of {rows.num_logits}")
        if self._needs_hidden and (output.hidden is None or len(output.hidden) != rows.num_rows):
            raise RuntimeError(f"the drafter needs the hidden rows of all {rows.num_rows} rows of the batch")
        return output

    def _score_prompts(self, rows: StepRows, logits: torch.Tensor) -> None:
        for entry in rows.scored:
            request = entry.live.request
            targets = request.prompt[entry.position : entry.stop]
            count = request.sampling.params.prompt_logprobs or 0
            scores = [self._logprobs(logits[entry.first + row], token, count) for row, token in enumerate(targets)]
            entry.live.set_prompt_logprobs(entry.position, scores)

    def _verify(self, rows: StepRows, logits: torch.Tensor) -> Verdict:
        requests = rows.verify_requests()
        if not requests:
            return Verdict(requests=())
        for request in requests:
            self._live[request.request_id].rewind()
        return self._verifier.verify(requests, rows.proposal(), rows.verify_logits(logits))

    def _record(self, verdict: Verdict, drafted: Mapping[int, Drafted], hidden: Sequence[HiddenRows]) -> None:
        """The step is kept: hand out tokens, tell the drafter what it may know of it, let go of what has finished."""
        for entry in verdict.requests:
            self.stats.record(entry)
            self._ready.append(self._live[entry.request_id].commit(entry))
        self.lengths.record(verdict)
        if self._watch is not None:
            self._watch.record(verdict, pays=self.lengths.pays)
        finished = [entry.request_id for entry in verdict.requests if entry.finished]
        try:
            self._tell_drafter(verdict, drafted, [rows for rows in hidden if rows.request_id not in finished])
        finally:
            self._finish(finished)

    def _tell_drafter(self, verdict: Verdict, drafted: Mapping[int, Drafted], hidden: Sequence[HiddenRows]) -> None:
        if self._drafter is None:
            return
        if hidden:
            self._observed.update(rows.request_id for rows in hidden)
            self._drafter.observe(hidden)
        if drafted:
            judged = tuple(entry for entry in verdict.requests if entry.request_id in drafted)
            self._drafter.commit(Verdict(requests=judged))

    def _finish(self, request_ids: Sequence[int]) -> None:
        requests = [self._live.pop(request_id).request for request_id in request_ids]
        for request in requests:
            self._scheduler.remove(request)
        self.lengths.release(request_ids)
        self._release(requests)

    def _release(self, requests: Sequence[Request]) -> None:
        """Give back everything these requests hold in both runners. Their tokens stay, and rows that others may use."""
        for request in requests:
            if self.reuse is not None:
                self.reuse.keep(request)
                self.reuse.forget(request.request_id)
        request_ids = [request.request_id for request in requests]
        known = (self._drafting | self._observed).intersection(request_ids)
        self._drafting -= known
        self._observed -= known
        if self._drafter is not None and known:
            self._drafter.release(sorted(known))
        for runner in self._runners:
            for request_id in request_ids:
                runner.tables.release(request_id)
                if runner.states is not None:
                    runner.states.release(request_id)
