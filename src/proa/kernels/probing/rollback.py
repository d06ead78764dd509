"""Times both ways of undoing a proposal in linear attention, on random rows and states of a plan's shapes. Owns the
clock, no decision."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from math import prod

import numpy as np
import torch

from proa.arch.delta_blocks import DeltaSpec
from proa.kernels.delta import NONE, DeltaCalls, DeltaRows, DeltaState, StateSlots
from proa.kernels.probing.delta import one_request, random_weights
from proa.kernels.rollback import RollbackCase, RollbackCosts
from proa.units import Phase, Rollback

BUDGET = 0.25
MAX_ROUNDS = 15
MAX_BYTES = 64 * 2**20
"""For states: more layers than fit are counted, not timed. So many bytes leave the caches as cold as a model does."""


def measure_rollback(
    case: RollbackCase,
    kernels: DeltaCalls,
    dtypes: tuple[torch.dtype, torch.dtype],
    clock: Callable[[], float] = time.perf_counter,
) -> RollbackCosts:
    """`dtypes`: those of `case`, of rows and of states. The least of a few rounds in turns, as other work only ever
    adds time, within a quarter second per shape of layers; one round at least, however slow."""
    replay = states = 0.0
    for spec, count in Counter(case.layers).items():
        number = min(count, max(1, MAX_BYTES // ((1 + sum(case.cuts)) * 4 * prod(spec.state_shape))))
        steps = [_Steps(case, spec, number, way, kernels, dtypes) for way in (Rollback.REPLAY, Rollback.STATES)]
        replay_seconds, states_seconds = _least(steps, 1 + case.draft_tokens, clock)
        replay += replay_seconds * count / number
        states += states_seconds * count / number
    return RollbackCosts(replay=replay, states=states)


def _least(steps: Sequence[_Steps], counts: int, clock: Callable[[], float]) -> list[float]:
    """Seconds of a mean step of each way."""
    best = [float("inf")] * len(steps)
    for one in steps:
        one.run(0)  # the first one pays for what is made once
    end = clock() + BUDGET
    for done in range(MAX_ROUNDS):
        if done and clock() > end:
            break
        for index, one in enumerate(steps):
            begin = clock()
            for accepted in range(counts):
                one.run(accepted)
            best[index] = min(best[index], (clock() - begin) / counts)
    return best


class _Steps:
    """Steps of one request over `number` layers of one shape. Slot 0 holds the committed state."""

    def __init__(
        self,
        case: RollbackCase,
        spec: DeltaSpec,
        number: int,
        way: Rollback,
        kernels: DeltaCalls,
        dtypes: tuple[torch.dtype, torch.dtype],
    ) -> None:
        self._case, self._spec, self._kernels = case, spec, kernels
        self._keeps_inputs = way is Rollback.REPLAY
        random = torch.Generator().manual_seed(0)
        self._weights = random_weights(spec, random)
        self._rows = _random_rows(spec, sum(case.cuts), random, dtypes[0])
        self._layers = [self._state(random, *dtypes) for _ in range(number)]

    @torch.inference_mode()
    def run(self, accepted: int) -> None:
        """A proposal, and the commit of its anchor and `accepted` tokens."""
        first = 0
        for count in self._case.cuts:
            phase, slots = Phase.VERIFY if count > 1 else Phase.DECODE, self._slots(first, count)
            segment, rows = one_request(phase, count, first), _part(self._rows, slice(first, first + count))
            for state in self._layers:
                self._kernels.delta(rows, self._weights, self._spec, state, segment, slots)
            first += count
        kept = self._case.kept(accepted)
        if self._keeps_inputs and kept < first:
            slots = StateSlots.of([0], [*[NONE] * (kept - 1), 1], list(range(kept)))
            for state in self._layers:
                self._kernels.replay(self._weights, self._spec, state, np.array([kept]), slots)

    def _slots(self, first: int, count: int) -> StateSlots:
        """As cache/state.py hands them out: the tentative state in place beside inputs, or a slot for each row."""
        if self._keeps_inputs:
            return StateSlots.of([min(first, 1)], [*[NONE] * (count - 1), 1], list(range(first, first + count)))
        return StateSlots.of([first], list(range(first + 1, first + count + 1)))

    def _state(self, random: torch.Generator, compute: torch.dtype, states: torch.dtype) -> DeltaState:
        spec, rows = self._spec, sum(self._case.cuts)
        slots = 2 if self._keeps_inputs else 1 + rows
        return DeltaState(
            conv=torch.randn((slots, *spec.conv_shape), generator=random).to(compute),
            delta=torch.randn((slots, *spec.state_shape), generator=random).to(states),
            kept=torch.zeros((rows, spec.kept_width), dtype=compute) if self._keeps_inputs else None,
        )


def _random_rows(spec: DeltaSpec, count: int, random: torch.Generator, dtype: torch.dtype) -> DeltaRows:
    widths = (spec.channels + spec.value_heads, spec.decays, spec.values)
    mixed, decay, gate = (torch.randn((count, width), generator=random).to(dtype) for width in widths)
    return DeltaRows(mixed=mixed, decay=decay, gate=gate)


def _part(rows: DeltaRows, part: slice) -> DeltaRows:
    return DeltaRows(mixed=rows.mixed[part], decay=rows.decay[part], gate=rows.gate[part])
