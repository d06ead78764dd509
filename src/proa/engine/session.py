"""From prompts to answers on one Engine: admission, steps, results. Owns the live answers; no caches, no text rules."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count

from proa.engine.delivery import StepOutput
from proa.engine.engine import Engine
from proa.engine.outputs import OutputState
from proa.engine.request import Request
from proa.engine.results import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from proa.engine.tokenizer import Tokenizer
from proa.errors import RequestError
from proa.sampling.params import SamplingParams, check_vocab
from proa.sampling.state import SamplingState
from proa.speculative.protocol import TokenLogprobs
from proa.speculative.stats import SpeculativeStats

SEED_BITS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What every request of one model is held to. `eos_ids` end an answer; `proposes`: there is a drafter."""

    vocab: int
    max_model_len: int
    eos_ids: frozenset[int]
    proposes: bool


@dataclass(slots=True)
class _Choice:
    """One of a prompt's `n` answers, as it grows."""

    request: Request
    state: OutputState
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    finish_reason: str | None = None
    stats: SpeculativeStats | None = None


@dataclass(slots=True)
class Answer:
    """A prompt on its way through the engine. `prompt` is None where token ids were given."""

    prompt: str | None
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    choices: list[_Choice]
    started: float
    first_token: float | None = None
    ended: float | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None

    @property
    def finished(self) -> bool:
        return all(choice.finish_reason for choice in self.choices)

    def take_delta(self) -> str:
        """New text of the first choice."""
        return self.choices[0].state.take_delta()


