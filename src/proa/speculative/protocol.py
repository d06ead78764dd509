"""The seam between drafters, verifier and engine: what goes in, what comes out. Owns no algorithm.

Legend: B requests of the step, K tokens of the longest proposal, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from proa.cache.state import StateTables
from proa.cache.tables import BlockTables
from proa.kernels.seam import Sampler
from proa.runner.batch import ForwardOutput, RowSpan
from proa.sampling.sampler import TokenLogprobs
from proa.sampling.state import SamplingState


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRequest:
    """What a drafter may know of one request.

    `tokens` is prompt + output; the last one is the anchor, whose row is in no cache yet. `limit` is the longest
    proposal that is of use in this step (0: none). `snapshots` says after how many rows of the prompt the state of a
    drafter's own runner is worth keeping (cache/state.py), if it computes them.
    """

    request_id: int
    tokens: Sequence[int]
    sampling: SamplingState
    limit: int
    snapshots: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftContext:
    """The requests of one step, in batch order."""

    requests: tuple[DraftRequest, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """`tokens[b]` proposed for request b, possibly none (plain decoding).

    `probs[b]` is [len(tokens[b]), V] float64: the distribution each token was drawn from; only the rejection rule reads
    it. None, for a request or for all: the tokens were drawn with no noise of their own (greedy, n-gram, or the noise
    that the target meets as well), hence a point mass to the rejection rule.

    `evidence[b]`, 1 or more, says what speaks for the first proposed token of request b, such as the length of the
    n-gram that it continued; each further one has one more. It must be known without the tokens that the target judges.
    None: nothing but the proposals themselves, which counts as 1.
    """

    tokens: tuple[tuple[int, ...], ...]
    probs: tuple[torch.Tensor | None, ...] | None = None
    evidence: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenRows:
    """Hidden rows [n, D] of a request's positions `start`, `start + 1`, ... as the target computed them, in the compute
    dtype. The positions are committed. `rows` is a view of the step's output: copy what is kept."""

    request_id: int
    start: int
    rows: torch.Tensor


class TokenSink(Protocol):
    """Takes a request's emitted tokens one at a time, in order."""

    def push(self, token: int) -> bool:
        """Record the token; True when the request ends with it (EOS, stop string, length)."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestVerdict:
    """`accepted` proposal tokens were right; `emitted` = accepted ones plus the target's own next token, cut where the
    request ended. `keep` counts the verified rows that stay cached, anchor included: len(emitted)."""

    request_id: int
    proposed: int
    accepted: int
    emitted: tuple[int, ...]
    keep: int
    finished: bool
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One entry per request, in batch order."""

    requests: tuple[RequestVerdict, ...]


class DraftRunner(Protocol):
    """All that drafting needs of a runner. `states`: of a model with delta layers; `kernels` draw from its logits."""

    @property
    def tables(self) -> BlockTables: ...

    @property
    def states(self) -> StateTables | None: ...

    @property
    def kernels(self) -> Sampler: ...

    def forward(self, spans: Sequence[RowSpan]) -> ForwardOutput: ...


class Drafter(Protocol):
    """Proposes tokens; emits none. No member is optional.

    The block tables of a drafter's own runner are a participant of the step's transaction. `keep` counts from the
    anchor on for them too: rows of tokens before it, which a drafter may have to catch up on, are settled by itself.
    """

    max_tokens: int
    needs_hidden: bool

    def observe(self, hidden: Sequence[HiddenRows]) -> None:
        """A step is kept: hidden rows of what it committed, prompts included, of every request that may be drafted for
        later. Called only where `needs_hidden`, before `commit`; rows of one request begin where those in the cache of
        the drafter's own runner end, at position 0 without such, and come in order, without gaps."""
        ...

    def prefill(self, context: DraftContext) -> None:
        """Before every `propose`, outside of the step's transaction: rows of tokens before the anchors are final, and
        may be filled in for good in a transaction of the drafter's own. Leaves nothing behind when it raises, and is
        called again."""
        ...

    def propose(self, context: DraftContext) -> Proposal:
        """At most `limit` tokens per request. Rows written to an own cache belong to the step's transaction."""
        ...

    def commit(self, verdict: Verdict) -> None:
        """Advance own bookkeeping to the emitted tokens."""
        ...

    def release(self, request_ids: Sequence[int]) -> None:
        """Forget these requests, known or not, and free what they hold; their hidden rows begin anew afterwards."""
        ...
