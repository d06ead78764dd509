"""Pages, lengths, threads: expected numbers are computed here from the shapes, not by the code under test."""

from __future__ import annotations

import re
from dataclasses import replace
from math import ceil, prod
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proa.choice import AUTO, Choice, Origin, OriginSource
from proa.conditions import Source
from proa.config.intent import CacheIntent
from proa.errors import CacheExhausted, PlanError
from proa.plan.decision import Decision
from proa.plan.rules.memory import RunnerSize, memory
from proa.plan.rules.states import StateSize
from proa.units import Role
from tests.factories.checkpoints import tensor_shapes, tiny_config
from tests.factories.headers import GPU_HOST, LAPTOP, planned, write_headers, write_tiny_headers

GIB = 2**30
STATELESS = StateSize(slot_bytes=0, slots=0, row_bytes=0, rows=0)


def requests(count: int) -> Decision[int]:
    return Decision(knob="max_num_seqs", value=count, requested=AUTO, source=Source.DEFAULT, rule="test", reason="test")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """3 layers, 2 kv heads of 16: a page of 16 float32 rows takes 3 * 2*2*16 * 16 * 4 = 12288 bytes."""
    return write_tiny_headers(tmp_path_factory.mktemp("memory") / "llama", "llama")


PAGE = 3 * (2 * 2 * 16) * 16 * 4


def test_the_bytes_are_those_of_the_stored_tensors_and_of_the_kv_rows(llama: Path) -> None:
    plan = planned(llama).plans.memory
    weights = sum(prod(shape) for _, shape in tensor_shapes(tiny_config("llama"))) * 4
    assert plan.weights_bytes == {"target": weights}
    assert plan.page_bytes == {"target": PAGE}


def test_a_step_reads_one_row_of_the_embedding_and_the_routed_experts(tmp_path: Path) -> None:
    """glm4_moe, untied: all stored tensors but the other rows of the embedding and the experts beyond top_k."""
    config = tiny_config("glm4_moe", num_nextn_predict_layers=0)
    read = 0
    for name, shape in tensor_shapes(config):
        expert = re.search(r"\.experts\.(\d+)\.", name)
        if name == "model.embed_tokens.weight":
            read += shape[1]
        elif expert is None or int(expert[1]) < config["num_experts_per_tok"]:
            read += prod(shape)
    memory_plan = planned(write_headers(tmp_path / "glm", config, dtype="F32")).plans.memory
    assert memory_plan.step_bytes == {"target": 4 * read}


