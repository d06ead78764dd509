"""What undoing a proposal costs: the file that keeps it, and measuring kernels that take exactly what they should."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from proa.arch.delta_blocks import DeltaSpec
from proa.kernels.bind import bind
from proa.kernels.delta import NONE, DeltaRows, StateSlots
from proa.kernels.kernel_set import KernelNames
from proa.kernels.probing.rollback import BUDGET, MAX_BYTES, measure_rollback
from proa.kernels.rollback import RollbackCase, RollbackCosts, add_rollbacks, read_rollbacks, rollback_path
from proa.kernels.seam import Segment
from proa.units import DType, Phase
from tests.factories.deltas import spec

COSTS = RollbackCosts(replay=0.002, states=0.001)
F32 = (torch.float32, torch.float32)
UNIT = 1e-5


def case_of(*layers: DeltaSpec, draft_tokens: int = 3, is_draft: bool = False) -> RollbackCase:
    return RollbackCase(
        decode="native", verify="native", dtype=DType.F32, state_dtype=DType.F32, layers=layers,
        draft_tokens=draft_tokens, is_draft=is_draft, threads=2,
    )  # fmt: skip


# The file


def test_costs_are_kept_by_case_beside_each_other(tmp_path: Path) -> None:
    path = rollback_path(tmp_path, tmp_path)
    assert read_rollbacks(path, pytest.fail) == {}
    add_rollbacks(path, {"one": COSTS}, pytest.fail)
    add_rollbacks(path, {"other": RollbackCosts(replay=1.0, states=2.0)}, pytest.fail)
    assert json.loads(path.read_text()) == {
        "one": {"replay": 0.002, "states": 0.001},
        "other": {"replay": 1.0, "states": 2.0},
    }
    assert read_rollbacks(path, pytest.fail)["one"] == COSTS


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"a": 1}',
        '{"a": {"replay": 1.0}}',
        '{"a": {"replay": 0.0, "states": 1.0}}',
        '{"a": {"replay": "1", "states": 2.0}}',
    ],
)
def test_a_damaged_file_is_named_and_written_anew(tmp_path: Path, text: str) -> None:
    path, notes = tmp_path / "rollback.json", list[str]()
    path.write_text(text)
    assert read_rollbacks(path, notes.append) == {}
    assert len(notes) == 1 and str(path) in notes[0] and "anew" in notes[0]
    add_rollbacks(path, {"a": COSTS}, pytest.fail)
    assert read_rollbacks(path, pytest.fail) == {"a": COSTS}


def test_a_directory_that_cannot_be_written_is_named_and_nothing_fails(tmp_path: Path) -> None:
    (tmp_path / "costs").write_text("a file")
    notes: list[str] = []
    add_rollbacks(rollback_path(tmp_path, tmp_path), {"a": COSTS}, notes.append)
    assert len(notes) == 1 and "could not be kept" in notes[0]


def test_another_processor_has_a_file_of_its_own(tmp_path: Path) -> None:
    one = rollback_path(tmp_path, tmp_path)
    assert one == rollback_path(tmp_path, tmp_path)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("model name\t: Other CPU\nflags\t\t: avx2\n")
    assert rollback_path(tmp_path, tmp_path) != one


def test_whatever_a_measurement_depends_on_is_in_its_cases_text() -> None:
    one = case_of(spec("gdn"), spec("gdn"))
    others = [
        replace(one, decode="torch"),
        replace(one, verify="torch"),
        replace(one, dtype=DType.BF16),
        replace(one, state_dtype=DType.BF16),
        replace(one, layers=one.layers[:1]),
        replace(one, draft_tokens=4),
        replace(one, is_draft=True),
        replace(one, threads=1),
        *(case_of(*[replace(spec("gdn"), **{size: 96})] * 2) for size in ("key_heads", "value_heads", "key_dim")),
        *(case_of(*[replace(spec("gdn"), **{size: 96})] * 2) for size in ("value_dim", "taps")),
        case_of(spec("kda"), spec("kda")),
    ]
    assert len({str(one), *map(str, others)}) == 1 + len(others)


# The measurement


class TimedKernels:
    """Every row costs a unit, every state that is left two, every row that is applied again five."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[tuple[str, int]] = []
        self.noise = 0.0

    def clock(self) -> float:
        return self.now

    def delta(self, rows: DeltaRows, weights, spec, state, segment: Segment, slots: StateSlots) -> None:
        count = len(rows.mixed)
        assert (len(rows.decay), len(rows.gate), segment.num_rows) == (count, count, count)
        assert segment.phase is (Phase.VERIFY if count > 1 else Phase.DECODE)
        assert slots.source[0] != NONE and max(slots.targets) < len(state.delta)
        assert (state.kept is None) == (slots.kept.max() == NONE)
        self.calls.append(("delta", count))
        self.now += UNIT * (count + 2 * (slots.targets != NONE).sum()) + self.noise

    def replay(self, weights, spec, state, counts, slots: StateSlots) -> None:
        assert (slots.source[0], slots.targets[-1]) == (0, 1)
        assert list(slots.kept) == list(range(counts[0]))
        self.calls.append(("replay", counts[0]))
        self.now += 5 * UNIT * counts[0] + self.noise


