"""A language model small enough to be obvious, and its engine: what the engine tests run on.

The next token's logits are a fixed pseudo-random function of every token before it, and the model remembers tokens only
in its cache pages. Whatever is wrong with a block table, a stale row or a page with two owners therefore shows in the
output, or raises. `expected` computes the same output without pages, batches or steps.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from proa.cache.pages import PagePool
from proa.cache.tables import BlockTables
from proa.choice import AUTO
from proa.conditions import Source
from proa.engine.delivery import StepOutput
from proa.engine.engine import Engine, EngineRunner
from proa.engine.request import Request
from proa.kernels.reference.sample import ReferenceSample
from proa.plan.decision import Decision
from proa.plan.runner_plan import DraftContract, PairCheck, SchedulePlan
from proa.runner.batch import ForwardOutput, RowSpan
from proa.sampling.noise import Purpose
from proa.sampling.params import SamplingParams
from proa.sampling.sampler import logprobs, sample
from proa.sampling.state import SamplingRow, SamplingState
from proa.speculative.draft_length import DraftLengths
from proa.speculative.drafters.nextn import NextNDrafter
from proa.speculative.drift import AcceptWatch
from proa.speculative.protocol import DraftContext, Drafter, HiddenRows, Proposal, Verdict
from proa.speculative.verify import Verifier
from proa.units import Algorithm, Phase, Switch, Verification
from tests.speculative.next_model import Hidden, NextRunner

VOCAB = 23
ROWS = torch.randn(997, VOCAB, generator=torch.Generator().manual_seed(5)) * 3


def next_logits(tokens: Sequence[int], weights: int = 0) -> torch.Tensor:
    """Logits [VOCAB] after `tokens`. Another `weights` is another model."""
    state = weights
    for token in tokens:
        state = (state * 31 + token + 1) % 1_000_003
    return ROWS[state % len(ROWS)]


class Broken(Exception):
    """The forward that was to fail has failed."""


def check_pages(tables: BlockTables, spans: Sequence[RowSpan]) -> None:
    """Nobody reads a page that nobody owns, and a page that is written has one owner and one reader."""
    size = tables.page_size
    used = Counter(page for span in spans for page in span.pages)
    written = {page for span in spans for page in span.pages[span.start // size : (span.end - 1) // size + 1]}
    assert all(tables.pool.owners(page) for page in used), "a page is used that nobody owns"
    assert all(used[page] == tables.pool.owners(page) == 1 for page in written), "a page that is written has two owners"


class TableRunner:
    """Honours RowSpan and checks what the engine promises about pages. `fails_at`: numbers of forwards that raise.
    `hidden`: where its hidden rows are numbered; None: it gives none."""

    states = None
    kernels = ReferenceSample()

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        weights: int = 0,
        fails_at: Sequence[int] = (),
        max_rows: int = 10**9,
        hidden: Hidden | None = None,
    ) -> None:
        self.tables = BlockTables(PagePool(num_pages), page_size)
        self.weights = weights
        self.fails_at = fails_at
        self.max_rows = max_rows
        self.hidden = hidden
        self.num_forwards = 0
        self.forwards: list[list[RowSpan]] = []
        self._slots = [-1] * (num_pages * page_size)

    def forward(self, spans: Sequence[RowSpan]) -> ForwardOutput:
        self.num_forwards += 1
        self.forwards.append(list(spans))
        self._check(spans)
        for span in spans:
            for row, token in enumerate(span.tokens):
                self._slots[self._slot(span, span.start + row)] = token
        if self.num_forwards in self.fails_at:
            raise Broken(f"forward {self.num_forwards}")
        rows = [
            next_logits(self._read(span, span.start + row + 1), self.weights) for span in spans for row in span.logits
        ]
        return ForwardOutput(logits=torch.stack(rows) if rows else torch.empty(0, VOCAB), hidden=self._hidden(spans))

    def _hidden(self, spans: Sequence[RowSpan]) -> torch.Tensor | None:
        if self.hidden is None:
            return None
        ends = [(span, position + 1) for span in spans for position in range(span.start, span.end)]
        return torch.stack([self.hidden.row(self._read(span, end)) for span, end in ends])

    @property
    def participants(self) -> tuple[BlockTables, ...]:
        return (self.tables,)

    def _check(self, spans: Sequence[RowSpan]) -> None:
        check_pages(self.tables, spans)
        for span in spans:
            assert span.tokens, "a span has no rows"
            assert len(span.pages) >= self.tables.pages_for(span.start + len(span.tokens)), "too few pages for the rows"
            assert span.phase is not Phase.DECODE or len(span.tokens) == 1
        assert sum(len(span.tokens) for span in spans if span.phase is Phase.PREFILL) <= self.max_rows

    def _slot(self, span: RowSpan, position: int) -> int:
        page, offset = divmod(position, self.tables.page_size)
        return span.pages[page] * self.tables.page_size + offset

    def _read(self, span: RowSpan, stop: int) -> list[int]:
        return [self._slots[self._slot(span, position)] for position in range(stop)]


@dataclass(kw_only=True)
class ListSink:
    """Ends at a stop token or after `max_new` tokens, like the real sink. `fails_at` breaks that push, once."""

    stop_ids: frozenset[int] = frozenset()
    max_new: int | None = None
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    fails_at: int | None = None

    def push(self, token: int) -> bool:
        assert self.finish_reason is None, "a token came after the end"
        if len(self.tokens) == self.fails_at:
            self.fails_at = None
            raise Broken("sink")
        self.tokens.append(token)
        if token in self.stop_ids:
            self.finish_reason = "stop"
        elif len(self.tokens) == self.max_new:
            self.finish_reason = "length"
        return self.finish_reason is not None


def request(
    request_id: int,
    prompt: Sequence[int],
    *,
    max_tokens: int | None = 12,
    stop_ids: Sequence[int] = (),
    sink: ListSink | None = None,
    **params: object,
) -> Request:
    sampling = SamplingState(
        params=SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, **params}),
        seed=1000 + request_id,
        choice=0,
        prompt=tuple(prompt),
        stop_ids=frozenset(stop_ids),
    )
    sink = sink or ListSink(stop_ids=frozenset(stop_ids), max_new=max_tokens)
    return Request(request_id=request_id, prompt=tuple(prompt), sampling=sampling, sink=sink)


def expected(asked: Request, weights: int = 0) -> list[int]:
    """The output of a request on its own, token by token, without an engine."""
    output: list[int] = []
    while len(output) < asked.sampling.params.max_tokens:
        row = SamplingRow(state=asked.sampling, output=output)
        logits = next_logits([*asked.prompt, *output], weights)[None]
        output += sample(ReferenceSample(), logits, [row], [0], Purpose.TOKEN)
        if output[-1] in asked.sampling.stop_ids:
            break
    return output


class GuessingDrafter:
    """Proposes the target's greedy tokens with probability `skill`, else any token. Has no cache."""

    needs_hidden = False

    def __init__(self, *, max_tokens: int, skill: float = 0.7, seed: int = 0, overshoot: int = 0) -> None:
        self.max_tokens = max_tokens
        self.shown: set[int] = set()
        self.judged: list[Verdict] = []
        self.overshoot = overshoot
        self._skill = skill
        self._random = random.Random(seed)

    def observe(self, hidden: Sequence[HiddenRows]) -> None:
        raise AssertionError("hidden rows that nobody asked for")

    def prefill(self, context: DraftContext) -> None:
        self.shown |= {request.request_id for request in context.requests}

    def propose(self, context: DraftContext) -> Proposal:
        assert all(request.request_id in self.shown and request.limit for request in context.requests)
        return Proposal(tokens=tuple(self._guess(entry.tokens, entry.limit) for entry in context.requests))

    def commit(self, verdict: Verdict) -> None:
        self.judged.append(verdict)

    def release(self, request_ids: Sequence[int]) -> None:
        self.shown -= set(request_ids)

    def _guess(self, tokens: Sequence[int], limit: int) -> tuple[int, ...]:
        guessed = list(tokens)
        for _ in range(self._random.randint(0, limit) + self.overshoot):
            is_good = self._random.random() < self._skill
            guessed.append(int(next_logits(guessed).argmax()) if is_good else self._random.randrange(VOCAB))
        return tuple(guessed[len(tokens) :])


