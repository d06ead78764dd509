"""Reference sampling: temperature, filters and the draw. The readable definition, and what runs without native kernels.

  1. temperature   (logit - largest) / temperature: the same distribution, and no overflow at tiny temperatures
  2. top-k         the k first of the total order: value descending, then id ascending
  3. top-p         of what is left, renormalised: the shortest head of that order with top_p of the mass or more
  4. min-p         of what is left: values of at least `floor`, relative to the largest
  5. draw          the argmax of value plus Gumbel noise, a draw from the softmax; equal sums go to the lower id

Temperature 0 is the argmax alone, the lowest id of equals. Every row is computed alone, so its result does not depend
on its batch. A row with nothing to draw gives token 0; so does one that holds a NaN, which is the argmax otherwise.

Rows are processed on the host, whatever device computed them: one arithmetic for target and draft. numpy works on the
memory of the tensors; its comparisons, maxima and index searches over one row take a tenth of torch's time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from proa.kernels.reference.noise import gumbel_of, uniform_floors
from proa.kernels.seam import Draw

Row = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

# Tokens that are ranked before all are: top-p rarely needs more, and a full sort costs thirty times as much.
_HEADS = (1024, 8192)
_FEWEST_GROUPS = 512
# Below this many ids, noise for all of them costs less than finding out which ones need it.
_WORTH_SCREENING = 2048
# Far more than the error of what `_may_win` computes in float32, which is below 1e-5.
_SLACK = 1e-3


class ReferenceSample:
    """SampleOps on numpy."""

    name = "reference"

    def sample(self, logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
        if logits.device.type != "cpu" and all(one.temperature == 0 for one in draws):
            return logits[[one.row for one in draws]].argmax(dim=1).tolist()  # rows stay where they are
        rows = logits.to("cpu", torch.float32).numpy()
        return [token_of(rows[one.row], one) for one in draws]


def token_of(logits: Row, one: Draw) -> int:
    """The token of one row [V], which stays as it is."""
    if one.temperature == 0:
        return int(logits.argmax())  # 4 µs for 49,152 values where torch takes 43
    values = logits.copy()
    narrow(values, one)
    return noisy_argmax(values, one.key)


def narrow(values: Row, one: Draw) -> None:
    """Steps 1 to 4 in place: entries that are left out become -inf. Nothing at temperature 0."""
    if one.temperature == 0:
        return
    # A row with every token masked stays -inf rather than becoming NaN.
    values -= np.maximum(values.max(), np.finfo(np.float32).min)
    with np.errstate(over="ignore"):  # -inf is what a tiny temperature leaves of all but the best
        values /= np.maximum(np.float32(one.temperature), np.finfo(np.float32).tiny)
    _filter(values, one)


def noisy_argmax(values: npt.NDArray[Any], key: int) -> int:
    """Step 5 on float32 or float64 `values` [V]; ids at -inf get no noise and are never drawn."""
    ids = np.flatnonzero(values > -math.inf)
    if ids.size == 0:
        return 0
    if ids.size > _WORTH_SCREENING:
        # 0.2 ms for 49,152 ids, where noise for all of them takes 1.3 ms.
        ids = _may_win(key, ids, values if ids.size == values.size else values[ids])
    if ids.size == 1:
        return int(ids[0])
    return int(ids[_scores(key, ids, values[ids]).argmax()])


def ordered(values: npt.NDArray[Any], at_least: int) -> Ids:
    """Ids of `values` [V] by value descending, then id ascending; -inf entries have no place in the order.

    Not all: the first `at_least` of them, and the ties of the last one.
    """
    ids = np.flatnonzero(values >= _bound(values, at_least)) if at_least < values.size else np.arange(values.size)
    ids = ids[values[ids] > -math.inf]
    ids = ids[np.argsort(-values[ids], kind="stable")]
    if ids.size > at_least > 0:
        ids = ids[values[ids] >= values[ids[at_least - 1]]]
    return ids


def _bound(values: npt.NDArray[Any], count: int) -> Any:
    """A value that at least `count` (1 or more) of `values` reach, and few others do.

    It is the `count`-th largest of the maxima of disjoint groups: as many groups hold a value that reaches it. 20-40 µs
    for 49,152 values where an exact selection takes 90 (40th) to 370 µs (1024th).
    """
    groups = max(_FEWEST_GROUPS, 4 * count)
    rows = values.size // groups
    if rows > 1:
        values = values[: rows * groups].reshape(rows, groups).max(axis=0)
    return np.partition(values, values.size - count)[values.size - count]


def _filter(values: Row, one: Draw) -> None:
    """Steps 2 to 4 in place. Masses are summed in float64, in the total order."""
    has_top_k = 0 < one.top_k < values.size
    has_filter = has_top_k or one.top_p < 1 or one.floor > -math.inf
    if not has_filter or not values.max() > -math.inf:
        return
    if has_top_k:
        order = ordered(values, one.top_k)[: one.top_k]
        count = _nucleus(values[order], one.top_p, None)
    elif one.top_p < 1:
        order, count = _nucleus_of_all(values, one.top_p)
    else:
        order = np.flatnonzero(values > -math.inf)
        count = order.size
    kept = order[:count]
    if one.floor > -math.inf:
        kept = kept[values[kept].astype(np.float64) >= float(values.max()) + one.floor]
    result = values[kept]
    values.fill(-math.inf)
    values[kept] = result


def _nucleus_of_all(values: Row, top_p: float) -> tuple[Ids, int]:
    """The order and how many of it top-p keeps, ranking only the head where that has enough mass."""
    mass = float(np.exp(values.astype(np.float64) - values.max()).sum())
    for at_least in (*_HEADS, values.size):
        order = ordered(values, at_least)
        count = _nucleus(values[order], top_p, mass)
        if count <= order.size:
            return order, count
    return order, order.size


def _nucleus(best: Row, top_p: float, mass: float | None) -> int:
    """How many of `best` logits, in order, hold top_p of `mass` (None: of their own); if all hold less, one more than
    exist."""
    if top_p >= 1:
        return best.size
    reached = np.exp(best.astype(np.float64) - best[0]).cumsum()
    wanted = top_p * (reached[-1] if mass is None else mass)
    return int(np.searchsorted(reached, wanted)) + 1


def _may_win(key: int, ids: Ids, values: npt.NDArray[Any]) -> Ids:
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


def _scores(key: int, ids: Ids, values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    return values + gumbel_of(key, torch.from_numpy(ids)).numpy()
