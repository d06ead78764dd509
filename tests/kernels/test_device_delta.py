"""The delta kernels of fla-core and flashinfer: what the adapters hand over and what they make of the answers.

No GPU and none of these packages: strict stand-ins compute the rule (tests/factories/gpu_packages.py). fla-core's own
kernels run in test_triton_interpreted.py, where they are installed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from proa.arch.delta_blocks import DeltaSpec
from proa.kernels import backends
from proa.kernels.delta import NONE, DeltaOps, StateSlots
from proa.kernels.probing.device import verdict
from proa.kernels.reference.delta import ReferenceDelta, TorchDelta
from proa.units import DType, Phase
from tests.factories.delta_requests import SLOTS, two_requests
from tests.factories.deltas import Deltas, Part, spec
from tests.factories.gpu_packages import Fla, FlashInfer, install
from tests.kernels.test_delta import assert_near

WIDE = spec("gdn", key_dim=128, value_dim=128)
# bfloat16: the operands are rounded after the convolution, and kernels answer in it.
BOUND = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.fixture
def fla(monkeypatch: pytest.MonkeyPatch) -> Fla:
    package = Fla()
    install(monkeypatch, package)
    return package


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> FlashInfer:
    package = FlashInfer()
    install(monkeypatch, package)
    return package


def compare(ops: DeltaOps, shape: DeltaSpec, dtype: torch.dtype, state_dtype: torch.dtype = torch.float32) -> None:
    ours, expected = (Deltas(shape, [140, 20], dtype=dtype) for _ in range(2))
    ours.state = replace(ours.state, delta=ours.state.delta.to(state_dtype))
    for one, other in zip(two_requests(ops, ours), two_requests(ReferenceDelta(), expected), strict=True):
        assert one.dtype == dtype
        assert_near(one, other, BOUND[dtype])
    for slot in SLOTS:
        assert torch.equal(ours.state.conv[slot], expected.state.conv[slot])
        assert_near(ours.state.delta[slot], expected.state.delta[slot], BOUND[dtype])


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("shape", [spec("gdn"), spec("gdn", key_heads=1, value_heads=3, key_dim=16), spec("kda")])
def test_triton_gives_the_reference_results_and_states(fla: Fla, shape: DeltaSpec, dtype: torch.dtype) -> None:
    compare(backends.DELTA["triton"](None), shape, dtype)
    kind = "gdn" if shape.decays == shape.value_heads else "kda"
    assert fla.calls == [
        (f"chunk {kind}", [64]), (f"chunk {kind}", [64]), (f"recurrent {kind}", [2]),  # the long prompt, a snapshot
        (f"recurrent {kind}", [5]), (f"recurrent {kind}", [1, 1]),
        (f"recurrent {kind}", [1, 2]), *[(f"recurrent {kind}", [1])] * 3,  # states of four rows, and of two the last
        *[(f"recurrent {kind}", [1])] * 2,  # applied again, and decoded
    ]  # fmt: skip


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_flashinfer_gives_the_reference_results_and_states(flashinfer: FlashInfer, state_dtype: torch.dtype) -> None:
    compare(backends.DELTA["flashinfer"](None), WIDE, torch.bfloat16, state_dtype)
    assert flashinfer.calls == [
        ("prefill", [64]), ("prefill", [64]), *[("decode", [1])] * 2, *[("decode", [1])] * 5,
        ("decode", [1, 1]), *[("decode", [1, 1])] * 2, *[("decode", [1])] * 4,
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["triton", "flashinfer"])
def test_replay_and_verify_leave_the_bits_of_decoding(fla: Fla, flashinfer: FlashInfer, name: str) -> None:
    del fla, flashinfer
    ops = backends.DELTA[name](None)
    plain, verified = (Deltas(WIDE, [8], dtype=torch.bfloat16) for _ in range(2))
    expected = plain.run(ops, Phase.DECODE, 0, 1, [1] * 5)
    verified.run(ops, Phase.DECODE, 0, 1, [1, 1])
    chain = verified.forward(ops, Phase.VERIFY, [Part(0, 2, 8, 1, [NONE] * 5 + [2], list(range(6)))])
    assert torch.equal(chain[:3], expected[2:])
    ops.replay(verified.weights, WIDE, verified.state, np.array([3]), StateSlots.of([1], [NONE, NONE, 3], [0, 1, 2]))
    for one, other in zip(verified.slot(3), plain.slot(1), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["triton", "flashinfer"])
def test_a_state_inside_a_block_is_refused(fla: Fla, flashinfer: FlashInfer, name: str) -> None:
    del fla, flashinfer
    case = Deltas(WIDE, [64], dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="inside a block"):
        case.forward(
            backends.DELTA[name](None), Phase.PREFILL, [Part(0, 0, 64, NONE, [*[NONE] * 9, 2, *[NONE] * 53, 1])]
        )


@pytest.mark.parametrize("name", ["triton", "flashinfer"])
def test_without_its_package_a_kernel_cannot_be_made(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for package in (Fla(), FlashInfer()):
        for module in package.modules:
            monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ModuleNotFoundError):
        backends.DELTA[name](None)


# Devices


class _NoRule:
    """Answers of the right shape, on the device of the rows."""

    name, is_stepwise = "none", False

    def recur(self, states: torch.Tensor, rows: Any, weights: Any, ends: torch.Tensor) -> Any:
        assert {x.device.type for x in (states, rows.q, rows.a, weights.rate, ends)} == {"meta"}
        return torch.empty_like(rows.v), torch.empty_like(states)

    blocks = recur


DEVICE_OPS: dict[str, Callable[[], DeltaOps]] = {
    "reference": ReferenceDelta,
    "torch": TorchDelta,
    "device": lambda: backends.DeviceDelta(_NoRule()),
}


@pytest.mark.parametrize("kind", ["gdn", "kda"])
@pytest.mark.parametrize("name", DEVICE_OPS)
def test_everything_is_made_on_the_device_of_the_rows(name: str, kind: str) -> None:
    """`meta` stands for a GPU: torch refuses to mix it with host memory, and slots come from there."""
    case, ops = Deltas(spec(kind), [140, 20]), DEVICE_OPS[name]()
    case.to("meta")
    assert {one.device.type for one in two_requests(ops, case)} == {"meta"}


# The self-test


def verdict_of(backend: str, state: DType) -> str:
    return verdict(backend, state, "cpu")


def broken(function: Any, change: Callable[[Any, Any], Any]) -> Any:
    return lambda **given: change(*function(**given))


def test_a_kernel_that_computes_the_rule_passes_the_self_test(fla: Fla, flashinfer: FlashInfer) -> None:
    assert verdict_of("triton", DType.F32) == "passed"
    assert {name for name, _ in fla.calls} == {"chunk gdn", "recurrent gdn", "chunk kda", "recurrent kda"}
    for state in (DType.F32, DType.BF16):
        assert verdict_of("flashinfer", state) == "passed"
    assert {name for name, _ in flashinfer.calls} == {"prefill", "decode"}


@pytest.mark.parametrize(
    ("module", "name", "change", "says"),
    [
        ("gated_delta_rule", "chunk_gated_delta_rule", lambda o, s: (o * 1.2, s), "decay by head: results"),
        ("gated_delta_rule", "chunk_gated_delta_rule", lambda o, s: (o, s.transpose(2, 3)), "decay by head: "),
        ("gated_delta_rule", "fused_recurrent_gated_delta_rule", lambda o, s: (o, s * 1.2), "decay by head: "),
        ("kda", "chunk_kda", lambda o, s: (o * float("nan"), s), "decay by channel: results"),
        ("kda", "fused_recurrent_kda", lambda o, s: (o, s * 1.2), "decay by channel: "),
    ],
)
def test_a_kernel_that_computes_something_else_fails_it_by_name(
    fla: Fla, module: str, name: str, change: Any, says: str
) -> None:
    functions = fla.modules[f"fla.ops.{module}"]
    setattr(functions, name, broken(getattr(functions, name), change))
    found = verdict_of("triton", DType.F32)
    assert found.startswith(f"failed: {says}")
    assert "differs from the reference by" in found
