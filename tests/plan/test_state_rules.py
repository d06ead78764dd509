"""Slots for states, snapshots, rollback and prefill alignment. Expected bytes are computed here from the shapes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from proa.conditions import Source
from proa.errors import CacheExhausted, PlanError
from proa.kernels.rollback import RollbackCosts
from proa.plan.explain import explain_json, explain_table
from proa.plan.rules.states import StateSize
from proa.plan.runner_plan import PlanSet
from proa.units import DType, Rollback
from tests.factories.headers import LAPTOP, SERVER, planned, write_tiny_headers
from tests.plan.hybrid_headers import SM100, WIDE, write_hybrid_headers

GIB = 2**30
# qwen3_next: 3 layers of GDN; 2 key heads of 16, 4 value heads of 24, 4 taps; bfloat16.
CHANNELS = 2 * 2 * 16 + 4 * 24
CONV, STATE = 3 * CHANNELS * 2, 4 * 16 * 24 * 4
SLOT = 3 * (CONV + STATE)
KEPT = 3 * (CHANNELS + 4 + 4) * 2  # q, k, v, b and a of a row


@pytest.fixture(scope="module")
def gdn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hybrid_headers(tmp_path_factory.mktemp("states") / "gdn", "qwen3_next")


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_headers(tmp_path_factory.mktemp("states") / "dense", "llama", dtype="BF16")


def plans_of(model: Path, **settings: Any) -> PlanSet:
    return planned(model, **settings).plans


def slots(plans: PlanSet, role: str = "target") -> tuple[int, int, int]:
    memory = plans.memory
    return memory.state_slots[role].value, memory.snapshot_slots[role].value, memory.kept_rows[role]


# slots


def test_a_running_request_has_a_committed_and_a_tentative_state(gdn: Path) -> None:
    plans = plans_of(gdn, max_num_seqs=5)
    assert plans.memory.state_bytes == {"target": SLOT}
    assert slots(plans) == (10, 16, 0)
    assert plans.memory.state_slots["target"].reason == "2 per running request"


def test_with_proposals_the_inputs_of_all_verified_rows_are_kept_too(gdn: Path) -> None:
    plans = plans_of(gdn, max_num_seqs=5, speculative="ngram", num_draft_tokens=3)
    assert slots(plans) == (10, 16, 5 * 4)


def test_states_of_all_rows_take_a_slot_per_row_and_keep_no_inputs(gdn: Path) -> None:
    plans = plans_of(gdn, max_num_seqs=5, speculative="ngram", num_draft_tokens=3, rollback="states")
    assert slots(plans) == (5 * (1 + 4), 16, 0)
    assert plans.target.rollback.source is Source.ASKED


def test_a_state_of_half_the_width_takes_half_the_bytes(tmp_path: Path) -> None:
    model = write_hybrid_headers(tmp_path / "m", "qwen3_next", **WIDE)
    conv, elements = 3 * (4 * 128 + 4 * 128) * 2, 4 * 128 * 128
    for state, size in (("float32", 4), ("bfloat16", 2)):
        plans = plans_of(model, caps=SM100, state_dtype=state)
        assert plans.memory.state_bytes["target"] == 3 * (conv + elements * size)


def test_models_without_linear_attention_have_no_slots(dense: Path) -> None:
    plans = plans_of(dense)
    assert slots(plans) == (0, 0, 0)
    assert plans.memory.state_slots["target"].reason == "0 linear-attention layers"
    assert plans.memory.state_bytes == {"target": 0}


def test_each_runner_has_slots_of_its_own_size(gdn: Path, dense: Path) -> None:
    plans = plans_of(gdn, draft=dense, max_num_seqs=4, num_draft_tokens=2)
    assert (slots(plans), slots(plans, "draft")) == ((8, 16, 12), (0, 0, 0))
    reverse = plans_of(dense, draft=gdn, max_num_seqs=4, num_draft_tokens=2)
    assert (slots(reverse), slots(reverse, "draft")) == ((0, 0, 0), (8, 16, 12))


def test_states_come_before_pages_and_pages_take_what_is_left(tmp_path: Path) -> None:
    model = write_hybrid_headers(tmp_path / "m", "qwen3_next", max_position_embeddings=10**7)
    caps = replace(LAPTOP, memory_available=64 * 2**20)
    memory = plans_of(model, caps=caps, max_num_seqs=100).memory
    weights, page = memory.weights_bytes["target"], memory.page_bytes["target"]
    free = 64 * 2**20 - weights
    states = 200 * SLOT + memory.snapshot_slots["target"].value * SLOT
    assert memory.target_pages.value == (free - free // 4 - states) // page
    assert "of states" in memory.target_pages.reason


def test_fewer_requests_run_where_the_states_of_all_do_not_fit_and_the_plan_says_so(gdn: Path) -> None:
    weights = plans_of(gdn).memory.weights_bytes["target"]
    caps = replace(LAPTOP, memory_available=weights + 40 * SLOT * 4 // 3)  # a quarter of what is free is the reserve
    plans = plans_of(gdn, caps=caps)
    seqs = plans.schedule.max_num_seqs
    assert (seqs.value, seqs.source, seqs.rule) == (10, Source.HARDWARE, "max_num_seqs.states")
    assert slots(plans)[:2] == (20, 5)  # snapshots take a quarter of the rest
    assert plans.memory.snapshot_slots["target"].reason.endswith("take a quarter of what is left")
    assert plans.digest == plans_of(gdn).digest


def test_an_ask_for_more_requests_than_have_room_for_states_is_an_error_naming_it(gdn: Path) -> None:
    weights = plans_of(gdn).memory.weights_bytes["target"]
    caps = replace(LAPTOP, memory_available=weights + 40 * SLOT * 4 // 3)
    assert plans_of(gdn, caps=caps, max_num_seqs=19).schedule.max_num_seqs.value == 19
    with pytest.raises(CacheExhausted, match="21 requests were asked for") as caught:
        planned(gdn, caps=caps, flags={"--max-num-seqs": "21"})
    assert caught.value.slug == "memory/states-do-not-fit" and "--max-num-seqs 20" in str(caught.value)


def test_a_host_without_room_for_one_requests_states_is_refused(gdn: Path) -> None:
    weights = plans_of(gdn).memory.weights_bytes["target"]
    with pytest.raises(CacheExhausted, match="the states of one request take") as caught:
        planned(gdn, caps=replace(LAPTOP, memory_available=weights + SLOT))
    assert (caught.value.slug, caught.value.exit_code) == ("memory/states-do-not-fit", 4)


@pytest.mark.parametrize("count", [0, 3, 100])
def test_the_number_of_snapshots_can_be_asked_for_and_is_that_of_both_runners(gdn: Path, count: int) -> None:
    plans = plans_of(gdn, draft=gdn, snapshots=count)
    assert {d.value for d in plans.memory.snapshot_slots.values()} == {count}
    assert {d.source for d in plans.memory.snapshot_slots.values()} == {Source.ASKED}


def test_kept_inputs_count_as_memory(gdn: Path) -> None:
    for draft_tokens, rollback, expected in ((3, Rollback.REPLAY, 2 * SLOT + 4 * KEPT), (3, Rollback.STATES, 5 * SLOT)):
        assert StateSize.of(SLOT, KEPT, rollback, draft_tokens).nbytes == expected
    assert StateSize.of(SLOT, KEPT, Rollback.STATES, 0).nbytes == StateSize.of(SLOT, KEPT, Rollback.REPLAY, 0).nbytes
    assert StateSize.of(0, 0, None, 3).nbytes == 0
    reads = plans_of(gdn, speculative="ngram", num_draft_tokens=3).memory.state_slots["target"].inputs
    assert reads["memory.state_bytes"] == {"target": 2 * SLOT + 4 * KEPT}


def test_explain_shows_slots_and_their_bytes(gdn: Path) -> None:
    plans = plans_of(gdn, draft=gdn, max_num_seqs=5)
    shown = explain_json(plans, {})
    assert shown["memory"]["state_bytes"] == {"target": SLOT, "draft": SLOT}
    assert shown["engine"]["memory.draft_state_slots"]["value"] == 10
    assert shown["engine"]["memory.target_snapshot_slots"]["value"] == 16
    (line,) = [line for line in explain_table(plans).splitlines() if line.startswith("memory ")]
    assert line.count("10+16 states") == 2


# the type of states


def test_states_are_float32_unless_asked_otherwise(gdn: Path, dense: Path) -> None:
    assert (plans_of(gdn).target.state_dtype.value, plans_of(dense).target.state_dtype.value) == (DType.F32, None)
    assert plans_of(dense).target.state_dtype.reason == "0 linear-attention layers"
    with pytest.raises(PlanError, match="0 linear-attention layers"):
        planned(dense, flags={"--target.state-dtype": "float32"})


# rollback


DRAFTED = {"speculative": "ngram", "num_draft_tokens": 3, "threads": 2}
# 3 layers of GDN as above, on a host without a compiler.
CASE = (
    "3 x keys 2x16, values 4x24, 4 taps, decay by head; decode torch; verify torch; bfloat16, states float32; "
    "3 tokens verified; threads 2"
)
FASTER = RollbackCosts(replay=0.002, states=0.001)


def test_a_rejected_proposal_is_undone_by_replay_unless_states_were_measured_to_be_faster(gdn: Path) -> None:
    auto = plans_of(gdn, **DRAFTED).target.rollback
    assert (auto.value, auto.source) == (Rollback.REPLAY, Source.DEFAULT)
    assert "nobody has measured" in auto.reason
    slower = {CASE: RollbackCosts(replay=0.001, states=0.002)}
    kept = plans_of(gdn, rollbacks=slower, **DRAFTED).target.rollback
    assert (kept.value, kept.source, kept.rule) == (Rollback.REPLAY, Source.HARDWARE, "rollback.faster")
    assert kept.reason == "measured: 1 ms a step with replay, 2 ms with states of all rows"
    changed = plans_of(gdn, rollbacks={CASE: FASTER}, **DRAFTED).target.rollback
    assert (changed.value, changed.source) == (Rollback.STATES, Source.HARDWARE)
    assert changed.reason == "measured: 2 ms a step with replay, 1 ms with states of all rows"
    assert changed.inputs["measured.rollback"] == {"replay": 0.002, "states": 0.001}


def test_a_difference_that_may_be_the_measurement_s_own_is_none(gdn: Path) -> None:
    near = {CASE: RollbackCosts(replay=0.001, states=0.00096)}
    assert plans_of(gdn, rollbacks=near, **DRAFTED).target.rollback.value is Rollback.REPLAY
    far = {CASE: RollbackCosts(replay=0.001, states=0.00094)}
    assert plans_of(gdn, rollbacks=far, **DRAFTED).target.rollback.value is Rollback.STATES


@pytest.mark.parametrize(
    "other",
    [{"num_draft_tokens": 4}, {"threads": 1}, {"linear_attention": "reference"}, {"dtype": "float32"}],
)
def test_what_was_measured_of_another_case_says_nothing_of_this_one(gdn: Path, other: dict[str, Any]) -> None:
    auto = plans_of(gdn, rollbacks={CASE: FASTER}, **{**DRAFTED, **other}).target.rollback
    assert auto.value is Rollback.REPLAY and "nobody has measured" in auto.reason


def test_a_draft_is_measured_as_a_draft(gdn: Path) -> None:
    asks = {"draft": gdn, "num_draft_tokens": 3, "threads": 2}
    both = plans_of(gdn, rollbacks={CASE: FASTER}, **asks)
    assert (both.target.rollback.value, both.draft.rollback.value) == (Rollback.STATES, Rollback.REPLAY)
    drafted = {CASE.replace("verified", "drafted"): FASTER}
    both = plans_of(gdn, rollbacks=drafted, **asks)
    assert (both.target.rollback.value, both.draft.rollback.value) == (Rollback.REPLAY, Rollback.STATES)


def test_states_of_all_rows_are_not_taken_where_they_would_crowd_out_requests(gdn: Path) -> None:
    each = 5 * SLOT  # a committed state and those of 4 rows
    for seqs, room in ((10, True), (11, False)):
        caps = replace(LAPTOP, memory_available=8 * 10 * each)
        found = plans_of(gdn, caps=caps, rollbacks={CASE: FASTER}, max_num_seqs=seqs, **DRAFTED).target.rollback
        assert (found.value is Rollback.STATES) == room
    assert (found.rule, found.source) == ("rollback.room", Source.HARDWARE)
    assert "more than one part in 8" in found.reason


def test_what_was_measured_is_in_no_digest(gdn: Path) -> None:
    measured, plain = plans_of(gdn, rollbacks={CASE: FASTER}, **DRAFTED), plans_of(gdn, **DRAFTED)
    assert measured.target.rollback.value is not plain.target.rollback.value
    assert (measured.digest, measured.target.digest) == (plain.digest, plain.target.digest)
    assert plans_of(gdn, rollback="states", **DRAFTED).target.digest != plain.target.digest


def test_an_ask_for_a_rollback_is_taken_and_of_a_dense_model_says_that_it_does_not_apply(
    gdn: Path, dense: Path
) -> None:
    assert plans_of(gdn, rollback="replay").target.rollback.inputs == {}
    assert plans_of(dense, rollback="states").target.rollback.value is None
    plans = plans_of(gdn, draft=gdn, flags={"--draft.rollback": "states"})
    assert plans.draft is not None
    assert (plans.target.rollback.value, plans.draft.rollback.value) == (Rollback.REPLAY, Rollback.STATES)


# alignment


def test_chunks_end_at_blocks_where_any_runner_has_linear_attention(gdn: Path, dense: Path) -> None:
    assert plans_of(dense).schedule.prefill_alignment.value == 1
    for plans in (plans_of(gdn), plans_of(gdn, draft=dense), plans_of(dense, draft=gdn)):
        aligned = plans.schedule.prefill_alignment
        assert (aligned.value, aligned.source) == (64, Source.CHECKPOINT)
        assert plans.schedule.prefill_chunk.value == 512


@pytest.mark.parametrize(("asked", "value"), [(64, 64), (128, 128), (100, 64), (63, 64), (7, 64), (1000, 960)])
def test_an_asked_chunk_is_rounded_to_whole_blocks_with_the_reason(gdn: Path, asked: int, value: int) -> None:
    for settings in ({}, {"linear_attention": "reference"}):
        chunk = plans_of(gdn, prefill_chunk=asked, **settings).schedule.prefill_chunk
        assert (chunk.value, chunk.requested.value) == (value, asked)
        if asked == value:
            assert chunk.source is Source.ASKED
        else:
            assert chunk.source is Source.CONSTRAINT
            assert chunk.reason == f"chunks end at multiples of 64 tokens here, so {asked} become {value}"


@pytest.mark.parametrize("asked", [1, 7, 100])
def test_without_linear_attention_any_chunk_is_taken(dense: Path, asked: int) -> None:
    chunk = plans_of(dense, prefill_chunk=asked).schedule.prefill_chunk
    assert (chunk.value, chunk.source) == (asked, Source.ASKED)


def test_the_alignment_is_part_of_the_plans_digest(gdn: Path, dense: Path) -> None:
    plain, hybrid = plans_of(dense, draft=dense, caps=SERVER), plans_of(dense, draft=gdn, caps=SERVER)
    assert plain.target.digest == hybrid.target.digest and plain.digest != hybrid.digest
