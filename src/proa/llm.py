"""LLM: the blocking Python interface. Owns prompts, defaults and the lock; assembling and serving are engine/'s."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from threading import RLock
from types import TracebackType
from typing import Any, cast

from proa.config.intent import EngineConfig
from proa.engine.assembly import Assembled, Report, assemble
from proa.engine.defaults import default_sampling
from proa.engine.preparation import merged
from proa.engine.results import RequestOutput
from proa.engine.session import Answer, Session
from proa.env import Environment, read_environment
from proa.errors import RequestError
from proa.kernels.cost import CostTable
from proa.sampling.params import SamplingParams

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


class LLM:
    """A model, and optionally a draft, ready to answer. A context manager.

    `model` is a directory, a `.gguf` file, `user/repo` or a recipe's name. `settings` have the flags' names
    (`kv_dtype`, `draft_dtype`, `max_model_len`; nested: `draft={"path": ..., "kv_dtype": ...}`). PROA_* variables hold
    where an argument says nothing. May be used from several threads; their requests share its batches.
    """

    def __init__(
        self,
        model: str | Path,
        draft: str | Path | Mapping[str, Any] | None = None,
        speculative: str = "auto",
        num_draft_tokens: int | str = "auto",
        dtype: str = "auto",
        **settings: Any,
    ) -> None:
        environment = read_environment()
        words = {"speculative": speculative, "num_draft_tokens": num_draft_tokens, "dtype": dtype}
        # "auto" is the default here, not an ask: it must not put aside what the environment says.
        asked = {name: value for name, value in words.items() if value != "auto"}
        config = merged(model, {"draft": draft, **settings, **asked})
        self._open(config, environment, Report.silent())

    @classmethod
    def from_config(cls, config: EngineConfig, environment: Environment, report: Report) -> LLM:
        """From a merged intent, as the command line has it."""
        llm = cls.__new__(cls)
        llm._open(config, environment, report)
        return llm

    def _open(self, config: EngineConfig, environment: Environment, report: Report) -> None:
        # Re-entrant: a Stream that the garbage collector finds in the middle of a step ends its request.
        self._lock = RLock()
        self._assembled: Assembled | None = assemble(
            config, cache_dir=environment.cache_dir, online=not environment.offline, report=report
        )

    # Answers

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer a text, a list of token ids, or a list of either; one RequestOutput per prompt, in order.

        `params` is for all prompts, or one per prompt; without it the checkpoint's defaults hold (`default_params`).
        """
        listed = _as_list(prompts)
        texts = [prompt if isinstance(prompt, str) else None for prompt in listed]
        ids = [self._encode(prompt) for prompt in listed]
        return self._run(list(zip(texts, ids, self._params(params, len(listed)), strict=True)))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several, through the model's own chat template."""
        single = not messages or isinstance(messages[0], Mapping)
        talks = cast("Sequence[Sequence[Message]]", [messages] if single else messages)
        texts = [self.render(talk, tools=tools, add_generation_prompt=add_generation_prompt) for talk in talks]
        ids = [self._open_parts.tokenizer.encode(text, add_special=False) for text in texts]
        return self._run(list(zip(texts, ids, self._params(params, len(texts)), strict=True)))

    def stream(self, prompt: Prompt | Sequence[Message], params: SamplingParams | None = None) -> Stream:
        """The answer as pieces of text, while it is made. `prompt` is a text, token ids, or a conversation."""
        chosen = self._params(params, 1)[0]
        if chosen.n != 1:
            raise RequestError("request/not-supported", f"n = {chosen.n} answers cannot be streamed at once.")
        if not isinstance(prompt, str) and prompt and isinstance(prompt[0], Mapping):
            text: str | None = self.render(cast("Sequence[Message]", prompt))
            ids = self._open_parts.tokenizer.encode(text, add_special=False)
        else:
            text = prompt if isinstance(prompt, str) else None
            ids = self._encode(cast("Prompt", prompt))
        session = self._open_parts.session
        with self._lock:
            answer = session.submit(text, ids, chosen)
        return Stream(session, self._lock, answer)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt text that the chat template makes of a conversation."""
        template = self._open_parts.template
        if template is None:
            raise RequestError(
                "request/no-chat-template",
                "this model has no chat template.",
                hint="give the prompt as text: generate(), or `proa run --raw`",
            )
        return template.render(messages, add_generation_prompt=add_generation_prompt, tools=tools)

    def default_params(self, **given: Any) -> SamplingParams:
        """The checkpoint's sampling defaults (generation_config.json, else temperature 1.0), with `given` on top."""
        generation = self._open_parts.resolved.target.checkpoint.generation
        return SamplingParams(**{**default_sampling(generation), **given})

    # What it is

    @property
    def has_chat_template(self) -> bool:
        return self._open_parts.template is not None

    @property
    def vocab_size(self) -> int:
        """Rows of the target's embedding, padding included."""
        return self._open_parts.resolved.target.spec.vocab

    @property
    def threads(self) -> int:
        return self._open_parts.resolved.plans.host.threads.value

    @property
    def algorithm(self) -> str:
        """How proposals are made; `none` without a drafter."""
        contract = self._open_parts.resolved.plans.contract
        return "none" if contract is None else contract.algorithm.value

    @property
    def verification(self) -> str:
        """How sampled tokens are verified: coupled or rejection."""
        contract = self._open_parts.resolved.plans.contract
        return "coupled" if contract is None else contract.verification.value.value

    @property
    def costs(self) -> Mapping[str, CostTable]:
        """By role, what forwards cost on this host, as far as that was measured."""
        return self._open_parts.costs

    def descriptions(self) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
        """By role: what the built runner says of itself, and what its plan promised. Equal, or something is wrong."""
        return self._open_parts.descriptions()

    def explain(self) -> dict[str, Any]:
        """As `proa explain --json`."""
        return self._open_parts.explain()

    def ledger(self) -> dict[str, Any]:
        """As `proa inspect --json`, after loading."""
        return self._open_parts.ledger()

    def stats(self) -> dict[str, Any]:
        """Since the start: requests waiting and running, what proposals were worth, each runner's kernel calls."""
        return self._open_parts.stats()

    # The end

    def close(self) -> None:
        """Free the models. May be called again; any other call afterwards is an error."""
        self._assembled = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _open_parts(self) -> Assembled:
        if self._assembled is None:
            raise RequestError("request/closed", "this LLM is closed.")
        return self._assembled

    def _run(self, work: Sequence[tuple[str | None, Sequence[int], SamplingParams]]) -> list[RequestOutput]:
        """Serve all of `work` in shared batches. Whatever goes wrong, nothing of it stays in the engine."""
        session = self._open_parts.session
        answers: list[Answer] = []
        try:
            for text, ids, params in work:
                with self._lock:
                    answers.append(session.submit(text, ids, params))
            while not all(answer.finished for answer in answers):
                with self._lock:
                    session.step()
        finally:
            with self._lock:
                session.abort(answers)
        return [session.result(answer) for answer in answers]

    def _encode(self, prompt: Prompt) -> Sequence[int]:
        return self._open_parts.tokenizer.encode(prompt, add_special=True) if isinstance(prompt, str) else prompt

    def _params(self, params: SamplingParams | Sequence[SamplingParams] | None, prompts: int) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [self.default_params() if params is None else params] * prompts
        if len(params) != prompts:
            raise RequestError(
                "request/params-count", f"{len(params)} SamplingParams were given for {prompts} prompts."
            )
        return list(params)


class Stream(Iterator[str]):
    """Pieces of one answer's text. Closing it, or dropping it half read, ends the request."""

    def __init__(self, session: Session, lock: RLock, answer: Answer) -> None:
        self._session = session
        self._lock = lock
        self._answer = answer

    def __next__(self) -> str:
        while True:
            with self._lock:
                if piece := self._answer.take_delta():
                    return piece
                if self._answer.finished:
                    raise StopIteration
                self._session.step()

    def close(self) -> None:
        """End the answer here; what was said stands."""
        with self._lock:
            self._session.abort([self._answer])

    def __del__(self) -> None:
        self.close()

    def output(self) -> RequestOutput:
        """The whole answer so far, with its figures."""
        return self._session.result(self._answer)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One text or one list of token ids is a batch of one."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [cast("Prompt", prompts)]
    return list(cast("Sequence[Prompt]", prompts))
