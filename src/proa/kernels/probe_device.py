"""Self-test of another package's kernels on a GPU, in a process of its own. No torch here: the child imports it.

A kernel that reads outside of its memory takes the process, or its use of the GPU, with it. That must cost a verdict
and nothing else.
"""

from __future__ import annotations

import subprocess
import sys

from proa.kernels.delta_catalog import FLASHINFER, limits_of
from proa.kernels.verdicts import FAILED, PASSED
from proa.units import DType

CHILD = "proa.kernels.device_self_test"
SECONDS = 900.0  # FlashInfer compiles what it runs


def self_test_device(backend: str, sm: str | None, *, seconds: float = SECONDS) -> str:
    """`passed`, or `failed: ` and why, of one backend's kernels of linear attention on a GPU with that capability."""
    limits = limits_of(sm) if backend == FLASHINFER else None
    state = DType.F32 if limits is None else limits.state
    command = [sys.executable, "-m", CHILD, backend, state.value]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return f"{FAILED}the self-test took more than {seconds:.0f} s"
    except OSError as error:
        return f"{FAILED}the self-test could not be started: {error.strerror}"
    said = done.stdout.strip().splitlines()
    if done.returncode == 0 and said and (said[-1] == PASSED or said[-1].startswith(FAILED)):
        return said[-1]
    last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
    return f"{FAILED}the self-test ended with exit code {done.returncode}: {last}"
