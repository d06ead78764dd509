"""The delta rule in plain torch: row by row, the definition (`reference`), and by blocks and matmuls (`torch`).

Everything is float32 inside, whatever the compute dtype. Legend: arch/delta_blocks.py and kernels/delta.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np
import torch
import torch.nn.functional as F

from proa.arch.delta_blocks import BLOCK, DeltaSpec, OutputGate
from proa.kernels.delta import DeltaRows, DeltaState, DeltaWeights, StateSlots
from proa.kernels.reference.misc import rms_norm
from proa.kernels.seam import Segment
from proa.units import Phase

_LENGTH_EPS = 1e-6
_SUB_BLOCK = 16  # rows whose decays are compared pair by pair, channel by channel


@dataclass(frozen=True, slots=True, kw_only=True)
class Operands:
    """Rows of the rule, float32: `q`, `k` [T, Hv, dk] of length 1 / sqrt(dk) and 1, `v` [T, Hv, dv], `beta` [T, Hv, 1],
    `g` [T, Hv, dk or 1], the logarithm of the decay, and `decay` = e^g."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    beta: torch.Tensor
    g: torch.Tensor
    decay: torch.Tensor

    def rows(self, which: slice | torch.Tensor) -> Operands:
        return Operands(**{part.name: getattr(self, part.name)[which] for part in fields(self)})


Step = Callable[[torch.Tensor, Operands], tuple[torch.Tensor, torch.Tensor]]
"""(states [B, Hv, dk, dv], one row of each) -> (states after it, results [B, Hv, dv])."""


class ReferenceDelta:
    """DeltaOps: one request and one row at a time, in every phase."""

    name = "reference"

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
        counts = segment.rows[:, 1]
        operands = prepare(rows.mixed, rows.decay, weights, spec, state, counts, slots)
        return gated_norm(_one_by_one(operands, state, counts, slots), rows.gate, weights.norm, spec)

    def replay(
        self, weights: DeltaWeights, spec: DeltaSpec, state: DeltaState, counts: np.ndarray, slots: StateSlots
    ) -> None:
        mixed, decay = kept_inputs(spec, state, slots)
        _one_by_one(prepare(mixed, decay, weights, spec, state, counts, slots), state, counts, slots)


class TorchDelta:
    """DeltaOps: prefill by whole blocks; other rows by matmuls, the requests of a segment at once."""

    name = "torch"

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
        counts = segment.rows[:, 1]
        operands = prepare(rows.mixed, rows.decay, weights, spec, state, counts, slots)
        match segment.phase:
            case Phase.PREFILL:
                out = torch.empty_like(operands.v)
                for request, (first, count, start) in enumerate(segment.rows.tolist()):
                    _prefill(
                        out, operands, state, range(first, first + count), start, int(slots.source[request]), slots
                    )
            case Phase.DECODE | Phase.VERIFY:
                out = recur(operands, state, slots.source, counts, slots.targets, matmul_step)
        return gated_norm(out, rows.gate, weights.norm, spec)

    def replay(
        self, weights: DeltaWeights, spec: DeltaSpec, state: DeltaState, counts: np.ndarray, slots: StateSlots
    ) -> None:
        mixed, decay = kept_inputs(spec, state, slots)
        operands = prepare(mixed, decay, weights, spec, state, counts, slots)
        recur(operands, state, slots.source, counts, slots.targets, matmul_step)


def keep_inputs(rows: DeltaRows, spec: DeltaSpec, state: DeltaState, slots: StateSlots) -> None:
    """Store the rows' inputs where `slots.kept` says."""
    wanted = np.flatnonzero(slots.kept >= 0)
    if not len(wanted):
        return
    if state.kept is None:
        raise ValueError("inputs are to be kept, but the state has no rows for them")
    at = torch.from_numpy(wanted)
    head = rows.mixed[at, : spec.channels + spec.value_heads]
    state.kept[torch.from_numpy(slots.kept[wanted])] = torch.cat((head, rows.decay[at]), dim=1)


def kept_inputs(spec: DeltaSpec, state: DeltaState, slots: StateSlots) -> tuple[torch.Tensor, torch.Tensor]:
    """The kept rows that `slots` names: q, k, v, b and a."""
    if state.kept is None:
        raise ValueError("there are no kept inputs to apply again")
    mixed = state.kept[torch.from_numpy(slots.kept)]
    return mixed, mixed[:, spec.channels + spec.value_heads :]


def prepare(
    mixed: torch.Tensor,
    decay: torch.Tensor,
    weights: DeltaWeights,
    spec: DeltaSpec,
    state: DeltaState,
    counts: np.ndarray,
    slots: StateSlots,
) -> Operands:
    """From projected rows to the rule's operands: convolution, gates, lengths. Writes the convolution states."""
    total = convolve(mixed, weights, spec, state, counts, slots)
    betas = mixed[:, spec.channels : spec.channels + spec.value_heads].float()
    made = [_row(*parts, weights, spec) for parts in zip(total, betas, decay.float() + weights.bias, strict=True)]
    return Operands(**{part.name: torch.stack([getattr(row, part.name) for row in made]) for part in fields(Operands)})


