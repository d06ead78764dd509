"""Recurrent state under speculation: a rollback leaves the bits of plain decoding, and nothing else is written."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from proa.arch.delta_blocks import BLOCK
from proa.kernels.delta import NONE, DeltaOps, StateSlots
from proa.kernels.reference.delta import TorchDelta
from proa.units import Phase
from tests.factories.deltas import BACKENDS, KINDS, Deltas, Part, backend, segment, spec

DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(params=BACKENDS)
def ops(request: pytest.FixtureRequest) -> DeltaOps:
    return backend(request.param)


@pytest.fixture
def native() -> DeltaOps:
    return backend("native")


def decoded(ops: DeltaOps, case: Deltas, rows: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """States after 0, 1, ... `rows` further rows of request 0, decoded one by one from slot 0 (10 rows) on."""
    case.run(ops, Phase.DECODE, 0, 0, [1] * 10)
    states = [case.slot(0)]
    for at in range(10, 10 + rows):
        case.forward(ops, Phase.DECODE, [Part(0, at, at + 1, 0, [0])])
        states.append(case.slot(0))
    return states


def same(one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", range(1, 9))
def test_f33_a_state_per_verified_row_is_that_of_plain_decoding(
    ops: DeltaOps, rows: int, kind: str, dtype: torch.dtype
) -> None:
    case, plain = (Deltas(spec(kind), [20], dtype=dtype) for _ in range(2))
    expected = decoded(ops, plain, rows)
    case.run(ops, Phase.DECODE, 0, 0, [1] * 10)
    case.forward(ops, Phase.VERIFY, [Part(0, 10, 10 + rows, 0, list(range(1, rows + 1)))])
    for accepted in range(rows + 1):
        assert same(case.slot(accepted), expected[accepted])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 4, 8])
def test_f33_kept_inputs_applied_again_leave_the_state_of_plain_decoding(
    ops: DeltaOps, rows: int, kind: str, dtype: torch.dtype
) -> None:
    case, plain = (Deltas(spec(kind), [20], dtype=dtype) for _ in range(2))
    expected = decoded(ops, plain, rows)
    case.run(ops, Phase.DECODE, 0, 0, [1] * 10)
    kept = [(5 * i + 3) % 16 for i in range(rows)]
    case.forward(ops, Phase.VERIFY, [Part(0, 10, 10 + rows, 0, [*[NONE] * (rows - 1), 1], kept)])
    assert same(case.slot(0), expected[0])
    assert same(case.slot(1), expected[rows])
    for accepted in range(1, rows + 1):
        slots = StateSlots.of([0], [*[NONE] * (accepted - 1), 2], kept[:accepted])
        ops.replay(case.weights, case.spec, case.state, np.array([accepted]), slots)
        assert same(case.slot(2), expected[accepted])
        if accepted > 1:
            assert not same(case.slot(2), expected[accepted - 1])


@pytest.mark.parametrize("kind", KINDS)
def test_random_acceptance_over_a_long_run_is_plain_decoding(ops: DeltaOps, kind: str) -> None:
    """Two requests at once: request 0 with a state per verified row, request 1 with kept inputs."""
    small = spec(kind, key_dim=16, value_dim=16)
    for seed in range(2):
        case, plain = (Deltas(small, [220] * 3, seed=seed) for _ in range(2))
        for request in (0, 1):
            plain.run(ops, Phase.DECODE, request, request, [1] * 200)
            case.run(ops, Phase.DECODE, request, request, [1])
        choose, at, slot = random.Random(seed), [1, 1], [0, 1]
        while min(at) < 200:
            lengths = [choose.randint(1, 8) for _ in at]
            accepted = [choose.randint(1, min(n, 200 - a)) if a < 200 else 0 for n, a in zip(lengths, at, strict=True)]
            _verify_and_commit(ops, case, at, slot, lengths, accepted)
        assert all(same(case.slot(slot[request]), plain.slot(request)) for request in (0, 1))


def _verify_and_commit(
    ops: DeltaOps, case: Deltas, at: list[int], slot: list[int], lengths: list[int], accepted: list[int]
) -> None:
    free = [index for index in range(12) if index not in slot]
    per_row, last, rows = free[: lengths[0]], free[8], lengths[1]
    ends, wrong = (
        [a + n for a, n in zip(at, lengths, strict=True)],
        [n - k for n, k in zip(lengths, accepted, strict=True)],
    )
    parts = [
        Part(0, at[0], ends[0], slot[0], per_row, None, wrong[0]),
        Part(1, at[1], ends[1], slot[1], [*[NONE] * (rows - 1), last], range(rows), wrong[1]),
    ]
    case.forward(ops, Phase.VERIFY, parts)
    if accepted[0]:
        slot[0] = per_row[accepted[0] - 1]
    if accepted[1] == rows:
        slot[1] = last
    elif accepted[1]:
        again = StateSlots.of([slot[1]], [*[NONE] * (accepted[1] - 1), slot[1]], list(range(accepted[1])))
        ops.replay(case.weights, case.spec, case.state, np.array([accepted[1]]), again)
    at[:] = [a + k for a, k in zip(at, accepted, strict=True)]


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_wanted_slots_are_written(ops: DeltaOps, kind: str) -> None:
    case = Deltas(spec(kind), [BLOCK + 9])
    case.run(ops, Phase.PREFILL, 0, 2, [BLOCK])
    before = case.slot(2)
    case.forward(ops, Phase.VERIFY, [Part(0, BLOCK, BLOCK + 4, 2, [NONE, 7, NONE, NONE], [NONE, NONE, 9, NONE])])
    assert same(case.slot(2), before)
    for index in set(range(12)) - {2, 7}:
        assert case.state.delta[index].isnan().all() and case.state.conv[index].isnan().all()
    assert case.state.kept is not None
    written = case.state.kept.isfinite().all(dim=1)
    assert written.nonzero().flatten().tolist() == [9]
    row, s = case.rows[0], case.spec
    expected = torch.cat((row.mixed[BLOCK + 2, : s.channels + s.value_heads], row.decay[BLOCK + 2]))
    assert torch.equal(case.state.kept[9], expected)


@pytest.mark.parametrize("kind", KINDS)
def test_requests_may_begin_from_one_snapshot(ops: DeltaOps, kind: str) -> None:
    shared, alone = (Deltas(spec(kind), [BLOCK + 5, BLOCK + 5]) for _ in range(2))
    for case in (shared, alone):
        case.run(ops, Phase.PREFILL, 0, 0, [BLOCK])
    parts = [Part(r, BLOCK, BLOCK + 5, 0, [*[NONE] * 4, 1 + r]) for r in (0, 1)]
    results = shared.forward(ops, Phase.PREFILL, parts)
    assert torch.equal(results, torch.cat([alone.forward(ops, Phase.PREFILL, [part]) for part in parts]))
    assert same(shared.slot(2), alone.slot(2))
    assert not same(shared.slot(1), shared.slot(2))


@pytest.mark.parametrize("kind", KINDS)
def test_a_prefill_leaves_snapshots_at_block_boundaries(ops: DeltaOps, kind: str) -> None:
    case, prefix = (Deltas(spec(kind), [2 * BLOCK + 3]) for _ in range(2))
    targets = [NONE] * (2 * BLOCK + 3)
    targets[BLOCK - 1], targets[2 * BLOCK - 1], targets[-1] = 5, 6, 0
    case.forward(ops, Phase.PREFILL, [Part(0, 0, 2 * BLOCK + 3, NONE, targets)])
    for boundary, slot in ((BLOCK, 5), (2 * BLOCK, 6)):
        prefix.run(ops, Phase.PREFILL, 0, 1, [boundary])
        assert same(case.slot(slot), prefix.slot(1))


def test_the_chunkwise_prefill_has_no_state_inside_a_block() -> None:
    case = Deltas(spec("gdn"), [BLOCK])
    with pytest.raises(ValueError, match="inside a block"):
        case.forward(TorchDelta(), Phase.PREFILL, [Part(0, 0, BLOCK, NONE, [NONE] * 9 + [1] + [NONE] * (BLOCK - 10))])


def test_inputs_cannot_be_kept_or_applied_where_there_are_no_rows_for_them(ops: DeltaOps) -> None:
    case = Deltas(spec("gdn"), [4], kept=0)
    with pytest.raises(ValueError, match="no rows for them"):
        case.forward(ops, Phase.VERIFY, [Part(0, 0, 2, NONE, [1, 2], [0, 1])])
    with pytest.raises(ValueError, match="no kept inputs"):
        ops.replay(case.weights, case.spec, case.state, np.array([1]), StateSlots.of([1], [2], [0]))


def test_native_refuses_rows_and_states_that_it_would_misread(native: DeltaOps) -> None:
    case = Deltas(spec("gdn"), [4])
    rows, where, slots = (
        case.together([Part(0, 0, 2, NONE, [])]),
        segment(Phase.VERIFY, [2], [0]),
        StateSlots.of([NONE], [NONE, 1]),
    )
    odd = torch.zeros(case.state.delta.numel() + 1)[1:].view(case.state.delta.shape)
    with pytest.raises(ValueError, match="64 bytes"):
        native.delta(rows, case.weights, case.spec, replace(case.state, delta=odd), where, slots)
    with pytest.raises(TypeError, match="bfloat16"):
        native.delta(replace(rows, gate=rows.gate.bfloat16()), case.weights, case.spec, case.state, where, slots)


def test_native_refuses_sizes_that_it_has_no_code_for(native: DeltaOps) -> None:
    for sizes in ({"key_dim": 24}, {"value_dim": 40}, {"key_dim": 272}):
        case = Deltas(spec("gdn", **sizes), [1])
        with pytest.raises(ValueError, match="whole vectors of 16, keys at most 256, taps at most 8"):
            case.forward(native, Phase.DECODE, [Part(0, 0, 1, NONE, [0])])
