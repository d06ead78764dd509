"""What a CPU without AVX-512 would compile passes the same parity and exactness tests, on a CPU that has both."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from proa.env import TEST_ISA
from proa.kernels.caps import read_caps
from proa.kernels.native.build import FLAGS, flags_for
from tests.factories.native import probed, why_not

AVX2 = ("avx2", "fma", "f16c")
ROOT = Path(__file__).parents[2]
SUITE = (
    "tests/kernels/test_native_ops.py",
    "tests/kernels/test_native_moe.py",
    "tests/kernels/test_native_latent.py",
    "tests/kernels/test_native_index.py",
    "tests/kernels/test_delta.py",
    "tests/families/test_native_models.py",
    "tests/families/test_exact_numerics.py",
)
CHOSEN = "not reference and not torch-gdn and not torch-kda and not qwen2 and not mistral"
HAS = read_caps("cpu").isa
WHY_NOT = why_not(probed()) or (None if {*AVX2, "avx512f"} <= set(HAS) else "this CPU is what the usual tests cover")


def test_the_flags_of_a_cpu_decide_what_is_compiled() -> None:
    assert flags_for((*AVX2, "avx512f")) == FLAGS
    assert flags_for(AVX2) == (*FLAGS, "-mno-avx512f")


@pytest.mark.skipif(WHY_NOT is not None or TEST_ISA.name in os.environ, reason=WHY_NOT or "runs within itself")
def test_the_avx2_variant_passes_the_parity_and_exactness_tests() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", CHOSEN, *SUITE]
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, TEST_ISA.name: " ".join(AVX2)},
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "failed" not in done.stdout