class NextLayer:
    """A next-token layer beside a target that numbers its hidden rows in `hidden`: runner and drafter. `weights` 0: it
    foresees the target."""

    def __init__(
        self, num_pages: int, page_size: int, max_tokens: int, *, weights: int = 0, fails_at: Sequence[int] = ()
    ) -> None:
        self.hidden = Hidden()
        self.runner = NextRunner(
            self.hidden,
            lambda tokens, own: next_logits(tokens, weights),
            num_pages=num_pages,
            page_size=page_size,
            fails_at=fails_at,
        )
        self.drafter = NextNDrafter(
            runner=self.runner,
            max_tokens=max_tokens,
            vocab=VOCAB,
            prefill_chunk=7,
            verification=Verification.COUPLED,
            max_positions=None,
        )


def decided(value: object) -> Decision:
    return Decision(knob="test", value=value, requested=AUTO, source=Source.DEFAULT, rule="test", reason="test")


def schedule(
    *,
    max_num_seqs: int = 8,
    max_model_len: int = 64,
    prefill_chunk: int = 16,
    alignment: int = 1,
    reuses: bool = False,
) -> SchedulePlan:
    return SchedulePlan(
        max_num_seqs=decided(max_num_seqs),
        max_model_len=decided(max_model_len),
        prefill_chunk=decided(prefill_chunk),
        prefill_alignment=decided(alignment),
        prefix_cache=decided(Switch.ON if reuses else Switch.OFF),
    )


