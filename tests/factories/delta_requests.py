"""Two requests through every kind of forward: a prompt with a snapshot, a short one, decode, verify, replay."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from proa.kernels.delta import NONE, DeltaOps, StateSlots
from proa.units import Phase
from tests.factories.deltas import Deltas, Part

SLOTS = range(12)
"""All slots that are written, of a `Deltas` of 140 and 20 rows."""


def two_requests(ops: DeltaOps, case: Deltas) -> Iterator[torch.Tensor]:
    """Results of every forward. Request 0: rows 0-129 (state after 64 rows to slot 0, the last to 1), 130 (to 3) and
    131-134 (a state of each). Request 1: rows 0-4 (to 2), 5 (to 4), 6-7 (inputs kept, the last state to 9), of which
    the first is then applied again (to 11)."""
    yield case.forward(ops, Phase.PREFILL, [Part(0, 0, 130, NONE, [*[NONE] * 63, 0, *[NONE] * 65, 1])])
    yield case.forward(ops, Phase.PREFILL, [Part(1, 0, 5, NONE, [*[NONE] * 4, 2])])
    yield case.forward(ops, Phase.DECODE, [Part(0, 130, 131, 1, [3]), Part(1, 5, 6, 2, [4])])
    chains = [Part(0, 131, 135, 3, [5, 6, 7, 8]), Part(1, 6, 8, 4, [NONE, 9], [2, 3])]
    yield case.forward(ops, Phase.VERIFY, chains)
    ops.replay(case.weights, case.spec, case.state, np.array([1]), StateSlots.of([4], [11], [2]))
    yield case.forward(ops, Phase.DECODE, [Part(1, 8, 9, 9, [10])])