def convolve(
    mixed: torch.Tensor,
    weights: DeltaWeights,
    spec: DeltaSpec,
    state: DeltaState,
    counts: np.ndarray,
    slots: StateSlots,
) -> torch.Tensor:
    """The convolution's sums over q, k, v [T, C], float32. Writes the convolution states."""
    pool = torch.cat((_histories(state, slots.source).flatten(0, 1), mixed[:, : spec.channels]))
    seen = torch.from_numpy(_window(counts, spec.taps))  # [T, K], rows of `pool`
    wanted = torch.from_numpy(np.flatnonzero(slots.targets >= 0))
    state.conv[torch.from_numpy(slots.targets)[wanted]] = pool[seen[wanted, 1:]]
    total = pool[seen[:, 0]].float() * weights.conv[0]
    for tap in range(1, spec.taps):
        total = total + pool[seen[:, tap]].float() * weights.conv[tap]
    return total


def _row(total: torch.Tensor, b: torch.Tensor, a: torch.Tensor, weights: DeltaWeights, spec: DeltaSpec) -> Operands:
    """One row, from the convolution's sums [C] on. By itself, because torch's functions round elements in the middle of
    a tensor and at its end differently: bits must not depend on the rows beside it."""
    q, k, v = F.silu(total).split((spec.keys, spec.keys, spec.values))
    g = -weights.rate[:, None] * F.softplus(a).view(spec.value_heads, -1)
    return Operands(
        q=_unit(q, spec) * spec.key_dim**-0.5,
        k=_unit(k, spec),
        v=v.view(spec.value_heads, spec.value_dim),
        beta=b.sigmoid().unsqueeze(-1),
        g=g,
        decay=g.exp(),
    )


def _histories(state: DeltaState, source: np.ndarray) -> torch.Tensor:
    """[B, K - 1, C]: the rows before each request's first one."""
    history = state.conv[torch.from_numpy(np.maximum(source, 0))]
    history[torch.from_numpy(source < 0)] = 0
    return history


def _window(counts: np.ndarray, taps: int) -> np.ndarray:
    """[T, K]: for each row its K last inputs, as rows of (K - 1 rows of history per request, then all rows)."""
    requests = np.repeat(np.arange(len(counts)), counts)
    firsts = np.repeat(np.cumsum(counts) - counts, counts)
    at = (np.arange(len(requests)) - firsts)[:, None] + np.arange(1 - taps, 1)  # of the request; negative: history
    own, before = len(counts) * (taps - 1) + firsts[:, None] + at, requests[:, None] * (taps - 1) + taps - 1 + at
    return np.where(at >= 0, own, before)


