"""Self-test of native sampling: both backends' tokens for random rows, for probe.py."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import torch

from proa.kernels.native.abi import load_library
from proa.kernels.native.sample import NativeSample
from proa.kernels.native.sink import Direct
from proa.kernels.reference.sample import ReferenceSample
from proa.kernels.seam import Draw


def sample_results(library: Path, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """(op, native, reference): greedy and drawn tokens, with every filter and pairs of them, ties and masked ids."""
    if dtype != torch.float32:
        return  # logits have one type
    logits = torch.randn(4, 3001, generator=torch.Generator().manual_seed(0)) * torch.tensor([[1.0], [4.0], [9.0], [0]])
    logits[1:, ::7] = -math.inf
    filters = product((0.0, 0.3, 1.0), (0, 3, 40), (1.0, 0.3, 0.9), (-math.inf, -2.0))
    draws = [
        Draw(row, 2**64 - 1 - key, top_k, temperature, top_p, floor)
        for key, (temperature, top_k, top_p, floor) in enumerate(filters)
        for row in range(len(logits))
    ]
    made = [ops.sample(logits, draws) for ops in (NativeSample(Direct(load_library(library))), ReferenceSample())]
    yield "sample", torch.tensor(made[0]), torch.tensor(made[1])
