"""Small made-up models and exact enumeration, for the proofs about verification."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cache

import torch

from proa.kernels.reference.sample import ReferenceSample
from proa.sampling.params import SamplingParams
from proa.sampling.state import SamplingState
from proa.speculative.verify import Verifier
from proa.units import Verification

# Draws an index with chances proportional to given weights.
Choose = Callable[[Sequence[float]], int]


class World:
    """A distribution over `vocab` tokens after every prefix, with some tokens impossible here and there."""

    def __init__(self, seed: int, vocab: int, *, holes: bool) -> None:
        self.seed = seed
        self.vocab = vocab
        self.holes = holes
        self.after = cache(self._after)

    def logits(self, prefix: tuple[int, ...]) -> torch.Tensor:
        words = enumerate([self.seed, *prefix])
        generator = torch.Generator().manual_seed(sum((word + 1) * 131**place for place, word in words) % (2**61 - 1))
        return torch.randn(self.vocab, generator=generator) * 2

    def _after(self, prefix: tuple[int, ...]) -> torch.Tensor:
        p = self.logits(prefix).double().softmax(0)
        if self.holes:
            p[(self.seed + len(prefix)) % self.vocab] = 0
        return p / p.sum()


class _Walk:
    """One way through a run: the scripted choices, then each time the first possible one; the rest waits its turn."""

    def __init__(self, script: list[int], unexplored: list[list[int]]) -> None:
        self.probability = 1.0
        self._script = script
        self._unexplored = unexplored
        self._taken: list[int] = []

    def choose(self, weights: Sequence[float]) -> int:
        if len(self._taken) < len(self._script):
            index = self._script[len(self._taken)]
        else:
            index, *others = [index for index, weight in enumerate(weights) if weight > 0]
            self._unexplored += [[*self._taken, other] for other in others]
        self._taken.append(index)
        self.probability *= float(weights[index]) / float(sum(weights))
        return index


def outcomes(run: Callable[[Choose], tuple[int, ...]]) -> Iterator[tuple[tuple[int, ...], float]]:
    """Every way in which `run` can go, with its probability: it is run once per combination of choices."""
    unexplored: list[list[int]] = [[]]
    while unexplored:
        walk = _Walk(unexplored.pop(), unexplored)
        result = run(walk.choose)
        yield result, walk.probability


def error_of(emit: Callable[[Choose], Sequence[int]], target: World, length: int) -> float:
    """Largest error of the distribution of `length` tokens: what `emit` gives, continued by plain sampling.

    If what is emitted is distributed as the target samples, then so is every continuation of it.
    """
    found: dict[tuple[int, ...], float] = defaultdict(float)

    def run(choose: Choose) -> tuple[int, ...]:
        tokens = tuple(emit(choose))[:length]
        while len(tokens) < length:
            tokens = (*tokens, choose(target.after(tokens).tolist()))
        return tokens

    for tokens, probability in outcomes(run):
        found[tokens] += probability
    worst = 0.0
    for tokens in itertools.product(range(target.vocab), repeat=length):
        exact = 1.0
        for index, token in enumerate(tokens):
            exact *= target.after(tokens[:index])[token].item()
        worst = max(worst, abs(found[tokens] - exact))
    return worst


class Sink:
    """Collects tokens and ends the request after `stop_after` of them, or never."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.tokens: list[int] = []
        self._stop_after = stop_after

    def push(self, token: int) -> bool:
        self.tokens.append(token)
        return len(self.tokens) == self._stop_after


def state(params: SamplingParams, *, seed: int = 1, prompt: Sequence[int] = (0, 1), **changes) -> SamplingState:
    fields = {"params": params, "seed": seed, "choice": 0, "prompt": prompt, "stop_ids": frozenset(), **changes}
    return SamplingState(**fields)


def verifier(mode: Verification) -> Verifier:
    return Verifier(mode, ReferenceSample())