def _unit(x: torch.Tensor, spec: DeltaSpec) -> torch.Tensor:
    """[Hk * dk] -> [Hv, dk], every head of length 1."""
    heads = x.view(spec.key_heads, spec.key_dim)
    heads = heads * (heads.square().sum(-1, keepdim=True) + _LENGTH_EPS).rsqrt()
    return heads.repeat_interleave(spec.value_heads // spec.key_heads, dim=0)


def gated_norm(out: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, spec: DeltaSpec) -> torch.Tensor:
    """RMS norm of each head of `out` [T, Hv, dv] times the activated gate [T, Hv * dv], in the gate's dtype."""
    activate = F.silu if spec.gate is OutputGate.SILU else torch.sigmoid
    made = [
        (rms_norm(row, weight, spec.norm.eps).flatten() * activate(z.float())).to(gate.dtype)
        for row, z in zip(out, gate, strict=True)
    ]
    return torch.stack(made)


def reference_step(states: torch.Tensor, row: Operands) -> tuple[torch.Tensor, torch.Tensor]:
    """The rule as it is written."""
    states = states * row.decay.unsqueeze(-1)
    change = (row.v - (states * row.k.unsqueeze(-1)).sum(-2)) * row.beta
    states = states + row.k.unsqueeze(-1) * change.unsqueeze(-2)
    return states, (states * row.q.unsqueeze(-1)).sum(-2)


def matmul_step(states: torch.Tensor, row: Operands) -> tuple[torch.Tensor, torch.Tensor]:
    """The same with matrix products; changes `states` in place."""
    states.mul_(row.decay.unsqueeze(-1))
    change = (row.v - (row.k.unsqueeze(-2) @ states).squeeze(-2)) * row.beta
    states.add_(row.k.unsqueeze(-1) * change.unsqueeze(-2))
    return states, (row.q.unsqueeze(-2) @ states).squeeze(-2)


def _one_by_one(operands: Operands, state: DeltaState, counts: np.ndarray, slots: StateSlots) -> torch.Tensor:
    """`recur` for each request alone: operations of one shape only, so a row's bits depend on its request alone."""
    out, first = [], 0
    for source, count in zip(slots.source, counts, strict=True):
        part = slice(first, first + int(count))
        own, targets = operands.rows(part), slots.targets[part]
        out.append(recur(own, state, np.array([source]), np.array([count]), targets, reference_step))
        first = part.stop
    return torch.cat(out)


def recur(
    operands: Operands, state: DeltaState, source: np.ndarray, counts: np.ndarray, targets: np.ndarray, step: Step
) -> torch.Tensor:
    """Row 0 of every request, then row 1 of those that have one, ... [T, Hv, dv]. Writes the wanted states."""
    out, firsts = torch.empty_like(operands.v), np.cumsum(counts) - counts
    states, live = states_before(state, source), np.arange(len(counts))
    for row in range(int(counts.max())):
        still = np.flatnonzero(counts[live] > row)
        if len(still) < len(live):
            states, live = states[torch.from_numpy(still)], live[still]
        at = firsts[live] + row
        states, out[at] = step(states, operands.rows(torch.from_numpy(at)))
        wanted = np.flatnonzero(targets[at] >= 0)
        if len(wanted):
            state.delta[torch.from_numpy(targets[at[wanted]])] = states[torch.from_numpy(wanted)]
    return out


def states_before(state: DeltaState, source: np.ndarray) -> torch.Tensor:
    """[B, Hv, dk, dv]: a copy of the states before each request's first row."""
    states = state.delta[torch.from_numpy(np.maximum(source, 0))]
    states[torch.from_numpy(source < 0)] = 0
    return states


def _prefill(
    out: torch.Tensor, operands: Operands, state: DeltaState, rows: range, start: int, source: int, slots: StateSlots
) -> None:
    """One request, whose first row stands at position `start`: recurrent up to a boundary, blocks, recurrent again."""
    states, at = states_before(state, np.array([source])), rows.start
    while at < rows.stop:
        is_block = (start + at - rows.start) % BLOCK == 0 and rows.stop - at >= BLOCK
        count = BLOCK if is_block else 1
        part = slice(at, at + count)
        if is_block:
            if (slots.targets[at : at + count - 1] >= 0).any():
                raise ValueError("a state inside a block of the chunkwise prefill was asked for")
            states, out[part] = _block(states[0], operands.rows(part))
        else:
            states, out[part] = matmul_step(states, operands.rows(part))
        at += count
        if slots.targets[at - 1] >= 0:
            state.delta[int(slots.targets[at - 1])] = states[0]


def _block(state: torch.Tensor, rows: Operands) -> tuple[torch.Tensor, torch.Tensor]:
    """All rows of a block at once: state [Hv, dk, dv] -> (state after it [1, Hv, dk, dv], results [rows, Hv, dv]).

    With G the running sum of g, row i changes the state by k_i d_i^T, where
        d_i = beta_i (v_i - (k_i e^{G_i})^T S - sum over j < i of (k_i e^{G_i - G_j} . k_j) d_j)
    is a triangular system; results and the last state are sums over the d_j. No exponent is ever positive.
    """
    parts = (rows.q, rows.k, rows.v, rows.beta, rows.g)
    q, k, v, beta, g = (part.transpose(0, 1).contiguous() for part in parts)  # [Hv, rows, ...]
    total = g.double().cumsum(1)  # differences of long sums, of which float32 would keep too little
    since = _factor(total)
    change = torch.linalg.solve_triangular(
        beta * _pairs(k, k, total), beta * (v - (k * since) @ state), upper=False, unitriangular=True
    )
    out = (q * since) @ state + _pairs(q, k, total) @ change
    left = _factor(total[:, -1:] - total)
    state = state * since[:, -1:].transpose(1, 2) + (k * left).transpose(1, 2) @ change
    return state.unsqueeze(0), out.transpose(0, 1)


def _factor(logarithm: torch.Tensor) -> torch.Tensor:
    return logarithm.float().exp()


def _pairs(x: torch.Tensor, k: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """[Hv, rows, rows]: sum over channels of x_i k_j e^{G_i - G_j} for j <= i, zero elsewhere.

    Decays per channel are split at the first row of i's sub-block: both factors stay at most 1. Inside a sub-block they
    are taken pair by pair.
    """
    later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
    if total.shape[-1] == 1:
        gaps = (total - total.transpose(1, 2)).masked_fill(later, float("-inf"))
        return (x @ k.transpose(1, 2)) * _factor(gaps)
    out = x.new_zeros(len(x), x.shape[1], x.shape[1])
    for at in range(0, x.shape[1], _SUB_BLOCK):
        own, split = slice(at, at + _SUB_BLOCK), total[:, at : at + 1]
        left, right = x[:, own] * _factor(total[:, own] - split), k[:, :at] * _factor(split - total[:, :at])
        out[:, own, :at] = left @ right.transpose(1, 2)
        gaps = (total[:, own, None] - total[:, None, own]).masked_fill(later[own, own, None], float("-inf"))
        out[:, own, own] = torch.einsum("hic,hjc,hijc->hij", x[:, own], k[:, own], _factor(gaps))
    return out
