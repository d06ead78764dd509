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
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from proa.sampling.params import SamplingParams
from proa.sampling.state import SamplingRow

# Tokens that are ranked before all are: top-p rarely needs more, and a full sort costs ten times as much.
_HEAD = 1024


def process(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Return [R, V] float32, masked and filtered entries -inf; `logits` [R, V] stays as it is.

    Token ids at or above V in histories and parameters are ignored: a drafter may know fewer tokens than its target.
    """
    processed = logits.to(torch.float32, copy=True)
    for values, row in zip(processed, rows, strict=True):
        _penalise(values, row)
        _mask(values, row)
    _apply_temperature(processed, [row.state.params.temperature for row in rows])
    for values, row in zip(processed, rows, strict=True):
        _filter(values, row.state.params)
    return processed


def total_order(values: torch.Tensor, at_least: int) -> torch.Tensor:
    """Ids of `values` [V] by value descending, then id ascending; -inf entries have no place in the order.

    Not all: the first `at_least` of them, and the ties of the last one.
    """
    least = -math.inf
    if at_least < values.numel():
        least = torch.topk(values, at_least).values[-1].item()
    is_ranked = (values >= least) & (values > -math.inf)
    ids = is_ranked.nonzero().squeeze(1)
    return ids[torch.sort(values[ids], descending=True, stable=True).indices]


def _penalise(values: torch.Tensor, row: SamplingRow) -> None:
    params = row.state.params
    if params.repetition_penalty != 1:
        seen = _known_ids([*row.state.prompt, *row.output], values).unique()
        old = values[seen]
        values[seen] = torch.where(old > 0, old / params.repetition_penalty, old * params.repetition_penalty)
    if params.frequency_penalty or params.presence_penalty:
        ids, counts = _known_ids(row.output, values).unique(return_counts=True)
        values[ids] -= params.frequency_penalty * counts
        values[ids] -= params.presence_penalty
    if params.logit_bias:
        ids = _known_ids(list(params.logit_bias), values)
        values[ids] += values.new_tensor([params.logit_bias[token] for token in ids.tolist()])


def _mask(values: torch.Tensor, row: SamplingRow) -> None:
    state = row.state
    if state.params.allowed_token_ids is not None:
        allowed = _known_ids(state.params.allowed_token_ids, values)
        kept = values[allowed]
        values.fill_(-math.inf)
        values[allowed] = kept
    if len(row.output) < state.params.min_tokens:
        values[_known_ids(list(state.stop_ids), values)] = -math.inf
    bad = [sequence[-1] for sequence in state.bad_sequences if _ends_with(row.output, sequence[:-1])]
    if bad:
        masked = values.index_fill(0, _known_ids(bad, values), -math.inf)
        if masked.max() > -math.inf:
            values.copy_(masked)


def _apply_temperature(processed: torch.Tensor, temperatures: Sequence[float]) -> None:
    hot = [index for index, temperature in enumerate(temperatures) if temperature > 0]
    if hot:
        chosen = processed if len(hot) == len(temperatures) else processed[hot]
        divisors = processed.new_tensor([temperatures[index] for index in hot]).unsqueeze(1)
        # A row with every token masked stays -inf rather than becoming NaN.
        largest = chosen.max(dim=1, keepdim=True).values.clamp(min=torch.finfo(torch.float32).min)
        processed[hot] = (chosen - largest) / divisors.clamp(min=torch.finfo(torch.float32).tiny)


def _filter(values: torch.Tensor, params: SamplingParams) -> None:
    """Steps 6 to 8 in place. Masses are summed in float64, in the total order."""
    has_top_k = 0 < params.top_k < values.numel()
    has_filter = has_top_k or params.top_p < 1 or params.min_p > 0
    if params.is_greedy or not has_filter or values.max() == -math.inf:
        return
    if has_top_k:
        order = total_order(values, params.top_k)[: params.top_k]
        count = _nucleus(values[order], params.top_p, None)
    elif params.top_p < 1:
        order, count = _nucleus_of_all(values, params.top_p)
    else:
        order = (values > -math.inf).nonzero().squeeze(1)
        count = order.numel()
    kept = order[:count]
    if params.min_p > 0:
        kept = kept[values[kept].double() >= values.max().double() + math.log(params.min_p)]
    result = values[kept]
    values.fill_(-math.inf)
    values[kept] = result


def _nucleus_of_all(values: torch.Tensor, top_p: float) -> tuple[torch.Tensor, int]:
    """The order and how many of it top-p keeps, ranking only the head where that has enough mass."""
    mass = (values.double() - values.max()).exp().sum()
    for at_least in (_HEAD, values.numel()):
        order = total_order(values, at_least)
        count = _nucleus(values[order], top_p, mass)
        if count <= order.numel():
            return order, count
    return order, order.numel()


def _nucleus(ordered: torch.Tensor, top_p: float, mass: torch.Tensor | None) -> int:
    """How many of `ordered` logits hold top_p of `mass` (None: of their own); if all hold less, one more than exist."""
    if top_p >= 1:
        return ordered.numel()
    reached = (ordered.double() - ordered[0]).exp().cumsum(0)
    wanted = top_p * (reached[-1] if mass is None else mass)
    return int(torch.searchsorted(reached, wanted)) + 1


def _known_ids(ids: Sequence[int], values: torch.Tensor) -> torch.Tensor:
    every = torch.tensor(ids, dtype=torch.int64, device=values.device)
    return every[every < values.numel()]


def _ends_with(output: Sequence[int], tokens: Sequence[int]) -> bool:
    start = len(output) - len(tokens)
    return start >= 0 and all(output[start + index] == token for index, token in enumerate(tokens))
