"""Every rule of one runner as a table: (headers, host, ask) -> value, source, rule, reason, facts, or the error."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType

from proa.conditions import Source
from proa.errors import KernelUnavailable, PlanError
from proa.kernels.caps import DeviceCaps
from proa.plan.decision import Decision
from proa.plan.ranks import refuse_more_ranks
from proa.units import DType, Numerics
from tests.factories.checkpoints import tiny_config
from tests.factories.gguf_files import write_block_gguf
from tests.factories.headers import GPU_HOST, LAPTOP, planned, write_headers, write_tiny_headers


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_headers(tmp_path_factory.mktemp("rules") / "llama", "llama")


def decided(model: Path, knob: str, caps: DeviceCaps = LAPTOP, **settings: Any) -> Decision[Any]:
    return planned(model, caps=caps, **settings).plans.target.decisions()[knob]


# device


@pytest.mark.parametrize(
    ("caps", "value", "source"), [(LAPTOP, "cpu", Source.HARDWARE), (GPU_HOST, "cuda", Source.HARDWARE)]
)
def test_auto_takes_cuda_where_it_can_be_used(llama: Path, caps: DeviceCaps, value: str, source: Source) -> None:
    decision = decided(llama, "device", caps)
    assert (decision.value, decision.source) == (value, source)
    assert set(decision.inputs) == {"caps.device"} | ({"caps.no_cuda"} if value == "cpu" else set())


def test_an_ask_for_cuda_without_one_says_why_and_exits_with_4(llama: Path) -> None:
    with pytest.raises(KernelUnavailable, match="no CUDA device or driver") as caught:
        planned(llama, flags={"--device": "cuda"})
    assert (caught.value.slug, caught.value.exit_code) == ("plan/kernel-unavailable", 4)
    assert "--device" in str(caught.value) and "can run: cpu, meta" not in str(caught.value)
    assert "can run: cpu" in str(caught.value)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_an_ask_for_cpu_or_meta_is_taken_on_every_host(llama: Path, device: str) -> None:
    decision = decided(llama, "device", GPU_HOST, device=device)
    assert (decision.value, decision.source, decision.rejected) == (device, Source.ASKED, ())
    assert (len(decision.notes) == 1) is (device == "meta")


# dtype, quantization, kv_dtype


@pytest.mark.parametrize(
    ("stored", "value", "source", "says"),
    [
        ("F32", DType.F32, Source.CHECKPOINT, "float32"),
        ("BF16", DType.BF16, Source.CHECKPOINT, "bfloat16"),
        ("F16", DType.BF16, Source.HARDWARE, "fp16 is not a CPU compute dtype"),
        ("F64", DType.F32, Source.CHECKPOINT, "float64"),
    ],
)
def test_the_stored_type_decides_the_compute_type(
    tmp_path: Path, stored: str, value: DType, source: Source, says: str
) -> None:
    decision = decided(write_tiny_headers(tmp_path / "m", "llama", dtype=stored), "dtype")
    assert (decision.value, decision.source, decision.notes) == (value, source, ())
    assert says in decision.reason and "stored.bytes" in decision.inputs


def test_fp16_lists_float16_as_rejected(tmp_path: Path) -> None:
    decision = decided(write_tiny_headers(tmp_path / "m", "llama", dtype="F16"), "dtype")
    assert [(r.value, r.rule) for r in decision.rejected] == [(DType.F16, "dtype.no_fp16")]


def test_mixed_types_go_with_the_majority_of_bytes_and_say_so(tmp_path: Path) -> None:
    norms = {"model.norm.weight": "F32", "model.layers.0.input_layernorm.weight": "F32"}
    model = write_headers(tmp_path / "m", tiny_config("llama"), dtype="BF16", dtypes=norms)
    decision = decided(model, "dtype")
    assert decision.value is DType.BF16
    assert [note.condition for note in decision.notes] == ["dtype.mixed"]
    assert "float32" in decision.notes[0].reason and "%" in decision.notes[0].reason


@pytest.mark.parametrize("value", [DType.F32, DType.BF16])
def test_an_asked_compute_type_is_taken_and_reads_no_fact(llama: Path, value: DType) -> None:
    decision = decided(llama, "dtype", flags={"--dtype": value.value})
    assert (decision.value, decision.source, decision.reason, decision.inputs) == (value, Source.ASKED, "asked", {})


def test_blocks_are_dequantised_and_the_plan_counts_them(blocks: Path) -> None:
    dtype, format_ = decided(blocks, "dtype"), decided(blocks, "quantization")
    assert (dtype.value, dtype.source) == (DType.BF16, Source.CHECKPOINT)
    assert "q8_0 blocks are computed with in bfloat16" in dtype.reason
    assert format_.value == "none" and "q8_0 blocks (1 tensor)" in format_.reason and "on load" in format_.reason
    assert [r.rule for r in format_.rejected] == ["quantization.kernels", "quantization.vnni"]


def test_an_ask_to_keep_blocks_is_refused_and_an_ask_for_none_is_taken(blocks: Path, llama: Path) -> None:
    with pytest.raises(KernelUnavailable, match="quantization = q8_0"):
        planned(blocks, quantization="q8_0")
    assert decided(blocks, "quantization", quantization="none").source is Source.ASKED
    with pytest.raises(PlanError, match="quantization = fp8") as caught:
        planned(llama, quantization="fp8")
    assert caught.value.slug == "plan/unknown-value"


def test_the_cache_has_the_compute_type_unless_asked_otherwise(llama: Path) -> None:
    assert decided(llama, "kv_dtype", dtype="bfloat16").value is DType.BF16
    asked = decided(llama, "kv_dtype", dtype="bfloat16", kv_dtype="float32")
    assert (asked.value, asked.source) == (DType.F32, Source.ASKED)


# kernels and numerics


@pytest.mark.parametrize("knob", ["attention.prefill", "attention.decode", "attention.verify", "matmul_kernel"])
def test_auto_takes_reference_and_says_what_stands_against_every_better_kernel(llama: Path, knob: str) -> None:
    decision = decided(llama, knob)
    assert decision.value == "reference"
    assert {r.value for r in decision.rejected} == {"native", "onednn", "flashinfer", "triton"}
    assert decision.reason == decision.rejected[0].reason
    assert {"kernel.triton.absent", "kernel.triton.device"} <= {r.rule for r in decision.rejected}


@pytest.mark.parametrize("backend", ["native", "onednn", "triton", "flashinfer"])
def test_an_ask_for_an_absent_backend_says_what_can_run_and_exits_with_4(llama: Path, backend: str) -> None:
    with pytest.raises(KernelUnavailable) as caught:
        planned(llama, flags={"--attention.decode": backend})
    text = str(caught.value)
    assert caught.value.exit_code == 4
    assert f"target: attention.decode = {backend} was asked for (--attention.decode) but cannot run here." in text
    assert "have: cpu, avx2 fma" in text and "can run: reference." in text


def test_an_ask_of_the_draft_alone_leaves_the_target_unaffected_and_says_so(llama: Path) -> None:
    with pytest.raises(KernelUnavailable) as caught:
        planned(llama, draft=llama, flags={"--draft.attention.prefill": "triton"})
    text = str(caught.value)
    assert "draft: attention.prefill = triton was asked for (--draft.attention.prefill)" in text
    assert "The target is unaffected" in text


def test_an_unknown_kernel_names_the_known_ones(llama: Path) -> None:
    with pytest.raises(PlanError, match="known: native, onednn, flashinfer, triton, reference") as caught:
        planned(llama, matmul_kernel="cutlass")
    assert caught.value.slug == "plan/unknown-value"


def test_a_failed_self_test_leaves_no_kernel_and_is_named(llama: Path) -> None:
    caps = replace(LAPTOP, kernels={"reference": "failed: max error 3.0"})
    with pytest.raises(KernelUnavailable, match="self-test failed: max error 3.0"):
        planned(llama, caps=caps)


def test_numerics_are_fast_with_a_reason_and_an_ask_for_exact_is_an_error(llama: Path) -> None:
    decision = decided(llama, "numerics")
    assert (decision.value, decision.source) == (Numerics.FAST, Source.HARDWARE)
    assert "row-invariant" in decision.reason
    assert decided(llama, "numerics", numerics="fast").source is Source.ASKED
    with pytest.raises(KernelUnavailable, match="numerics = exact"):
        planned(llama, numerics="exact")


# blocks that dense models lack


ABSENT = {
    "linear_attention.prefill": "0 linear-attention layers",
    "linear_attention.decode": "0 linear-attention layers",
    "linear_attention.verify": "0 linear-attention layers",
    "moe_kernel": "0 MoE layers",
    "shared_experts": "no shared experts",
}


@pytest.mark.parametrize(("knob", "reason"), ABSENT.items())
def test_a_block_that_the_model_lacks_does_not_apply(llama: Path, knob: str, reason: str) -> None:
    decision = decided(llama, knob)
    assert (decision.value, decision.source, decision.reason) == (None, Source.CHECKPOINT, reason)


@pytest.mark.parametrize(
    ("flag", "value", "knob"),
    [
        ("--linear-attention", "native", "linear_attention.verify"),
        ("--moe-kernel", "native", "moe_kernel"),
        ("--shared-experts", "fused", "shared_experts"),
    ],
)
def test_an_ask_that_names_no_runner_stays_as_a_note_where_it_does_not_apply(
    llama: Path, flag: str, value: str, knob: str
) -> None:
    decision = decided(llama, knob, flags={flag: value})
    assert decision.value is None
    assert flag in decision.notes[0].reason and value in decision.notes[0].reason


@pytest.mark.parametrize(
    "flag", ["--target.linear-attention.decode", "--target.moe-kernel", "--target.linear-attention"]
)
def test_an_ask_that_names_the_runner_is_an_error_where_it_does_not_apply(llama: Path, flag: str) -> None:
    with pytest.raises(PlanError, match=flag) as caught:
        planned(llama, flags={flag: "native"})
    assert caught.value.slug == "plan/does-not-apply"


# head, ranks, page size


@pytest.mark.parametrize(
    ("tied", "stored", "value", "rule"),
    [
        (True, True, "tied", "head.tied_copy"),
        (True, False, "tied", "head.tied"),
        (False, True, "own", "head.own"),
        (False, False, "own", "head.missing"),
    ],
)
def test_the_head_follows_the_flag_and_what_is_stored(
    tmp_path: Path, tied: bool, stored: bool, value: str, rule: str
) -> None:
    head = {"lm_head.weight": (512, 64)} if stored else {}
    config = tiny_config("llama", tie_word_embeddings=tied)
    model = write_headers(tmp_path / "m", config, add=head, drop=() if stored else ("lm_head.weight",))
    resolved = planned(model)
    decision = resolved.plans.target.head
    assert (decision.value, decision.rule, decision.source) == (value, rule, Source.CHECKPOINT)
    assert set(decision.inputs) == {"spec.tied_head", "checkpoint.has_head", "checkpoint.form"}
    assert resolved.plans.target.layout.tied_head is (value == "tied")
    assert ("head.weight" in resolved.target.parameters) is (value == "own")


@pytest.mark.parametrize("flag", ["--tensor-parallel", "--expert-parallel"])
def test_more_than_one_rank_is_planned_with_a_note_and_refused_by_name_before_it_is_built(
    llama: Path, flag: str
) -> None:
    assert decided(llama, "parallel").value == "tp=1 ep=1"
    one = planned(llama, flags={flag: "1"}).plans.target
    assert (one.parallel.source, one.parallel.notes) == (Source.ASKED, ())
    refuse_more_ranks(one)
    plan = planned(llama, flags={flag: "2"}).plans.target
    assert plan.parallel.value == ("tp=2 ep=1" if "tensor" in flag else "tp=1 ep=2")
    assert [note.condition for note in plan.parallel.notes] == ["parallel.one_rank"]
    with pytest.raises(KernelUnavailable, match=flag) as caught:
        refuse_more_ranks(plan)
    assert (caught.value.slug, caught.value.exit_code) == ("plan/more-ranks", 4)


def test_both_rank_flags_are_looked_at(llama: Path) -> None:
    plan = planned(llama, flags={"--tensor-parallel": "1", "--expert-parallel": "4"}).plans.target
    assert plan.parallel.value == "tp=1 ep=4"
    with pytest.raises(KernelUnavailable, match="one rank"):
        refuse_more_ranks(plan)


def test_a_page_has_16_rows_unless_asked_otherwise(llama: Path) -> None:
    assert decided(llama, "page_size").value == 16
    assert (decided(llama, "page_size", page_size=4).value, decided(llama, "page_size", page_size=4).source) == (
        4, Source.ASKED,
    )  # fmt: skip


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF whose embedding is stored in Q8_0 blocks; the rest is float32."""
    formats = {"token_embd": GGMLQuantizationType.Q8_0}
    return write_block_gguf(tmp_path_factory.mktemp("blocks") / "m.gguf", formats)


def test_a_gguf_without_an_output_matrix_ties_its_head(blocks: Path) -> None:
    assert decided(blocks, "head").value == "tied"
