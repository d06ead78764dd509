"""One request as the engine sees it: its tokens and where it stands. Owns no pages and no text. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Protocol

from proa.sampling.state import SamplingState


class Status(Enum):
    """WAITING: never ran. PREEMPTED: ran, lost its pages, waits again. FINISHED is final."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


_NEXT: Mapping[Status, frozenset[Status]] = MappingProxyType(
    {
        Status.WAITING: frozenset({Status.RUNNING, Status.FINISHED}),
        Status.RUNNING: frozenset({Status.PREEMPTED, Status.FINISHED}),
        Status.PREEMPTED: frozenset({Status.RUNNING, Status.FINISHED}),
        Status.FINISHED: frozenset(),
    }
)


class Sink(Protocol):
    """Where a request's tokens go, one at a time and in order. Only the verifier pushes.

    The sink ends the request: at a stop token, a stop string, or its own count of tokens.
    """

    @property
    def finish_reason(self) -> str | None:
        """`stop` or `length` once `push` has answered True, None before."""
        ...

    def push(self, token: int) -> bool:
        """Record the token; True when the request ends with it."""
        ...


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """`prompt` and `sampling` are fixed; `output` grows by what the verifier emits and survives a preemption.

    A cache row holds what the model computed for one token, so `prompt + output` needs a row for all but its last token
    before that one can be the anchor of a decode or verify step. `num_cached_tokens` of its prompt had their rows when
    it came, from others that began like it.
    """

    request_id: int
    prompt: tuple[int, ...]
    sampling: SamplingState
    sink: Sink
    output: list[int] = field(default_factory=list[int])
    status: Status = Status.WAITING
    num_cached_tokens: int = 0

    def become(self, status: Status) -> None:
        if status not in _NEXT[self.status]:
            raise RuntimeError(f"request {self.request_id} is {self.status.value} and cannot become {status.value}")
        self.status = status

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def prefill_rows(self) -> int:
        """Rows that prefill has to fill: the prompt, or after a preemption everything before the anchor.

        A fresh prompt's last row yields the first token. A resumed request has its next anchor already.
        """
        return len(self.prompt) + max(0, len(self.output) - 1)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """They come with the first token."""
        return self.sampling.params.prompt_logprobs is not None and not self.output

    def tokens(self, start: int, stop: int) -> tuple[int, ...]:
        """Tokens [start, stop) of prompt + output."""
        border = len(self.prompt)
        return self.prompt[start:stop] + tuple(self.output[max(0, start - border) : max(0, stop - border)])

    def max_output(self, max_model_len: int) -> int:
        """Most tokens it may emit: what was asked, cut by what is left of the model length."""
        room = max_model_len - len(self.prompt)
        asked = self.sampling.params.max_tokens
        return room if asked is None else min(asked, room)