def test_a_small_model_gets_pages_for_every_request_at_full_length_and_no_more(llama: Path) -> None:
    plans = planned(llama).plans
    assert plans.memory.target_pages.value == 32 * (1024 // 16)
    assert plans.memory.draft_pages.value == 0
    assert plans.memory.target_pages.rule == "memory.enough"
    assert (plans.schedule.max_model_len.value, plans.schedule.max_num_seqs.value) == (1024, 32)
    assert plans.schedule.prefill_chunk.value == 512


def test_a_draft_gets_pages_for_the_same_tokens_and_its_proposals(llama: Path) -> None:
    memory_plan = planned(llama, draft=llama, num_draft_tokens=3).plans.memory
    assert memory_plan.target_pages.value == 32 * 64
    assert memory_plan.draft_pages.value == 32 * ceil((1024 + 3) / 16)


def test_kv_memory_bounds_both_pools_together(llama: Path) -> None:
    plans = planned(llama, draft=llama, kv_memory="1MiB", num_draft_tokens=1, max_num_seqs=4).plans
    target, draft = plans.memory.target_pages.value, plans.memory.draft_pages.value
    assert plans.memory.target_pages.source is Source.ASKED
    assert (target + draft) * PAGE <= 2**20 < (target + draft + 2) * PAGE
    assert draft * 16 >= target * 16 + 4


def test_pages_are_capped_at_4_gib_unless_asked_otherwise(tmp_path: Path) -> None:
    model = write_tiny_headers(tmp_path / "m", "llama", max_position_embeddings=10**7)
    plan = planned(model).plans
    assert plan.memory.target_pages.value == 4 * GIB // PAGE
    assert (plan.memory.target_pages.rule, plan.memory.target_pages.source) == ("memory.auto_cap", Source.DEFAULT)
    assert plan.schedule.max_model_len.value == 4 * GIB // PAGE * 16
    assert plan.schedule.max_model_len.source is Source.HARDWARE


def test_pages_leave_the_weights_and_a_reserve_free(tmp_path: Path) -> None:
    model = write_tiny_headers(tmp_path / "m", "llama", max_position_embeddings=10**7)
    plan = planned(model, caps=replace(LAPTOP, memory_available=2 * GIB)).plans.memory
    weights = plan.weights_bytes["target"]
    reserve = (2 * GIB - weights) // 4
    assert plan.target_pages.value == (2 * GIB - weights - reserve) // PAGE
    assert (plan.target_pages.rule, plan.target_pages.source) == ("memory.free", Source.HARDWARE)


def test_a_gpu_plan_counts_the_gpus_memory(llama: Path) -> None:
    caps = replace(GPU_HOST, memory_available=1)
    assert planned(llama, caps=caps).plans.memory.target_pages.inputs["caps.memory_available"] == 140 * GIB
    with pytest.raises(CacheExhausted):
        planned(llama, caps=caps, device="cpu")


def test_unknown_free_memory_counts_as_half_of_all(llama: Path) -> None:
    caps = replace(LAPTOP, memory_available=None)
    assert planned(llama, caps=caps).plans.memory.target_pages.inputs["caps.memory_available"] == 8 * GIB


def test_weights_that_do_not_fit_are_an_error_with_exit_code_4(llama: Path) -> None:
    with pytest.raises(CacheExhausted, match="the weights take") as caught:
        planned(llama, caps=replace(LAPTOP, memory_available=1000))
    assert (caught.value.slug, caught.value.exit_code) == ("memory/weights-do-not-fit", 4)


def test_memory_for_less_than_one_page_is_an_error_naming_the_ask(llama: Path) -> None:
    with pytest.raises(CacheExhausted, match="--kv-memory") as caught:
        planned(llama, flags={"--kv-memory": "4096"})
    assert caught.value.slug == "memory/no-page"


def test_more_kv_memory_than_is_free_is_the_askers_business_and_noted(tmp_path: Path) -> None:
    model = write_tiny_headers(tmp_path / "m", "llama", max_position_embeddings=10**7)
    pages = planned(model, kv_memory="20GiB").plans.memory.target_pages
    assert [note.condition for note in pages.notes] == ["memory.within_free"]
    assert planned(model, kv_memory="1GiB").plans.memory.target_pages.notes == ()


def test_a_length_beyond_the_trained_one_is_an_error_naming_both(llama: Path) -> None:
    with pytest.raises(PlanError, match="2048 is more than the 1024 positions") as caught:
        planned(llama, flags={"--max-model-len": "2048"})
    assert "--max-model-len" in str(caught.value)


def test_an_asked_length_that_the_pages_cannot_hold_is_an_error_naming_both(llama: Path) -> None:
    with pytest.raises(CacheExhausted, match="max_model_len = 1000") as caught:
        planned(llama, max_model_len=1000, kv_memory=PAGE * 10)
    assert caught.value.slug == "memory/length-does-not-fit" and "160 tokens" in str(caught.value)


def test_an_asked_length_within_both_is_taken(llama: Path) -> None:
    plans = planned(llama, max_model_len=100, max_num_seqs=2, prefill_chunk=7).plans
    assert (plans.schedule.max_model_len.value, plans.schedule.prefill_chunk.value) == (100, 7)
    assert plans.memory.target_pages.value == 2 * ceil(100 / 16)


def test_threads_are_the_usable_cores_and_more_of_them_are_noted(llama: Path) -> None:
    auto, less, more = (planned(llama, **ask).plans.host.threads for ask in ({}, {"threads": 2}, {"threads": 64}))
    assert (auto.value, auto.source, less.value, more.value) == (4, Source.HARDWARE, 2, 64)
    assert (auto.notes, less.notes) == ((), ())
    assert "64 threads on 4 usable cores" in more.notes[0].reason


@settings(deadline=None, max_examples=200)
@given(
    budget=st.integers(1, 10**7),
    pages=st.tuples(st.integers(1, 64), st.integers(1, 64)),
    row=st.tuples(st.integers(1, 100), st.integers(1, 100)),
    seqs=st.integers(1, 8),
    slack=st.integers(0, 9),
)
def test_any_budget_is_kept_and_used_and_both_runners_hold_the_same_tokens(
    budget: int, pages: tuple[int, int], row: tuple[int, int], seqs: int, slack: int
) -> None:
    sizes = [
        RunnerSize(
            role=role,
            weights_bytes=0,
            step_bytes=0,
            page_bytes=row[i] * pages[i],
            page_size=pages[i],
            slack=slack * i,
            states=STATELESS,
        )
        for i, role in enumerate((Role.TARGET, Role.DRAFT))
    ]
    ask = CacheIntent(memory_bytes=Choice(value=budget, origin=Origin(source=OriginSource.API)))
    facts = {"caps.memory_bytes": 2**40, "caps.memory_available": 2**40}
    try:
        _, plan = memory(ask, sizes, requests(seqs), 10**9, 0, facts)
    except CacheExhausted:
        one_page = seqs * slack + pages[0]
        assert (
            ceil(pages[0] / pages[0]) * sizes[0].page_bytes + ceil(one_page / pages[1]) * sizes[1].page_bytes > budget
        )
        return
    target, draft = plan.target_pages.value, plan.draft_pages.value
    assert target * sizes[0].page_bytes + draft * sizes[1].page_bytes <= budget
    assert draft * pages[1] >= target * pages[0] + seqs * slack
    more = (target + 1) * sizes[0].page_bytes + ceil(((target + 1) * pages[0] + seqs * slack) / pages[1]) * sizes[
        1
    ].page_bytes
    assert more > budget


def test_auto_memory_is_the_least_of_its_three_bounds() -> None:
    size = RunnerSize(
        role=Role.TARGET,
        weights_bytes=GIB,
        step_bytes=GIB,
        page_bytes=2**20,
        page_size=16,
        slack=0,
        states=STATELESS,
    )

    def pages(seqs: int, facts: dict[str, int], hidden: int = 0) -> int:
        return memory(CacheIntent(), [size], requests(seqs), 16, hidden, facts)[1].target_pages.value

    free = {"caps.memory_bytes": 64 * GIB, "caps.memory_available": 3 * GIB}
    assert pages(1, free) == 1
    assert pages(10**6, free) == (2 * GIB - GIB // 2) // 2**20
    assert pages(10**6, free | {"caps.memory_available": 60 * GIB}) == 4096
    # Beside a row of 64 KiB hidden rows of 16 KiB may wait for a draft: a fifth of what is free is theirs.
    assert pages(10**6, free, 2**14) == (2 * GIB - GIB // 2) * 4 // 5 // 2**20
    assert pages(10**6, free | {"caps.memory_available": 60 * GIB}, 2**14) == 4096
