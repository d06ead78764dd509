"""The only emitter of tokens: decides how much of each proposal stands and what comes after it.

The pure kernels `coupled`, `rejection` and `tree` hold the rules. They draw through callables, so the tests enumerate
every outcome of the very code that runs here. `Verifier` feeds them rows, noise and sinks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from proa.kernels.seam import Sampler
from proa.sampling.logits import process
from proa.sampling.noise import Purpose, noise_key, uniform
from proa.sampling.sampler import TokenLogprobs, draw, logprobs, sample
from proa.sampling.state import SamplingRow, SamplingState
from proa.speculative.protocol import Proposal, RequestVerdict, TokenSink, Verdict
from proa.units import Verification


def coupled(
    proposals: Sequence[Sequence[int]], target: Callable[[Sequence[tuple[int, int]]], Sequence[int]]
) -> list[list[int]]:
    """Emit the target's own token of each row, as long as the proposal foresaw the one before.

    `target` gives for each (r, i) the token that the target draws after the first i tokens of proposal r. It is asked
    for one token of every proposal that still holds, then for the next: rows behind a token that was not foreseen cost
    nothing. Returns for each proposal the accepted tokens and one more.
    """
    emitted: list[list[int]] = [[] for _ in proposals]
    holding = list(range(len(proposals)))
    while holding:
        for which, token in zip(holding, target([(one, len(emitted[one])) for one in holding]), strict=True):
            emitted[which].append(token)
        holding = [one for one in holding if _holds(proposals[one], emitted[one])]
    return emitted


def _holds(proposed: Sequence[int], emitted: Sequence[int]) -> bool:
    last = len(emitted) - 1
    return last < len(proposed) and proposed[last] == emitted[last]


def rejection(
    proposed: Sequence[int],
    target: Callable[[int], torch.Tensor],
    drafted: Callable[[int], torch.Tensor | None],
    flip: Callable[[int, float], bool],
    pick: Callable[[int, torch.Tensor], int],
) -> list[int]:
    """Accept proposed tokens with probability min(1, p / q); return the accepted ones and one more, distributed as p.

    `target(i)` is p [V] after the first i proposed tokens, `drafted(i)` the q [V] that token i was drawn from, None for
    a point mass. `flip(i, x)` is true with probability x; `pick(i, weights)` draws an id. All independent.
    """
    emitted: list[int] = []
    for index, token in enumerate(proposed):
        p, q = target(index), drafted(index)
        if not flip(index, acceptance(p, q, token)):
            return [*emitted, pick(index, residual(p, q, token))]
        emitted.append(token)
    return [*emitted, pick(len(proposed), target(len(proposed)))]


def acceptance(p: torch.Tensor, q: torch.Tensor | None, token: int) -> float:
    """min(1, p / q) of the token; p of it where q is a point mass."""
    wanted = p[token].item()
    given = 1.0 if q is None else q[token].item()
    return 1.0 if 0 < given <= wanted else wanted / given if given > 0 else 0.0


def residual(p: torch.Tensor, q: torch.Tensor | None, token: int) -> torch.Tensor:
    """max(p - q, 0), normalised: what a rejected token is replaced from. p itself where nothing is left of it."""
    rest = p.index_fill(0, torch.tensor([token], device=p.device), 0.0) if q is None else (p - q).clamp(min=0)
    total = rest.sum()
    return rest / total if total > 0 else p


def tree(tokens: Sequence[int], parents: Sequence[int], target: Callable[[int], int]) -> tuple[list[int], list[int]]:
    """Walk from the anchor (-1) to the child that equals the target's token, until there is none.

    Node i proposes `tokens[i]` after its parent `parents[i]`, -1 or a lower index; siblings differ. `target(node)`
    draws the target's token after that node. Returns the emitted tokens and the accepted nodes; no q is needed.
    """
    emitted = [target(-1)]
    path: list[int] = []
    children = {(parent, token): node for node, (parent, token) in enumerate(zip(parents, tokens, strict=True))}
    node = children.get((-1, emitted[-1]))
    while node is not None:
        path.append(node)
        emitted.append(target(node))
        node = children.get((node, emitted[-1]))
    return emitted, path


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyRequest:
    """One request of the step. `output`: its tokens after the prompt, anchor included, nothing proposed."""

    request_id: int
    sampling: SamplingState
    output: Sequence[int]
    sink: TokenSink


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """One request's rows: its anchor's, then one per proposed token. They are `logits` [R, V] from row `first` on."""

    request: VerifyRequest
    proposed: tuple[int, ...]
    probs: torch.Tensor | None
    logits: torch.Tensor
    first: int

    def raw(self, index: int) -> torch.Tensor:
        return self.logits[self.first + index]

    def row(self, index: int) -> SamplingRow:
        request = self.request
        return SamplingRow(state=request.sampling, output=request.output, proposed=self.proposed[:index])

    def distribution(self, index: int) -> torch.Tensor:
        return process(self.raw(index), self.row(index)).double().softmax(dim=0)

    def drafted(self, index: int) -> torch.Tensor | None:
        return None if self.probs is None else self.probs[index]

    def flip(self, index: int, probability: float) -> bool:
        row = self.row(index)
        return uniform(noise_key(row.state.seed, row.state.choice, row.position, Purpose.ACCEPT)) < probability

    def pick(self, index: int, weights: torch.Tensor) -> int:
        # A point mass proposal may have been drawn with the TOKEN noise of its position: its replacement may not.
        purpose = Purpose.RESIDUAL if index < len(self.proposed) else Purpose.TOKEN
        return draw(weights.log(), self.row(index), purpose)


class Verifier:
    """Verifies one step. Plain decoding is a proposal of no tokens: there is no other way to emit one.

    `kernels` draw the target's tokens.
    """

    def __init__(self, mode: Verification, kernels: Sampler) -> None:
        self.mode = mode
        self._kernels = kernels

    def verify(self, requests: Sequence[VerifyRequest], proposal: Proposal, logits: torch.Tensor) -> Verdict:
        """`logits` [sum(len(proposed) + 1), V] float32: per request the anchor's row, then one per proposed token."""
        probs = proposal.probs or (None,) * len(requests)
        every: list[_Rows] = []
        first = 0
        for request, proposed, drafted in zip(requests, proposal.tokens, probs, strict=True):
            every.append(_Rows(request=request, proposed=proposed, probs=drafted, logits=logits, first=first))
            first += len(proposed) + 1
        tokens = self._coupled([rows for rows in every if self._is_coupled(rows)], logits)
        return Verdict(
            requests=tuple(
                _verdict(rows, next(tokens) if self._is_coupled(rows) else _rejection(rows)) for rows in every
            )
        )

    def _is_coupled(self, rows: _Rows) -> bool:
        return self.mode is Verification.COUPLED or rows.request.sampling.params.is_greedy

    def _coupled(self, every: Sequence[_Rows], logits: torch.Tensor) -> Iterator[list[int]]:
        def target(asked: Sequence[tuple[int, int]]) -> list[int]:
            rows = [every[which].row(index) for which, index in asked]
            at = [every[which].first + index for which, index in asked]
            return sample(self._kernels, logits, rows, at, Purpose.TOKEN)

        return iter(coupled([rows.proposed for rows in every], target))


def _rejection(rows: _Rows) -> list[int]:
    return rejection(rows.proposed, rows.distribution, rows.drafted, rows.flip, rows.pick)


def _verdict(rows: _Rows, tokens: Sequence[int]) -> RequestVerdict:
    """Emit them; what comes after the end of the request is not."""
    emitted, entries, finished = _emit(rows, tokens)
    return RequestVerdict(
        request_id=rows.request.request_id,
        proposed=len(rows.proposed),
        accepted=min(len(tokens) - 1, len(emitted)),
        emitted=emitted,
        keep=len(emitted),
        finished=finished,
        logprobs=entries,
    )


def _emit(rows: _Rows, tokens: Sequence[int]) -> tuple[tuple[int, ...], tuple[TokenLogprobs, ...], bool]:
    """Push token by token until the request ends; what comes after was never emitted."""
    count = rows.request.sampling.params.logprobs
    entries: list[TokenLogprobs] = []
    for index, token in enumerate(tokens):
        if count is not None:
            entries.append(logprobs(rows.raw(index), token, count))
        if rows.request.sink.push(token):
            return tuple(tokens[: index + 1]), tuple(entries), True
    return tuple(tokens), tuple(entries), False
