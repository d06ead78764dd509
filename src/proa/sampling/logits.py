"""What a request's history and parameters do to its raw logits, before its token is drawn: target and drafter alike.

  1. repetition penalty    tokens of prompt and output: a logit above 0 is divided by it, any other multiplied
  2. frequency, presence   tokens of the output: minus frequency x occurrences, minus presence
  3. logit bias            added
  4. masks (-inf)          tokens outside allowed_token_ids; stop ids while fewer than min_tokens tokens are out; the
                           last token of a bad sequence whose other tokens end the output, unless that would leave no
                           token at all in the row

Then the kernel's steps (kernels/reference/sample.py): temperature, top-k, top-p, min-p, noise. Most requests ask for
none of the four above, and their rows go to the kernel as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from proa.kernels.reference.sample import narrow
from proa.kernels.seam import Draw
from proa.sampling.state import SamplingRow, SamplingState

Row = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]


def is_edited(row: SamplingRow) -> bool:
    """Whether the row's logits are other than the raw ones: there is a penalty, a bias or a mask."""
    params = row.state.params
    return bool(
        params.repetition_penalty != 1
        or params.frequency_penalty
        or params.presence_penalty
        or params.logit_bias
        or params.allowed_token_ids is not None
        or row.num_output < params.min_tokens
        or row.state.bad_sequences
    )


def edited(logits: torch.Tensor, row: SamplingRow) -> torch.Tensor:
    """Steps 1 to 4 on one row: [V] float32 on the host, masked entries -inf; `logits` [V] stays as it is.

    Token ids at or above V in histories and parameters are ignored: a drafter may know fewer tokens than its target.
    """
    values = logits.to("cpu", torch.float32, copy=True)
    _penalise(values.numpy(), row)
    _mask(values.numpy(), row)
    return values


def process(logits: torch.Tensor, row: SamplingRow) -> torch.Tensor:
    """All steps but the noise on one row, as `edited`: the token's distribution is the softmax."""
    values = edited(logits, row)
    narrow(values.numpy(), draw_of(row.state, 0, 0))
    return values


def draw_of(state: SamplingState, row: int, key: int) -> Draw:
    """How a request's token is drawn from row `row` of the edited logits, with the noise of `key`."""
    params = state.params
    floor = math.log(params.min_p) if params.min_p else -math.inf
    return Draw(row, key, max(0, params.top_k), params.temperature, params.top_p, floor)


def _penalise(values: Row, row: SamplingRow) -> None:
    params, output = row.state.params, row.tokens
    if params.repetition_penalty != 1:
        seen = np.unique(_known_ids([*row.state.prompt, *output], values))
        old = values[seen]
        values[seen] = np.where(old > 0, old / params.repetition_penalty, old * params.repetition_penalty)
    if params.frequency_penalty or params.presence_penalty:
        ids, counts = np.unique(_known_ids(output, values), return_counts=True)
        values[ids] -= np.float32(params.frequency_penalty) * counts.astype(np.float32)
        values[ids] -= np.float32(params.presence_penalty)
    if params.logit_bias:
        ids = _known_ids(list(params.logit_bias), values)
        values[ids] += np.array([params.logit_bias[token] for token in ids.tolist()], np.float32)


def _mask(values: Row, row: SamplingRow) -> None:
    state, output = row.state, row.tokens
    if state.params.allowed_token_ids is not None:
        allowed = _known_ids(state.params.allowed_token_ids, values)
        kept = values[allowed]
        values.fill(-math.inf)
        values[allowed] = kept
    if len(output) < state.params.min_tokens:
        values[_known_ids(list(state.stop_ids), values)] = -math.inf
    bad = [sequence[-1] for sequence in state.bad_sequences if _ends_with(output, sequence[:-1])]
    if bad:
        masked = values.copy()
        masked[_known_ids(bad, values)] = -math.inf
        if masked.max() > -math.inf:
            values[:] = masked


def _known_ids(ids: Sequence[int], values: Row) -> Ids:
    every = np.array(ids, dtype=np.int64)
    return every[every < values.size]


def _ends_with(output: Sequence[int], tokens: Sequence[int]) -> bool:
    start = len(output) - len(tokens)
    return start >= 0 and all(output[start + index] == token for index, token in enumerate(tokens))
