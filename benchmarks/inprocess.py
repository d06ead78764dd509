"""Proa opened up: its engine with clocks around the forward and the verifier, and with a drafter that is always right.

For the questions that throughput does not answer (verify.py, overhead.py); peers.py uses the public API alone.
"""

from __future__ import annotations

import time
import timeit
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proa.engine.assembly import Assembled, Report, assemble, end_of_text
from proa.engine.engine import Engine
from proa.engine.preparation import merged
from proa.engine.session import Limits, Session
from proa.env import read_environment
from proa.kernels.native.sink import Program
from proa.sampling.params import SamplingParams
from proa.sampling.sampler import logprobs
from proa.speculative.protocol import DraftContext, Drafter, HiddenRows, Proposal, Verdict
from proa.speculative.verify import Verifier
from proa.units import Verification

EMPTY_RUNS = 20


class Clocked:
    """`inner`, with the seconds spent in one of its methods added up."""

    def __init__(self, inner: Any, method: str) -> None:
        self._inner, self._method = inner, method
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if name != self._method:
            return value

        def timed(*args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return value(*args, **options)
            finally:
                self.seconds += time.perf_counter() - start

        return timed


class ProgramClock:
    """Seconds spent in recorded programs (kernels/native/sink.py), which are a forward's arithmetic and little else."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._again: Callable[[], None] | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        inner = Program.run

        def timed(program: Program, rows: int, batch: Mapping[str, Any]) -> None:
            start = time.perf_counter()
            inner(program, rows, batch)
            self.seconds += time.perf_counter() - start
            self._again = lambda: inner(program, 0, {name: value[:0] for name, value in batch.items()})

        Program.run = timed
        try:
            yield
        finally:
            Program.run = inner

    def empty(self) -> float:
        """Seconds of the last program over no rows: every op is called, every thread waited for, nothing computed."""
        if self._again is None:
            return 0.0
        return min(timeit.repeat(self._again, number=1, repeat=EMPTY_RUNS))


class KnownAnswer:
    """A drafter for one request whose answer is known: every proposal is accepted, and drafting costs nothing."""

    needs_hidden = False

    def __init__(self, answer: Sequence[int], prompt_tokens: int, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._answer = tuple(answer)
        self._prompt_tokens = prompt_tokens

    def propose(self, context: DraftContext) -> Proposal:
        (request,) = context.requests
        done = len(request.tokens) - self._prompt_tokens
        return Proposal(tokens=(self._answer[done : done + min(request.limit, self.max_tokens)],))

    def observe(self, hidden: Sequence[HiddenRows]) -> None:
        pass

    def prefill(self, context: DraftContext) -> None:
        pass

    def commit(self, verdict: Verdict) -> None:
        pass

    def release(self, request_ids: Sequence[int]) -> None:
        pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Decode steps of one run: their number, the seconds of all of them and the parts of these, and the tokens.
    `program` is part of `forward`, `dispatch` what programs take besides their arithmetic."""

    number: int
    seconds: float
    forward: float
    program: float
    dispatch: float
    sampling: float
    tokens: tuple[tuple[int, ...], ...]

    @property
    def milliseconds(self) -> float:
        return 1000 * self.seconds / self.number


def open_target(model: Path, threads: int, num_draft_tokens: int, **asks: Any) -> Assembled:
    """Everything of one engine that may verify up to `num_draft_tokens` proposed tokens per request. `asks`: more
    settings, as for LLM."""
    environment = read_environment()
    settings: dict[str, Any] = {"threads": threads, "max_model_len": 1024, "speculative": "none", "prefix_cache": "off"}
    settings |= asks
    if num_draft_tokens:
        settings |= {"speculative": "ngram", "num_draft_tokens": num_draft_tokens}
    config = merged(model, settings)
    return assemble(config, cache_dir=environment.cache_dir, online=False, report=Report.silent())


def decode_steps(
    opened: Assembled, prompts: Sequence[Sequence[int]], new_tokens: int, drafter: Drafter | None = None
) -> Steps:
    """Answer greedily; the clocks run from the step after the last first token until the end."""
    plans = opened.resolved.plans
    forward, sampling = (
        Clocked(opened.target, "forward"),
        Clocked(Verifier(Verification.COUPLED, opened.target.kernels), "verify"),
    )
    engine = Engine(
        runner=forward,
        draft=None,
        drafter=drafter,
        verifier=sampling,
        schedule=plans.schedule,
        contract=plans.contract,
        logprobs=logprobs,
    )
    limits = Limits(
        vocab=opened.resolved.target.spec.vocab,
        max_model_len=plans.schedule.max_model_len.value,
        eos_ids=end_of_text(opened.resolved.target.checkpoint, opened.tokenizer),
        proposes=drafter is not None,
    )
    session = Session(engine, opened.tokenizer, limits)
    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    answers = [session.submit(None, prompt, params) for prompt in prompts]
    while not all(answer.first_token for answer in answers):
        session.step()
    forward.seconds = sampling.seconds = 0.0
    programs = ProgramClock()
    number, start = 0, time.perf_counter()
    with programs.running():
        while not all(answer.finished for answer in answers):
            session.step()
            number += 1
    seconds = time.perf_counter() - start
    tokens = tuple(session.result(answer).outputs[0].token_ids for answer in answers)
    return Steps(
        number=number,
        seconds=seconds,
        forward=forward.seconds,
        program=programs.seconds,
        dispatch=number * programs.empty(),
        sampling=sampling.seconds,
        tokens=tokens,
    )