def contract(num_draft_tokens: int) -> DraftContract:
    return DraftContract(
        algorithm=Algorithm.STANDALONE,
        num_draft_tokens=decided(num_draft_tokens),
        measures_length=False,
        verification=decided(Verification.COUPLED),
        draft_vocab=VOCAB,
        checks=PairCheck(verdicts=(), notes=()),
    )


def make_engine(
    runner: TableRunner,
    *,
    drafter: Drafter | None = None,
    draft: EngineRunner | None = None,
    verification: Verification = Verification.COUPLED,
    lengths: DraftLengths | None = None,
    watch: AcceptWatch | None = None,
    **limits: int,
) -> Engine:
    plan = schedule(**limits)
    runner.max_rows = plan.prefill_chunk.value
    return Engine(
        runner=runner,
        draft=draft,
        drafter=drafter,
        verifier=Verifier(verification, ReferenceSample()),
        schedule=plan,
        contract=contract(drafter.max_tokens) if drafter else None,
        logprobs=logprobs,
        lengths=lengths,
        watch=watch,
    )


def run(engine: Engine, requests: Sequence[Request], max_steps: int = 3000) -> dict[int, list[StepOutput]]:
    """Add all requests and step until nothing is left."""
    for asked in requests:
        engine.add(asked)
    return finish(engine, max_steps)


def finish(engine: Engine, max_steps: int = 3000) -> dict[int, list[StepOutput]]:
    outputs: dict[int, list[StepOutput]] = {}
    for _ in range(max_steps):
        if not engine.has_work:
            return outputs
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    raise AssertionError(f"requests are left after {max_steps} steps")


def tokens_of(outputs: Mapping[int, Sequence[StepOutput]]) -> dict[int, list[int]]:
    return {
        request_id: [token for output in entries for token in output.tokens]
        for request_id, entries in sorted(outputs.items())
    }


def check_empty(*runners: EngineRunner) -> None:
    """No page is lost, and none is held but for requests to come."""
    for runner in runners:
        runner.tables.pool.check()
        assert runner.tables.pool.num_free + runner.tables.pool.num_idle == runner.tables.pool.num_pages
