"""The child of probe_device.py: `python -m proa.kernels.device_self_test BACKEND STATE_DTYPE` prints a verdict."""

from __future__ import annotations

import sys

import torch

from proa.arch.delta_blocks import Decay
from proa.kernels import backends
from proa.kernels.delta_catalog import TRITON
from proa.kernels.probe import judge
from proa.kernels.probe_delta import device_results
from proa.units import DType

_STATES = {DType.F32.value: torch.float32, DType.BF16.value: torch.bfloat16}


def verdict(backend: str, state: str, device: str = "cuda") -> str:
    """As `self_test_device`. Raises whatever the package does where it cannot be imported or called."""
    decays = (Decay.HEAD, Decay.CHANNEL) if backend == TRITON else (Decay.HEAD,)
    with torch.inference_mode():
        results = device_results(backends.DELTA[backend](None), decays, _STATES[state], device)
        return judge([(torch.bfloat16, results)])


if __name__ == "__main__":
    sys.stdout.write(f"{verdict(*sys.argv[1:])}\n")
