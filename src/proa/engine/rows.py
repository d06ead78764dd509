"""The target's rows of one step, and which row of logits answers which question. Owns no forward and no verdict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch

from proa.engine.delivery import Delivery
from proa.engine.reuse import CachedRunner
from proa.engine.scheduler import Chunk
from proa.runner.batch import RowSpan
from proa.speculative.protocol import HiddenRows, Proposal
from proa.speculative.verify import VerifyRequest
from proa.units import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafted:
    """One request's proposal: its tokens, and the distributions they were drawn from where verification needs them."""

    tokens: tuple[int, ...]
    probs: torch.Tensor | None


NOTHING = Drafted(tokens=(), probs=None)


class _Verified(NamedTuple):
    """The request's anchor has logits row `first`, its proposed tokens have the ones after it."""

    live: Delivery
    drafted: Drafted
    first: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """Logits rows `first`, `first + 1`, ... say how likely the prompt tokens [position, stop) were."""

    live: Delivery
    position: int
    stop: int
    first: int


class StepRows:
    """Reserves the rows in the target's tables, and slots for their states, within the step's transaction."""

    def __init__(self, runner: CachedRunner) -> None:
        self.spans: list[RowSpan] = []
        self.scored: list[Scored] = []
        self.num_rows = 0
        self.num_logits = 0
        self.kept_chunks: dict[int, int] = {}
        self._lives: list[Delivery] = []  # of each span
        self._tables, self._states = runner.tables, runner.states
        self._verified: list[_Verified] = []

    def add_row(self, live: Delivery, drafted: Drafted) -> None:
        """The request's anchor and what was proposed after it. Every row has logits."""
        request = live.request
        cached = self._tables.length(request.request_id)
        if cached != request.num_tokens - 1:
            raise RuntimeError(f"request {request.request_id} has {cached} rows cached of {request.num_tokens} tokens")
        self._verified.append(_Verified(live=live, drafted=drafted, first=self.num_logits))
        tokens = (request.output[-1], *drafted.tokens)
        rows = len(tokens)
        self._add(live, _recurrent(rows), tokens, cached, num_logits=rows, is_revocable=rows > 1)

    def add_chunk(self, live: Delivery, chunk: Chunk) -> None:
        """Rows of a prompt. The last one is an anchor: a proposal of no tokens, and the verdict is the first token."""
        request = live.request
        rows = chunk.stop - chunk.start
        is_end = chunk.stop == len(request.prompt) and not request.output
        num_logits = rows if live.wants_prompt_logprobs else int(is_end)
        if live.wants_prompt_logprobs:
            stop = min(chunk.stop + 1, len(request.prompt))
            self.scored.append(Scored(live=live, position=chunk.start + 1, stop=stop, first=self.num_logits))
        if is_end:
            self._verified.append(_Verified(live=live, drafted=NOTHING, first=self.num_logits + num_logits - 1))
        self.kept_chunks[chunk.request_id] = rows
        phase = _recurrent(rows) if chunk.is_replay else Phase.PREFILL
        tokens = request.tokens(chunk.start, chunk.stop)
        start = self._tables.length(chunk.request_id)
        self._add(live, phase, tokens, start, num_logits=num_logits, is_revocable=False, snapshots=chunk.snapshots)

    def _add(
        self,
        live: Delivery,
        phase: Phase,
        tokens: tuple[int, ...],
        start: int,
        *,
        num_logits: int,
        is_revocable: bool,
        snapshots: tuple[int, ...] = (),
    ) -> None:
        """Rows after the `start` committed ones; logits are those of the last `num_logits` rows."""
        request_id, rows, state = live.request.request_id, len(tokens), None
        self._tables.reserve(request_id, rows)
        if self._states is not None:
            state = self._states.extend(request_id, rows, is_revocable=is_revocable, snapshots=snapshots)
        self._lives.append(live)
        self.num_rows += rows
        self.num_logits += num_logits
        self.spans.append(
            RowSpan(
                phase=phase,
                tokens=tokens,
                start=start,
                pages=self._tables.pages(request_id),
                logits=range(rows - num_logits, rows),
                state=state,
            )
        )

    def verify_requests(self) -> list[VerifyRequest]:
        """What the verifier has to decide, in the order of `proposal` and `verify_logits`."""
        return [
            VerifyRequest(
                request_id=entry.live.request.request_id,
                sampling=entry.live.request.sampling,
                output=entry.live.request.output,
                sink=entry.live,
            )
            for entry in self._verified
        ]

    def proposal(self) -> Proposal:
        return Proposal(
            tokens=tuple(entry.drafted.tokens for entry in self._verified),
            probs=tuple(entry.drafted.probs for entry in self._verified),
        )

    def verify_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """The rows of `logits` that the verifier needs; all of them, uncopied, unless prompts were scored too."""
        if not self.scored:
            return logits
        rows = [entry.first + row for entry in self._verified for row in range(1 + len(entry.drafted.tokens))]
        return logits[rows]

    def hidden_rows(self, hidden: torch.Tensor, kept: Mapping[int, int]) -> list[HiddenRows]:
        """Of `hidden` [num_rows, D] the rows that were kept, for requests that may be drafted for.

        `kept`: how many of the step's rows stay, by request id.
        """
        firsts = accumulate((len(span.tokens) for span in self.spans), initial=0)
        return [
            HiddenRows(
                request_id=request.request_id,
                start=span.start,
                rows=hidden[first : first + kept[request.request_id]],
            )
            for live, span, first in zip(self._lives, self.spans, firsts, strict=False)
            if (request := live.request).sampling.params.speculative
        ]


def _recurrent(rows: int) -> Phase:
    """The phase of rows that come one after the other, as generated ones do."""
    return Phase.VERIFY if rows > 1 else Phase.DECODE
