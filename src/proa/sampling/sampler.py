"""Draws tokens from raw logits, and reads log probabilities from them. No generator state.

A token is the argmax of processed logits plus the Gumbel noise of its position, which is a draw from their softmax; at
temperature 0 it is the argmax alone. Equal values go to the lower id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from proa.kernels.reference.sample import noisy_argmax, ordered
from proa.kernels.seam import Draw, Sampler
from proa.sampling.logits import draw_of, edited, is_edited
from proa.sampling.noise import Purpose, noise_key
from proa.sampling.state import SamplingRow


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log probabilities of one emitted token under the raw logits: its own, its rank (1 = best), and the best k."""

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


def sample(
    kernels: Sampler, logits: torch.Tensor, rows: Sequence[SamplingRow], at: Sequence[int], purpose: Purpose
) -> list[int]:
    """One token per entry of `rows`, drawn from row `at[i]` of the raw `logits` [R, V], which stay as they are."""
    tokens = [0] * len(rows)
    raw = [index for index, row in enumerate(rows) if not is_edited(row)]
    if raw:
        _fill(tokens, raw, kernels.sample(logits, [_draw(rows[index], at[index], purpose) for index in raw]))
    if len(raw) < len(rows):
        rest = [index for index, row in enumerate(rows) if is_edited(row)]
        copies = torch.stack([edited(logits[at[index]], rows[index]) for index in rest])
        draws = [_draw(rows[index], copy, purpose) for copy, index in enumerate(rest)]
        _fill(tokens, rest, kernels.sample(copies, draws))
    return tokens


def draw(values: torch.Tensor, row: SamplingRow, purpose: Purpose) -> int:
    """A draw from the softmax of `values` [V], float32 or float64, by the noise of the row; never an id at -inf."""
    return noisy_argmax(values.cpu().numpy(), _key(row, purpose))


def _draw(row: SamplingRow, at: int, purpose: Purpose) -> Draw:
    return draw_of(row.state, at, 0 if row.state.params.is_greedy else _key(row, purpose))


def _key(row: SamplingRow, purpose: Purpose) -> int:
    return noise_key(row.state.seed, row.state.choice, row.position, purpose)


def _fill(tokens: list[int], indices: Sequence[int], drawn: Sequence[int]) -> None:
    for index, token in zip(indices, drawn, strict=True):
        tokens[index] = token


def total_order(values: torch.Tensor, at_least: int) -> torch.Tensor:
    """Ids of `values` [V] by value descending, then id ascending: the first `at_least` and the ties of the last one.
    -inf entries have no place in the order."""
    return torch.from_numpy(ordered(values.cpu().numpy(), at_least))


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
