"""From raw logits to the logits that a token is drawn from: one pure function, one order, target and drafter alike.

  1. repetition penalty    tokens of prompt and output: a logit above 0 is divided by it, any other multiplied
  2. frequency, presence   tokens of the output: minus frequency x occurrences, minus presence
  3. logit bias            added
  4. masks (-inf)          tokens outside allowed_token_ids; stop ids while fewer than min_tokens tokens are out; the
                           last token of a bad sequence whose other tokens end the output, unless that would leave no
                           token at all in the row
  5. temperature           (logit - largest) / temperature: the same distribution, and no overflow at tiny temperatures
  6. top-k                 the k first of the total order: value descending, then id ascending
  7. top-p                 of what is left, renormalised: the shortest head of that order with top_p of the mass or more
  8. min-p                 of what is left: tokens with at least min_p times the probability of the likeliest

Temperature 0 ends after step 4. Every row is computed alone, so its result does not depend on its batch.

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

from proa.sampling.params import SamplingParams
from proa.sampling.state import SamplingRow, SamplingState

Row = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

# Tokens that are ranked before all are: top-p rarely needs more, and a full sort costs thirty times as much.
_HEADS = (1024, 8192)
_FEWEST_GROUPS = 512


def process(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Return [R, V] float32 on the host, masked and filtered entries -inf; `logits` [R, V] stays as it is.

    Token ids at or above V in histories and parameters are ignored: a drafter may know fewer tokens than its target.
    """
    processed = logits.to("cpu", torch.float32, copy=True)
    for values, row in zip(processed.numpy(), rows, strict=True):
        _process(values, row)
    return processed


def process_row(logits: torch.Tensor, row: SamplingRow) -> torch.Tensor:
    """One row [V] of `process`, for a caller that may not need the others."""
    processed = logits.to("cpu", torch.float32, copy=True)
    _process(processed.numpy(), row)
    return processed


def is_bare(state: SamplingState, num_output: int) -> bool:
    """Whether the request's tokens, from the one after `num_output` on, are the argmax of raw logits: at temperature 0
    without penalty, bias or mask. Spares such rows the pipeline and its copy."""
    params = state.params
    return params.is_greedy and not (
        params.repetition_penalty != 1
        or params.frequency_penalty
        or params.presence_penalty
        or params.logit_bias
        or params.allowed_token_ids is not None
        or num_output < params.min_tokens
        or state.bad_sequences
    )


def argmax_rows(logits: torch.Tensor) -> list[int]:
    """The id of the largest value in each row of [R, V], the lowest of equals."""
    if logits.device.type == "cpu":
        # 4 µs per row of 49,152 where torch takes 43, and no parallel section to wait for.
        return logits.numpy().argmax(axis=1).tolist()
    return logits.argmax(dim=1).tolist()


def total_order(values: torch.Tensor, at_least: int) -> torch.Tensor:
    """Ids of `values` [V] by value descending, then id ascending; -inf entries have no place in the order.

    Not all: the first `at_least` of them, and the ties of the last one.
    """
    return torch.from_numpy(_order(values.cpu().numpy(), at_least))


def _process(values: Row, row: SamplingRow) -> None:
    _penalise(values, row)
    _mask(values, row)
    temperature = row.state.params.temperature
    if temperature > 0:
        # A row with every token masked stays -inf rather than becoming NaN.
        values -= np.maximum(values.max(), np.finfo(np.float32).min)
        with np.errstate(over="ignore"):  # -inf is what a tiny temperature leaves of all but the best
            values /= np.maximum(np.float32(temperature), np.finfo(np.float32).tiny)
        _filter(values, row.state.params)


def _order(values: npt.NDArray[Any], at_least: int) -> Ids:
    """As `total_order`."""
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


def _penalise(values: Row, row: SamplingRow) -> None:
    params = row.state.params
    if params.repetition_penalty != 1:
        seen = np.unique(_known_ids([*row.state.prompt, *row.output], values))
        old = values[seen]
        values[seen] = np.where(old > 0, old / params.repetition_penalty, old * params.repetition_penalty)
    if params.frequency_penalty or params.presence_penalty:
        ids, counts = np.unique(_known_ids(row.output, values), return_counts=True)
        values[ids] -= np.float32(params.frequency_penalty) * counts.astype(np.float32)
        values[ids] -= np.float32(params.presence_penalty)
    if params.logit_bias:
        ids = _known_ids(list(params.logit_bias), values)
        values[ids] += np.array([params.logit_bias[token] for token in ids.tolist()], np.float32)


def _mask(values: Row, row: SamplingRow) -> None:
    state = row.state
    if state.params.allowed_token_ids is not None:
        allowed = _known_ids(state.params.allowed_token_ids, values)
        kept = values[allowed]
        values.fill(-math.inf)
        values[allowed] = kept
    if len(row.output) < state.params.min_tokens:
        values[_known_ids(list(state.stop_ids), values)] = -math.inf
    bad = [sequence[-1] for sequence in state.bad_sequences if _ends_with(row.output, sequence[:-1])]
    if bad:
        masked = values.copy()
        masked[_known_ids(bad, values)] = -math.inf
        if masked.max() > -math.inf:
            values[:] = masked


def _filter(values: Row, params: SamplingParams) -> None:
    """Steps 6 to 8 in place. Masses are summed in float64, in the total order."""
    has_top_k = 0 < params.top_k < values.size
    has_filter = has_top_k or params.top_p < 1 or params.min_p > 0
    if not has_filter or values.max() == -math.inf:
        return
    if has_top_k:
        order = _order(values, params.top_k)[: params.top_k]
        count = _nucleus(values[order], params.top_p, None)
    elif params.top_p < 1:
        order, count = _nucleus_of_all(values, params.top_p)
    else:
        order = np.flatnonzero(values > -math.inf)
        count = order.size
    kept = order[:count]
    if params.min_p > 0:
        kept = kept[values[kept].astype(np.float64) >= float(values.max()) + math.log(params.min_p)]
    result = values[kept]
    values.fill(-math.inf)
    values[kept] = result


def _nucleus_of_all(values: Row, top_p: float) -> tuple[Ids, int]:
    """The order and how many of it top-p keeps, ranking only the head where that has enough mass."""
    mass = float(np.exp(values.astype(np.float64) - values.max()).sum())
    for at_least in (*_HEADS, values.size):
        order = _order(values, at_least)
        count = _nucleus(values[order], top_p, mass)
        if count <= order.size:
            return order, count
    return order, order.size


def _nucleus(ordered: Row, top_p: float, mass: float | None) -> int:
    """How many of `ordered` logits hold top_p of `mass` (None: of their own); if all hold less, one more than exist."""
    if top_p >= 1:
        return ordered.size
    reached = np.exp(ordered.astype(np.float64) - ordered[0]).cumsum()
    wanted = top_p * (reached[-1] if mass is None else mass)
    return int(np.searchsorted(reached, wanted)) + 1


def _known_ids(ids: Sequence[int], values: Row) -> Ids:
    every = np.array(ids, dtype=np.int64)
    return every[every < values.size]


def _ends_with(output: Sequence[int], tokens: Sequence[int]) -> bool:
    start = len(output) - len(tokens)
    return start >= 0 and all(output[start + index] == token for index, token in enumerate(tokens))