def timed(case: RollbackCase, noise: float = 0.0) -> tuple[RollbackCosts, TimedKernels]:
    kernels = TimedKernels()
    kernels.noise = noise
    return measure_rollback(case, kernels, F32, kernels.clock), kernels


def test_a_step_is_the_mean_over_every_count_of_accepted_tokens() -> None:
    costs, kernels = timed(case_of(spec("gdn"), spec("gdn")))
    # 4 rows at once. With replay one state is left, and 1, 2 or 3 rows are applied again; all 4 of them never are.
    assert costs.replay == pytest.approx(2 * UNIT * (4 + 2 + 5 * (1 + 2 + 3 + 0) / 4))
    assert costs.states == pytest.approx(2 * UNIT * (4 + 2 * 4))
    assert {rows for kind, rows in kernels.calls if kind == "replay"} == {1, 2, 3}


def test_a_draft_computes_rows_one_by_one_and_never_that_of_its_last_token() -> None:
    costs, kernels = timed(case_of(spec("kda"), is_draft=True))
    # Anchor and two tokens: each row leaves its state either way.
    assert costs.replay == pytest.approx(UNIT * (3 + 2 * 3 + 5 * (1 + 2 + 0 + 0) / 4))
    assert costs.states == pytest.approx(UNIT * (3 + 2 * 3))
    assert {rows for kind, rows in kernels.calls if kind == "delta"} == {1}


def test_layers_of_several_shapes_add_up_and_many_are_counted_but_not_timed() -> None:
    big = spec("gdn", value_heads=32, key_dim=128, value_dim=128)
    layers = [big] * 30 + [spec("gdn")]
    costs, kernels = timed(case_of(*layers, draft_tokens=1))
    assert costs.states == pytest.approx(31 * UNIT * (2 + 2 * 2))
    assert costs.replay == pytest.approx(31 * UNIT * (2 + 2 + 5 * (1 + 0) / 2))
    slot = 4 * 32 * 128 * 128
    assert MAX_BYTES // (3 * slot) == 10  # of the 30
    rounds = Counter(kind for kind, _ in kernels.calls)["replay"] / (10 + 1)
    assert rounds > 2


def test_slow_kernels_get_one_round_and_no_more() -> None:
    quick, slow = timed(case_of(spec("gdn")))[1], timed(case_of(spec("gdn")), noise=10 * BUDGET)[1]
    assert len(slow.calls) < len(quick.calls)
    # Verifies: one of each way to begin with, then four of each way.
    assert sum(kind == "delta" for kind, _ in slow.calls) == 2 + 2 * 4


@pytest.mark.parametrize("is_draft", [False, True])
@pytest.mark.parametrize("kind", ["gdn", "kda"])
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_real_kernels_take_what_they_are_given(kind: str, backend: str, is_draft: bool) -> None:
    names = KernelNames(
        matmul="reference",
        attention={},
        is_latent=False,
        delta=dict.fromkeys(Phase, backend),
        moe=None,
        sampling="reference",
    )
    costs = measure_rollback(case_of(spec(kind), draft_tokens=2, is_draft=is_draft), bind(names, None), F32)
    assert costs.replay > 0 and costs.states > 0
