"""The seam of the delta rule (GDN, KDA): the values that cross it and the protocol a backend implements.

Owns no arithmetic: arch/delta_blocks.py has the formula and the legend, kernels/reference/delta.py the definition.
Further here: T rows of a forward, B requests of a segment, S slots, R kept rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from proa.arch.delta_blocks import DeltaSpec
from proa.kernels.seam import Segment

NONE = -1
"""No slot: a request that begins, a row whose state or inputs nobody wants."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaWeights:
    """What the rule reads beside the row, float32: `conv` [K, C] (the last tap meets the row itself), `rate` [Hv] =
    exp(A), `bias` [Hv] or [Hv * dk] (of a), `norm` [dv]."""

    conv: torch.Tensor
    rate: torch.Tensor
    bias: torch.Tensor
    norm: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaRows:
    """A layer's projected rows. `mixed` [T, W] begins with q, k, v [C] and b [Hv].

    `decay` (a, [T, Hv] or [T, Hv * dk]) and `gate` (z, [T, Hv * dv]) are views of `mixed` where it holds them.
    """

    mixed: torch.Tensor
    decay: torch.Tensor
    gate: torch.Tensor

    @classmethod
    def merged(cls, mixed: torch.Tensor, spec: DeltaSpec) -> DeltaRows:
        """Rows of a projection that makes q, k, v, b, a and z."""
        at = spec.channels + spec.value_heads
        return cls(mixed=mixed, decay=mixed[:, at : at + spec.decays], gate=mixed[:, at + spec.decays :])


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaState:
    """One layer's memory. `conv` [S, K - 1, C] in the compute dtype: the last rows of q, k, v before the convolution,
    oldest first, zeros where there were none. `delta` [S, Hv, dk, dv] float32. `kept` [R, spec.kept_width] in the
    compute dtype: inputs of verified rows (q, k, v, b, a), where rollback applies them again; else None."""

    conv: torch.Tensor
    delta: torch.Tensor
    kept: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSlots:
    """Where states come from and go to, in host memory, int64. The same for every layer.

    `source` [B]: the slot with the state before the request's first row, NONE for a request that begins. `targets`
    [rows]: the slot that takes the state after each row, NONE if it is not wanted. `kept` [rows]: the row of
    DeltaState.kept for each row's inputs, or NONE. Requests may share a source that nobody writes; of a request's
    targets only the last row's may be its source.

    A decode wants one state; a prefill that of its last row, and at block boundaries those for later requests. A verify
    either wants the state of every row (commit of k rows: the slot after row k is the request's), or that of its last
    row and the inputs of all (commit of all: that slot; of fewer: `replay` of k rows from the source).

    `memo` holds what a backend derives from the slots, so that it is made once per forward and not once per layer.
    """

    source: np.ndarray
    targets: np.ndarray
    kept: np.ndarray
    memo: dict[Any, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, source: list[int], targets: list[int], kept: list[int] | None = None) -> StateSlots:
        rows = [NONE] * len(targets) if kept is None else kept
        return cls(source=_slots(source), targets=_slots(targets), kept=_slots(rows))


def _slots(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int64)


class DeltaCalls(Protocol):
    """Linear attention by the delta rule, as a backend and as a runner's kernels have it."""

    def delta(
        self,
        rows: DeltaRows,
        weights: DeltaWeights,
        spec: DeltaSpec,
        state: DeltaState,
        segment: Segment,
        slots: StateSlots,
    ) -> torch.Tensor:
        """The segment's rows, [num_rows, Hv * dv] in the compute dtype, ready for the output projection. `rows` are
        those of the segment, not of the batch. Writes states and kept inputs as `slots` says.

        Decode and verify are recurrent: row by row, the same bits in both. A prefill may work on whole blocks of
        delta_blocks.BLOCK rows at absolute multiples of it; rows before the first and after the last are recurrent, and
        no state is to be had inside a block (ValueError).
        """
        ...

    def replay(
        self, weights: DeltaWeights, spec: DeltaSpec, state: DeltaState, counts: np.ndarray, slots: StateSlots
    ) -> None:
        """Apply kept inputs again, `counts` [B] rows of each request: the states that decoding them would have left,
        bit for bit. `slots.kept` says which, in order; there are no results."""
        ...


class DeltaOps(DeltaCalls, Protocol):
    """A backend. Chosen by the plan's `linear_attention.<phase>`, one per phase; phases of one runner share the slots,
    whose arrangement is DeltaState's for every backend."""

    name: str
