"""Draws tokens from processed logits and reads log probabilities from raw ones. No generator state.

A token is the argmax of processed logits plus the Gumbel noise of its position, which is a draw from their softmax; at
temperature 0 it is the argmax alone. Equal values go to the lower id.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from proa.sampling.logits import total_order
from proa.sampling.noise import Purpose, gumbel, gumbel_of, noise_key
from proa.sampling.state import SamplingRow


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log probabilities of one emitted token under the raw logits: its own, its rank (1 = best), and the best k."""

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


def sample(processed: torch.Tensor, rows: Sequence[SamplingRow], purpose: Purpose) -> list[int]:
    """One token per row of `processed` [R, V], which is what `logits.process` returned for `rows`."""
    tokens: list[int] = processed.argmax(dim=1).tolist()
    for index, row in enumerate(rows):
        if not row.state.params.is_greedy:
            tokens[index] = draw(processed[index], row, purpose)
    return tokens


def draw(values: torch.Tensor, row: SamplingRow, purpose: Purpose) -> int:
    """Argmax of `values` [V] plus the row's noise; ids at -inf get none and are never drawn."""
    key = noise_key(row.state.seed, row.state.choice, row.position, purpose)
    ids = (values > -math.inf).nonzero().squeeze(1)
    if ids.numel() == values.numel():
        return int((values + gumbel(key, values.numel(), values.device)).argmax())
    if ids.numel() == 0:
        return 0
    return int(ids[(values[ids] + gumbel_of(key, ids)).argmax()])


def logprobs(raw: torch.Tensor, token: int, count: int) -> TokenLogprobs:
    """Of `token` under `raw` logits [V], with the best `count` (-1: all). Ranks follow the total order."""
    log_total = torch.logsumexp(raw.double(), dim=0)
    best = total_order(raw, raw.numel() if count < 0 else max(1, count))[: count if count >= 0 else None]
    value = raw[token]
    rank = 1 + int((raw > value).sum()) + int((raw[:token] == value).sum())
    scores = (raw[best].double() - log_total).tolist()
    return TokenLogprobs(
        token=token,
        logprob=(value.double() - log_total).item(),
        rank=rank,
        top=tuple(zip(best.tolist(), scores, strict=True)),
    )