class Session:
    """Not thread-safe. `step` moves every answer that was submitted."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, limits: Limits) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._limits = limits
        self._ids = count()
        self._owners: dict[int, tuple[Answer, _Choice]] = {}

    def submit(self, prompt: str | None, prompt_ids: Iterable[int], params: SamplingParams) -> Answer:
        """Admit a prompt with its `n` choices. Raises RequestError or CacheExhausted, and admits nothing then."""
        ids = self._checked(prompt_ids)
        check_vocab(params, self._limits.vocab)
        seed = secrets.randbits(SEED_BITS) if params.seed is None else params.seed % 2**SEED_BITS
        eos = frozenset[int]() if params.ignore_eos else self._limits.eos_ids
        bad_sequences = self._bad_sequences(params)
        answer = Answer(prompt, ids, params, [], time.perf_counter())
        for index in range(params.n):
            sampling = SamplingState(
                params=params,
                seed=seed,
                choice=index,
                prompt=ids,
                stop_ids=eos | frozenset(params.stop_token_ids),
                bad_sequences=bad_sequences,
            )
            self._add(answer, sampling)
        return answer

    def step(self) -> None:
        """One engine step; its tokens are in their answers afterwards."""
        for output in self._engine.step():
            self._take(output)

    def abort(self, answers: Iterable[Answer]) -> None:
        """End the answers that still run, here and now; what they have said stands."""
        for answer in answers:
            for choice in answer.choices:
                if choice.finish_reason is None:
                    self._engine.abort(choice.request.request_id)
                    self._end(answer, choice, "abort")

    def result(self, answer: Answer) -> RequestOutput:
        """The answer as a caller gets it."""
        prompt_logprobs = answer.prompt_logprobs
        return RequestOutput(
            prompt=answer.prompt,
            prompt_token_ids=answer.prompt_ids,
            prompt_logprobs=None
            if prompt_logprobs is None
            else tuple(None if entry is None else self._logprobs(entry) for entry in prompt_logprobs),
            outputs=tuple(self._completion(choice, answer.params) for choice in answer.choices),
            metrics=self._metrics(answer),
        )

    # Admission

    def _checked(self, prompt_ids: Iterable[int]) -> tuple[int, ...]:
        ids = tuple(prompt_ids)
        wrong = [i for i in ids if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < self._limits.vocab]
        if wrong:
            raise RequestError(
                "request/token-id",
                f"the prompt holds {wrong[0]!r}, which is no token id of this model (0 to {self._limits.vocab - 1}).",
            )
        return ids

    def _bad_sequences(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Each bad word as it is spelled at the start of a text and within one (after a space)."""
        spellings = [text for word in params.bad_words for text in (word, " " + word.lstrip())]
        encoded = (tuple(self._tokenizer.encode(text, add_special=False)) for text in spellings)
        return tuple(dict.fromkeys(ids for ids in encoded if ids))

    def _add(self, answer: Answer, sampling: SamplingState) -> None:
        params = answer.params
        room = self._limits.max_model_len - len(answer.prompt_ids)
        max_new = room if params.max_tokens is None else min(params.max_tokens, room)
        state = OutputState(self._tokenizer, params, len(answer.prompt_ids), sampling.stop_ids, max_new)
        request = Request(request_id=next(self._ids), prompt=answer.prompt_ids, sampling=sampling, sink=state)
        try:
            self._engine.add(request)
        except BaseException:
            self.abort([answer])
            raise
        choice = _Choice(request, state)
        answer.choices.append(choice)
        self._owners[request.request_id] = (answer, choice)

    # Steps

    def _take(self, output: StepOutput) -> None:
        owner = self._owners.get(output.request_id)
        if owner is None:  # aborted, and already reported as such
            return
        answer, choice = owner
        if output.tokens and answer.first_token is None:
            answer.first_token = time.perf_counter()
        choice.logprobs += output.logprobs
        choice.stats = output.stats
        if output.prompt_logprobs is not None:
            answer.prompt_logprobs = output.prompt_logprobs
        if output.finished:
            self._end(answer, choice, str(output.finish_reason or "length"))

    def _end(self, answer: Answer, choice: _Choice, reason: str) -> None:
        if reason == "abort":
            choice.state.abort()
        choice.finish_reason = reason
        del self._owners[choice.request.request_id]
        if answer.finished:
            answer.ended = time.perf_counter()

    # Results

    def _completion(self, choice: _Choice, params: SamplingParams) -> CompletionOutput:
        tokens = tuple(choice.request.output)
        wanted = params.logprobs is not None
        return CompletionOutput(
            index=choice.request.sampling.choice,
            text=choice.state.text,
            token_ids=tokens,
            logprobs=tuple(self._logprobs(entry) for entry in choice.logprobs) if wanted else None,
            cumulative_logprob=sum(entry.logprob for entry in choice.logprobs) if wanted else None,
            finish_reason=choice.finish_reason or "abort",
            stop_reason=choice.state.stop_reason,
        )

    def _logprobs(self, entry: TokenLogprobs) -> Mapping[int, Logprob]:
        ranked = {entry.token: (entry.logprob, entry.rank)}
        for rank, (token, logprob) in enumerate(entry.top, start=1):
            ranked.setdefault(token, (logprob, rank))
        return {
            token: Logprob(logprob=logprob, rank=rank, decoded_token=self._tokenizer.token_text(token))
            for token, (logprob, rank) in ranked.items()
        }

    def _metrics(self, answer: Answer) -> RequestMetrics:
        ended = answer.ended or time.perf_counter()
        first = answer.first_token or ended
        num_tokens = sum(len(choice.request.output) for choice in answer.choices)
        # All first tokens of the choices come from the prompt's forward.
        later = max(0, num_tokens - len(answer.choices))
        stats = SpeculativeStats.merged(choice.stats for choice in answer.choices if choice.stats)
        proposes = self._limits.proposes and answer.params.speculative
        return RequestMetrics(
            time_to_first_token=first - answer.started,
            total_seconds=ended - answer.started,
            num_prompt_tokens=len(answer.prompt_ids),
            num_output_tokens=num_tokens,
            num_cached_tokens=answer.choices[0].request.num_cached_tokens,
            tokens_per_second=later / (ended - first) if later and ended > first else 0.0,
            speculative_decoding=dict(stats.metrics()) if proposes else None,
        )
