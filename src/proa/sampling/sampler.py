"""Draws tokens from processed logits and reads log probabilities from raw ones. No generator state.

A token is the argmax of processed logits plus the Gumbel noise of its position, which is a draw from their softmax; at
temperature 0 it is the argmax alone. Equal values go to the lower id.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from proa.sampling.logits import argmax_rows, total_order
from proa.sampling.noise import Purpose, gumbel_of, noise_key, uniform_floors
from proa.sampling.state import SamplingRow

# Below this many ids, noise for all of them costs less than finding out which ones need it.
_WORTH_SCREENING = 2048
# Far more than the error of what `_may_win` computes in float32, which is below 1e-5.
_SLACK = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log probabilities of one emitted token under the raw logits: its own, its rank (1 = best), and the best k."""

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


def sample(processed: torch.Tensor, rows: Sequence[SamplingRow], purpose: Purpose) -> list[int]:
    """One token per row of `processed` [R, V], which is what `logits.process` returned for `rows`."""
    if all(row.state.params.is_greedy for row in rows):
        return argmax_rows(processed)
    return [draw(values, row, purpose) for values, row in zip(processed, rows, strict=True)]


def draw(values: torch.Tensor, row: SamplingRow, purpose: Purpose) -> int:
    """Argmax of `values` [V], plus the row's noise unless it is greedy; ids at -inf get none and are never drawn."""
    array = values.cpu().numpy()
    if row.state.params.is_greedy:
        return int(array.argmax())
    key = noise_key(row.state.seed, row.state.choice, row.position, purpose)
    ids = np.flatnonzero(array > -math.inf)
    if ids.size == 0:
        return 0
    if ids.size > _WORTH_SCREENING:
        # 0.2 ms for 49,152 ids, where noise for all of them takes 1.3 ms.
        ids = _may_win(key, ids, array if ids.size == array.size else array[ids])
    if ids.size == 1:
        return int(ids[0])
    return int(ids[_scores(key, ids, array[ids]).argmax()])


def _may_win(key: int, ids: npt.NDArray[np.int64], values: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Those of `ids` whose value plus noise may be the largest, usually one or two. Leaves out none that could tie.

    Noise is -log(-log(1 - u)) <= -log(u), so an id whose score is s has exp(value) / u >= exp(s), and a lower bound of
    u keeps that true. Whichever id has the largest such ratio, its exact score is one that the winner reaches: only ids
    with a ratio of exp(that score) or more are left. Values are taken relative to the largest; the winner's is then
    above -50, since noise lies between -3.7 and 45.1, so nothing that matters underflows and float32 with `_SLACK`
    will do.
    """
    largest = values.max()
    ratios = np.exp((values - largest).astype(np.float32, copy=False))
    np.maximum(ratios, np.finfo(np.float32).tiny, out=ratios)
    with np.errstate(divide="ignore"):  # a floor of 0 tells nothing: infinity, may win
        ratios /= uniform_floors(key, ids)
    likely = slice(best := int(ratios.argmax()), best + 1)
    score = float(_scores(key, ids[likely], values[likely])[0]) - float(largest)
    return ids[ratios >= np.float32(math.exp(score) * (1 - _SLACK))]


def _scores(key: int, ids: npt.NDArray[np.int64], values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    return values + gumbel_of(key, torch.from_numpy(ids)).numpy()


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
