"""The delta ops of every backend against the recurrent reference, and that against a loop in float64.

Also: a row's bits do not depend on the rows beside it. What a rollback leaves is in test_delta_rollback.py.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from proa.arch.delta_blocks import BLOCK, DeltaSpec
from proa.kernels.delta import NONE, DeltaOps, DeltaRows, StateSlots
from proa.kernels.native.abi import load_library
from proa.kernels.native.delta import NativeDelta, state_rows
from proa.kernels.native.sink import Program, Recorder
from proa.kernels.reference.delta import ReferenceDelta, TorchDelta
from proa.units import Phase
from tests.factories.deltas import BACKENDS, KINDS, Deltas, Part, backend, segment, spec
from tests.factories.native import probed

DTYPES = (torch.float32, torch.bfloat16)
# float32: sums in another order. bfloat16: the result's rounding alone, since inputs are rounded before, and all is
# float32 inside.
BOUND = {torch.float32: 1e-5, torch.bfloat16: 2**-8}
SHAPES = (
    spec("gdn"),
    spec("gdn", key_heads=3, value_heads=3, key_dim=16, value_dim=16),
    spec("kda"),
    spec("gdn", key_heads=1, value_heads=17, key_dim=128, value_dim=208),
    spec("kda", key_dim=64, value_dim=64),
)


@pytest.fixture(params=BACKENDS)
def ops(request: pytest.FixtureRequest) -> DeltaOps:
    return backend(request.param)


@pytest.fixture
def native() -> DeltaOps:
    return backend("native")


def assert_near(ours: torch.Tensor, expected: torch.Tensor, bound: float) -> None:
    """Relative to the largest expected value."""
    assert ours.shape == expected.shape
    assert (ours.double() - expected.double()).abs().max() <= bound * expected.double().abs().max()


def by_the_formula(case: Deltas, request: int) -> tuple[np.ndarray, np.ndarray]:
    """Results [T, Hv * dv] and last state [Hv, dk, dv] of a request: one row and value head at a time, in float64."""
    s, rows = case.spec, case.rows[request]
    mixed, decay, gate = (part.double().numpy() for part in (rows.mixed, rows.decay, rows.gate))
    w = case.weights
    conv, rate, bias, norm = (part.double().numpy() for part in (w.conv, w.rate, w.bias, w.norm))
    state = np.zeros(s.state_shape)
    out = np.zeros((len(mixed), s.value_heads, s.value_dim))

    def sigmoid(x: Any) -> Any:
        return 1 / (1 + np.exp(-x))

    for t in range(len(mixed)):
        x = sum(conv[s.taps - 1 - back] * mixed[t - back, : s.channels] for back in range(min(s.taps, t + 1)))
        x = x * sigmoid(x)
        beta = sigmoid(mixed[t, s.channels : s.channels + s.value_heads])
        for h in range(s.value_heads):
            from_head = h // (s.value_heads // s.key_heads) * s.key_dim
            q, k = x[from_head : from_head + s.key_dim], x[s.keys + from_head : s.keys + from_head + s.key_dim]
            v = x[2 * s.keys + h * s.value_dim : 2 * s.keys + (h + 1) * s.value_dim]
            q, k = (part / math.sqrt(part @ part + 1e-6) for part in (q, k))
            own = slice(h, h + 1) if s.decays == s.value_heads else slice(h * s.key_dim, (h + 1) * s.key_dim)
            g = -rate[h] * np.log1p(np.exp(decay[t, own] + bias[own]))
            state[h] *= np.exp(g)[:, None]
            state[h] += np.outer(k, beta[h] * (v - state[h].T @ k))
            result = state[h].T @ q / math.sqrt(s.key_dim)
            result = result / math.sqrt((result**2).mean() + 1e-6) * norm
            z = gate[t, h * s.value_dim : (h + 1) * s.value_dim]
            out[t, h] = result * (z * sigmoid(z) if s.rank is None else sigmoid(z))
    return out.reshape(len(out), -1), state


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_reference_is_the_formula(shape: DeltaSpec, dtype: torch.dtype) -> None:
    case = Deltas(shape, [37], dtype=dtype)
    got = case.run(ReferenceDelta(), Phase.PREFILL, 0, 3, [37])
    out, state = by_the_formula(case, 0)
    assert_near(got, torch.from_numpy(out), BOUND[dtype])
    assert_near(case.state.delta[3], torch.from_numpy(state), 1e-5)
    assert torch.equal(case.state.conv[3], case.rows[0].mixed[-3:, : shape.channels])


CUTTINGS = {
    "decoded row by row": (Phase.DECODE, [1] * 150),
    "prefilled whole": (Phase.PREFILL, [150]),
    "prefilled by blocks": (Phase.PREFILL, [BLOCK, BLOCK, 22]),
    "prefilled by two blocks": (Phase.PREFILL, [2 * BLOCK, 22]),
    "prefilled by ones": (Phase.PREFILL, [1] * 150),
    "prefilled by sevens": (Phase.PREFILL, [7] * 21 + [3]),
    "verified": (Phase.VERIFY, [1, 2, 3, 4, 5, 6, 7, 8] * 4 + [6]),
}


@pytest.mark.parametrize("cutting", CUTTINGS)
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[2], SHAPES[4]])
def test_f33_every_phase_and_cutting_gives_the_recurrent_results_and_state(
    ops: DeltaOps, shape: DeltaSpec, cutting: str
) -> None:
    phase, steps = CUTTINGS[cutting]
    ours, expected = Deltas(shape, [150]), Deltas(shape, [150])
    results = ours.run(ops, phase, 0, 1, steps)
    assert_near(results, expected.run(ReferenceDelta(), Phase.PREFILL, 0, 1, [150]), 1e-5)
    assert_near(ours.state.delta[1], expected.state.delta[1], 1e-5)
    assert torch.equal(ours.state.conv[1], expected.state.conv[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_f33_every_shape_and_type_gives_the_reference_results(
    ops: DeltaOps, shape: DeltaSpec, dtype: torch.dtype
) -> None:
    ours, expected = Deltas(shape, [70], dtype=dtype), Deltas(shape, [70], dtype=dtype)
    results = []
    for case, with_ops in ((ours, ops), (expected, ReferenceDelta())):
        prompt = case.run(with_ops, Phase.PREFILL, 0, 1, [66])
        token = case.forward(with_ops, Phase.DECODE, [Part(0, 66, 67, 1, [2])])
        chain = case.forward(with_ops, Phase.VERIFY, [Part(0, 67, 70, 2, [NONE, 4, 5])])
        results.append(torch.cat((prompt, token, chain)))
    assert_near(results[0], results[1], BOUND[dtype])
    for slot in (1, 2, 4, 5):
        assert_near(ours.state.delta[slot], expected.state.delta[slot], 1e-5)
        assert torch.equal(ours.state.conv[slot], expected.state.conv[slot])


@pytest.mark.parametrize("kind", KINDS)
def test_strong_and_weak_decays_neither_overflow_nor_lose_the_recent_rows(ops: DeltaOps, kind: str) -> None:
    for rate, bias in ((16.0, 8.0), (16.0, -30.0), (1e-4, 0.0)):
        cases = [Deltas(spec(kind), [2 * BLOCK + 3], rate=rate) for _ in range(2)]
        for case in cases:
            case.weights.bias.add_(bias)
        results = [
            case.run(with_ops, Phase.PREFILL, 0, 1, [2 * BLOCK + 3])
            for case, with_ops in zip(cases, (ops, ReferenceDelta()), strict=True)
        ]
        assert_near(results[0], results[1], 1e-5)
        assert_near(cases[0].state.delta[1], cases[1].state.delta[1], 1e-5)


def test_extreme_gates_and_empty_rows_give_finite_results(ops: DeltaOps) -> None:
    for kind in KINDS:
        case = Deltas(spec(kind), [8])
        row = case.rows[0]
        row.mixed[1] = 0
        row.mixed[2], row.mixed[3] = 1e4, -1e4
        row.decay[2], row.decay[3], row.decay[4] = 1e4, -1e4, 88.0
        expected = Deltas(spec(kind), [8])
        expected.rows = case.rows
        ours = case.run(ops, Phase.VERIFY, 0, 1, [8])
        assert ours.isfinite().all()
        assert_near(ours, expected.run(ReferenceDelta(), Phase.PREFILL, 0, 1, [8]), 1e-5)


# Bits


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("phase", [Phase.DECODE, Phase.VERIFY])
def test_a_rows_bits_do_not_depend_on_the_requests_beside_it(
    ops: DeltaOps, phase: Phase, kind: str, dtype: torch.dtype
) -> None:
    shape, counts = spec(kind, key_dim=64, value_dim=128), [1, 1, 1, 1] if phase is Phase.DECODE else [3, 1, 8, 5]
    together, alone = (Deltas(shape, [20] * 4, dtype=dtype) for _ in range(2))
    for case in (together, alone):
        for request in range(4):
            case.run(ops, Phase.DECODE, request, request, [1] * 10)
    parts = [Part(r, 10, 10 + n, r, [*[NONE] * (n - 1), 4 + r]) for r, n in enumerate(counts)]
    results = together.forward(ops, phase, parts)
    assert torch.equal(results, torch.cat([alone.forward(ops, phase, [part]) for part in parts]))
    assert torch.equal(together.state.delta[4:8], alone.state.delta[4:8])
    assert torch.equal(together.state.conv[4:8], alone.state.conv[4:8])


@pytest.mark.parametrize("kind", KINDS)
def test_cuts_at_block_boundaries_leave_the_bits_of_a_prompt_as_they_are(ops: DeltaOps, kind: str) -> None:
    results, states = [], []
    for steps in ([200], [BLOCK, BLOCK, BLOCK, 8], [2 * BLOCK, BLOCK + 8]):
        case = Deltas(spec(kind), [200])
        results.append(case.run(ops, Phase.PREFILL, 0, 1, steps))
        states.append(case.state.delta[1])
    assert all(torch.equal(result, results[0]) for result in results)
    assert all(torch.equal(state, states[0]) for state in states)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["reference", "native"])
def test_recurrent_backends_give_the_same_bits_in_every_phase_and_cutting(
    name: str, kind: str, dtype: torch.dtype
) -> None:
    ops, seen = backend(name), []
    for phase, steps in CUTTINGS.values():
        case = Deltas(spec(kind), [150], dtype=dtype)
        seen.append((case.run(ops, phase, 0, 1, steps), case.state.delta[1]))
    for result, state in seen:
        assert torch.equal(result, seen[0][0])
        assert torch.equal(state, seen[0][1])


def test_blocks_round_otherwise_than_rows() -> None:
    """Or the tests above could not fail: `torch` prefills with other bits than it decodes."""
    prompt, rows = Deltas(spec("gdn"), [BLOCK]), Deltas(spec("gdn"), [BLOCK])
    blocks = prompt.run(TorchDelta(), Phase.PREFILL, 0, 1, [BLOCK])
    assert not torch.equal(blocks, rows.run(TorchDelta(), Phase.DECODE, 0, 1, [1] * BLOCK))


def test_threads_do_not_change_bits(native: DeltaOps) -> None:
    before, seen = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            case = Deltas(spec("kda", value_heads=5), [40])
            seen.append(case.run(native, Phase.PREFILL, 0, 1, [33, 7]))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(result, seen[0]) for result in seen)


@pytest.mark.parametrize("kind", KINDS)
def test_a_recorded_layer_gives_the_bits_of_a_direct_one(kind: str) -> None:
    """One recording over 16 rows, run for two requests of 3 and 2 rows with the states of that run."""
    direct, case = Deltas(spec(kind), [5, 5]), Deltas(spec(kind), [5, 5])
    parts = [Part(0, 0, 3, NONE, [NONE, 5, 1]), Part(1, 0, 2, NONE, [NONE, 2])]
    expected = direct.forward(backend("native"), Phase.VERIFY, parts)
    library, recorder = load_library(probed().library), Recorder(16)
    ops, s = NativeDelta(recorder), case.spec
    mixed = recorder.empty((16, s.input_rows), torch.float32)
    rows = (
        DeltaRows.merged(mixed, s)
        if s.rank is None
        else DeltaRows(
            mixed=mixed,
            decay=recorder.empty((16, s.decays), torch.float32),
            gate=recorder.empty((16, s.values), torch.float32),
        )
    )
    unknown = StateSlots.of([NONE], [NONE] * 16)
    results = ops.delta(rows, case.weights, s, case.state, segment(Phase.DECODE, [16], [0]), unknown)
    together = case.together(parts)
    for name in ("mixed", "decay", "gate"):
        getattr(rows, name)[:5] = getattr(together, name)
    slots = StateSlots.of([NONE, NONE], [NONE, 5, 1, NONE, 2])
    Program(library, recorder, {}).run(5, {"states": state_rows(np.array([3, 2]), slots)})
    assert torch.equal(results[:5], expected)
    for slot in (1, 2, 5):
        assert torch.equal(case.state.delta[slot], direct.state.delta[slot])
