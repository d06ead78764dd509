"""The delta rule by another package's kernels on a device: what surrounds them, the same for every package.

Owns convolution, cutting of rows into runs, slots, gates and the output norm; triton_delta.py and flashinfer_delta.py
make the calls. Legend: arch/delta_blocks.py and kernels/delta.py; further N runs of one call.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from proa.arch.delta_blocks import BLOCK, DeltaSpec, OutputGate
from proa.kernels.delta import DeltaRows, DeltaState, DeltaWeights, StateSlots
from proa.kernels.reference.delta import convolve, keep_inputs, kept_inputs, states_before
from proa.kernels.reference.misc import rms_norm
from proa.kernels.seam import Segment
from proa.units import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleRows:
    """Rows of the rule after the convolution, contiguous: `q`, `k` [T, Hk, dk], not yet of length 1, `v` [T, Hv, dv],
    `b` [T, Hv] and `a` [T, Hv] or [T, Hv, dk] as they were projected, all in the compute dtype."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    b: torch.Tensor
    a: torch.Tensor

    def at(self, which: torch.Tensor) -> RuleRows:
        return RuleRows(q=self.q[which], k=self.k[which], v=self.v[which], b=self.b[which], a=self.a[which])

    def gates(self, weights: DeltaWeights) -> tuple[torch.Tensor, torch.Tensor]:
        """(g, the logarithm of the decay, as `a`; beta [T, Hv]), float32."""
        per_head = (1, -1, *[1] * (self.a.dim() - 2))
        g = -weights.rate.view(per_head) * F.softplus(self.a.float() + weights.bias.view(1, *self.a.shape[1:]))
        return g, self.b.float().sigmoid()


