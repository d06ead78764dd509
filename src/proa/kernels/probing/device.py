"""The other side of apart.py for kernels on a GPU: runs a package's against the reference, and tells the verdict."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

import torch

from proa.arch.delta_blocks import Decay
from proa.kernels import backends
from proa.kernels.delta_catalog import TRITON
from proa.kernels.probing.delta import device_results
from proa.kernels.probing.probe import judge
from proa.units import DType


def main(arguments: Sequence[str]) -> None:
    """`BACKEND STATE_DTYPE` -> a line `["state dtype", "verdict"]` on stdout. Raises whatever the package raises."""
    backend, state = arguments
    answers = os.dup(1)
    os.dup2(2, 1)  # compilers and tuners talk
    line = json.dumps([state, verdict(backend, DType(state), "cuda")]) + "\n"
    os.write(answers, line.encode())


def verdict(backend: str, state: DType, device: str) -> str:
    decays = (Decay.HEAD, Decay.CHANNEL) if backend == TRITON else (Decay.HEAD,)
    state_dtype = torch.float32 if state is DType.F32 else torch.bfloat16
    with torch.inference_mode():
        results = device_results(backends.DELTA[backend](None), decays, state_dtype, device)
        return judge([(torch.bfloat16, results)])
