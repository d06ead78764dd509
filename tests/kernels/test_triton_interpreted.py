"""fla-core's own kernels on the CPU, in Triton's interpreter, against the reference: no stand-in, and no GPU.

Runs where fla-core and triton are installed (see docs/kernels.md, "What ran where"):
    TRITON_INTERPRET=1 pytest tests/kernels/test_triton_interpreted.py
The interpreter's products of bfloat16 are wrong (those of chunkwise kernels by orders of magnitude, with fla-core alone
too), so half precision is float16 here, and only row-by-row kernels run in bfloat16.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import import_module, util
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from proa.kernels import backends
from proa.kernels.delta import NONE, DeltaOps, StateSlots
from proa.kernels.reference.delta import ReferenceDelta
from proa.units import Phase
from tests.factories.delta_requests import SLOTS, two_requests
from tests.factories.deltas import KINDS, Deltas, Part, spec
from tests.kernels.test_delta import assert_near

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_PACKAGES = all(util.find_spec(name) is not None for name in ("fla", "triton"))
pytestmark = [
    pytest.mark.skipif(not IS_INTERPRETED, reason="TRITON_INTERPRET=1 is not set"),
    pytest.mark.skipif(not HAS_PACKAGES, reason="the extra `triton` is not installed"),
    pytest.mark.filterwarnings("ignore"),  # fla-core says that there is no GPU
]


class _Index(int):
    """A loop's counter: within `range` the interpreter gives Python's, which a kernel cannot convert."""

    def to(self, _: Any) -> int:
        return int(self)


@pytest.fixture(scope="module", autouse=True)
def interpreter() -> Iterator[None]:
    """What the interpreter lacks: a driver to time configurations with (the first one is taken), and such counters."""
    driver, autotuner = import_module("triton.runtime").driver, import_module("triton.runtime.autotuner").Autotuner
    driver.set_active(
        SimpleNamespace(
            get_benchmarker=lambda: lambda call, quantiles: [1.0] * len(quantiles),
            get_current_target=lambda: SimpleNamespace(backend="cpu", arch=0, warp_size=32),
            get_current_device=lambda: 0,
        )
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(autotuner, "prune_configs", lambda self, _: self.configs[:1])
        counted = import_module("fla.ops.common.chunk_delta_h")
        patch.setattr(counted, "range", lambda *bounds: map(_Index, range(*bounds)), raising=False)
        yield


@pytest.fixture
def ops() -> DeltaOps:
    return backends.DELTA["triton"](None)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float16, 5e-3)])
@pytest.mark.parametrize("kind", KINDS)
def test_every_forward_gives_the_reference_results_and_states(
    ops: DeltaOps, kind: str, dtype: torch.dtype, bound: float
) -> None:
    ours, expected = (Deltas(spec(kind), [140, 20], dtype=dtype) for _ in range(2))
    for one, other in zip(two_requests(ops, ours), two_requests(ReferenceDelta(), expected), strict=True):
        assert_near(one, other, bound)
    for slot in SLOTS:
        assert torch.equal(ours.state.conv[slot], expected.state.conv[slot])
        assert_near(ours.state.delta[slot], expected.state.delta[slot], bound)


@pytest.mark.parametrize("kind", KINDS)
def test_replay_and_verify_leave_the_bits_of_decoding(ops: DeltaOps, kind: str) -> None:
    plain, verified = (Deltas(spec(kind), [8], dtype=torch.bfloat16) for _ in range(2))
    expected = plain.run(ops, Phase.DECODE, 0, 1, [1] * 5)
    verified.run(ops, Phase.DECODE, 0, 1, [1, 1])
    chain = verified.forward(ops, Phase.VERIFY, [Part(0, 2, 8, 1, [NONE] * 5 + [2], list(range(6)))])
    assert torch.equal(chain[:3], expected[2:])
    slots = StateSlots.of([1], [NONE, NONE, 3], [0, 1, 2])
    ops.replay(verified.weights, verified.spec, verified.state, np.array([3]), slots)
    for one, other in zip(verified.slot(3), plain.slot(1), strict=True):
        assert torch.equal(one, other)