class Rule(Protocol):
    """The kernels of one package: (states [N, Hv, dk, dv] before N runs of rows, rows, where runs begin and end) ->
    (results [T, Hv, dv], states after each run). `ends` [N + 1] int32 begins with 0. The states may be overwritten.

    `recur` goes row by row; if `is_stepwise`, runs that it gets have one row each. `blocks` gets whole blocks of BLOCK
    rows.
    """

    name: str
    is_stepwise: bool

    def recur(
        self, states: torch.Tensor, rows: RuleRows, weights: DeltaWeights, ends: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def blocks(
        self, states: torch.Tensor, rows: RuleRows, weights: DeltaWeights, ends: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One call: a run of each of N `requests`. `rows` [T] of the segment, run after run, and `ends` as in Rule. States
    after the runs `wanted` go to the slots `targets`."""

    is_block: bool
    requests: torch.Tensor
    rows: torch.Tensor
    ends: torch.Tensor
    wanted: torch.Tensor
    targets: torch.Tensor


class DeviceDelta:
    """DeltaOps by a Rule."""

    def __init__(self, rule: Rule) -> None:
        self.name = rule.name
        self._rule = rule

    def delta(
        self,
        rows: DeltaRows,
        weights: DeltaWeights,
        spec: DeltaSpec,
        state: DeltaState,
        segment: Segment,
        slots: StateSlots,
    ) -> torch.Tensor:
        keep_inputs(rows, spec, state, slots)
        starts = segment.rows[:, 2] if segment.phase is Phase.PREFILL else None
        out = self._run(rows.mixed, rows.decay, weights, spec, state, segment.rows[:, 1], starts, slots)
        activate = F.silu if spec.gate is OutputGate.SILU else torch.sigmoid
        normed = rms_norm(out, weights.norm, spec.norm.eps).flatten(1)
        return (normed * activate(rows.gate.float())).to(rows.gate.dtype)

    def replay(
        self, weights: DeltaWeights, spec: DeltaSpec, state: DeltaState, counts: np.ndarray, slots: StateSlots
    ) -> None:
        mixed, decay = kept_inputs(spec, state, slots)
        self._run(mixed, decay, weights, spec, state, counts, None, slots)

    def _run(
        self,
        mixed: torch.Tensor,
        decay: torch.Tensor,
        weights: DeltaWeights,
        spec: DeltaSpec,
        state: DeltaState,
        counts: np.ndarray,
        starts: np.ndarray | None,
        slots: StateSlots,
    ) -> torch.Tensor:
        """Results [T, Hv, dv] of all rows; writes the wanted states."""
        rows = _rule_rows(convolve(mixed, weights, spec, state, counts, slots), mixed, decay, spec)
        if DeviceDelta not in slots.memo:
            cuts = _runs(counts, starts, slots.targets, is_stepwise=self._rule.is_stepwise)
            slots.memo[DeviceDelta] = tuple(_rounds(cuts, slots.targets, mixed.device))
        states, out = states_before(state, slots.source), torch.empty_like(rows.v)
        for one in slots.memo[DeviceDelta]:
            call = self._rule.blocks if one.is_block else self._rule.recur
            out[one.rows], after = call(states[one.requests], rows.at(one.rows), weights, one.ends)
            states[one.requests] = after
            state.delta[one.targets] = after[one.wanted]
        return out


def _rule_rows(total: torch.Tensor, mixed: torch.Tensor, decay: torch.Tensor, spec: DeltaSpec) -> RuleRows:
    q, k, v = F.silu(total).to(mixed.dtype).split((spec.keys, spec.keys, spec.values), dim=1)
    a = decay[:, : spec.decays]  # kept inputs end with it
    return RuleRows(
        q=q.unflatten(1, (spec.key_heads, spec.key_dim)),
        k=k.unflatten(1, (spec.key_heads, spec.key_dim)),
        v=v.unflatten(1, (spec.value_heads, spec.value_dim)),
        b=mixed[:, spec.channels : spec.channels + spec.value_heads],
        a=a if spec.decays == spec.value_heads else a.unflatten(1, (spec.value_heads, spec.key_dim)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Rows [first, stop) of the segment, the `number`-th run of its request."""

    number: int
    is_block: bool
    request: int
    first: int
    stop: int


def _runs(counts: np.ndarray, starts: np.ndarray | None, targets: np.ndarray, *, is_stepwise: bool) -> Iterator[_Run]:
    """Every request's rows, cut after those whose states are wanted. `starts`: positions of first rows of a prefill,
    which works by whole blocks at absolute multiples of BLOCK, and row by row before and after them.

    Raises ValueError where a state inside of a block is wanted.
    """
    first = 0
    for request, count in enumerate(counts.tolist()):
        own, stop = targets[first : first + count], first + count
        begin = end = first
        if starts is not None:
            start = int(starts[request])
            begin, end = (first + at - start for at in (-(-start // BLOCK) * BLOCK, (start + count) // BLOCK * BLOCK))
        cuts = {stop, *(first + np.flatnonzero(own >= 0) + 1).tolist()}
        if begin < end:
            cuts |= {begin, end}
        if any(begin < cut < end and (cut - begin) % BLOCK for cut in cuts):
            raise ValueError("a state inside a block of the chunkwise prefill was asked for")
        if is_stepwise:
            cuts |= {row for row in range(first, stop) if not begin < row < end}
        at = first
        for number, cut in enumerate(sorted(cuts - {first})):
            yield _Run(number=number, is_block=begin <= at < end, request=request, first=at, stop=cut)
            at = cut
        first = stop


def _rounds(runs: Iterator[_Run], targets: np.ndarray, device: torch.device) -> Iterator[Round]:
    """Runs of one number and kind together; a request's runs follow one another."""

    def tensor(values: list[int] | np.ndarray, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.as_tensor(values, dtype=dtype, device=device)

    def kind(run: _Run) -> tuple[int, bool]:
        return run.number, run.is_block

    for (_, is_block), group in groupby(sorted(runs, key=kind), key=kind):
        members = list(group)
        slots = targets[[run.stop - 1 for run in members]]
        wanted = np.flatnonzero(slots >= 0)
        yield Round(
            is_block=is_block,
            requests=tensor([run.request for run in members]),
            rows=tensor([row for run in members for row in range(run.first, run.stop)]),
            ends=tensor(np.cumsum([0] + [run.stop - run.first for run in members]), torch.int32),
            wanted=tensor(wanted),
            targets=tensor(slots[wanted]),
        )
