"""What a step hands out, and how a request's tokens reach its sink exactly once. Owns no text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from proa.engine.request import Request
from proa.sampling.sampler import TokenLogprobs
from proa.speculative.protocol import RequestVerdict
from proa.speculative.stats import SpeculativeStats


class StepOutput(NamedTuple):
    """What one step changed for one request: `tokens` are new, `logprobs` go with them where they were asked for.

    `finish_reason` is stop, length or abort with the last of them, None before. `prompt_logprobs` come once, with the
    first token: one entry per prompt token, None for the first. `stats` are the request's own, up to now.
    """

    request_id: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None
    finish_reason: str | None
    stats: SpeculativeStats

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


class Delivery:
    """One live request and its sink. The verifier pushes here.

    A step can fail after its first tokens were pushed. It, or with a shorter proposal the ones after it, then emits the
    same tokens again, because noise is keyed by position; they are answered from memory instead of reaching the sink
    twice. The engine's own limit on the output holds even where the sink knows none.
    """

    def __init__(self, request: Request, max_output: int, num_draft_tokens: int) -> None:
        self.request = request
        self.stats = SpeculativeStats(num_draft_tokens)
        self._max_output = max_output
        self._answers: list[tuple[int, bool]] = []
        self._next = 0
        self._prompt_logprobs: list[TokenLogprobs | None] = [None]

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.request.wants_prompt_logprobs

    def push(self, token: int) -> bool:
        if self._next == len(self._answers):
            is_last = len(self.request.output) + self._next + 1 >= self._max_output
            self._answers.append((token, self.request.sink.push(token) or is_last))
        known, ended = self._answers[self._next]
        if known != token:
            raise RuntimeError(f"request {self.request.request_id}: a repeated step emitted {token} instead of {known}")
        self._next += 1
        return ended

    def rewind(self) -> None:
        """A verification begins, at the first token that is not committed."""
        self._next = 0

    def set_prompt_logprobs(self, start: int, entries: Sequence[TokenLogprobs]) -> None:
        """Entries of the prompt tokens from `start` on, as far as prefill has come."""
        self._prompt_logprobs[start:] = entries

    def commit(self, verdict: RequestVerdict) -> StepOutput:
        """The step is kept: the emitted tokens belong to the request."""
        prompt_logprobs = tuple(self._prompt_logprobs) if self.wants_prompt_logprobs else None
        self.stats.record(verdict)
        self.request.output.extend(verdict.emitted)
        del self._answers[: len(verdict.emitted)]
        return StepOutput(
            request_id=self.request.request_id,
            tokens=verdict.emitted,
            logprobs=verdict.logprobs,
            prompt_logprobs=prompt_logprobs,
            finish_reason=(self.request.sink.finish_reason or "length") if verdict.finished else None,
            stats=self.stats,
        )

    def abort(self) -> StepOutput:
        return StepOutput(
            request_id=self.request.request_id,
            tokens=(),
            logprobs=(),
            prompt_logprobs=None,
            finish_reason="abort",
            stats=self.stats,
        )
