"""Which kernel runs linear attention in each phase, by whose word (rows F25-F28 and F32 of the feature table)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest

from proa.conditions import Blocks, FactView, Source
from proa.errors import KernelUnavailable, PlanError
from proa.kernels.caps import DeviceCaps
from proa.kernels.catalog import kernels_for
from proa.kernels.nvml import Gpu
from proa.plan.decision import Decision
from proa.plan.explain import explain_json
from proa.plan.runner_plan import LinearAttentionPlan, RunnerPlan
from proa.units import Numerics
from tests.factories.headers import LAPTOP, SERVER, planned, write_tiny_headers
from tests.plan.hybrid_headers import GDN_FAMILIES, INSTALLED, SM90, SM100, WIDE, gpu_host, write_hybrid_headers

PHASES = ("prefill", "decode", "verify")


@pytest.fixture(scope="module")
def gdn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hybrid_headers(tmp_path_factory.mktemp("linear") / "gdn", "qwen3_next", **WIDE)


@pytest.fixture(scope="module")
def kda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hybrid_headers(tmp_path_factory.mktemp("linear") / "kda", "kimi_linear")


def plan_of(model: Path, caps: DeviceCaps = SERVER, **settings: Any) -> RunnerPlan:
    return planned(model, caps=caps, **settings).plans.target


def flagged(model: Path, *flags: str, caps: DeviceCaps = SERVER, **settings: Any) -> LinearAttentionPlan:
    """`flagged(model, "--linear-attention.decode", "torch")`."""
    pairs = dict(zip(flags[::2], flags[1::2], strict=True))
    return plan_of(model, caps, flags=pairs, **settings).linear_attention


def triple(plan: LinearAttentionPlan) -> tuple[str | None, ...]:
    return plan.prefill.value, plan.decode.value, plan.verify.value


def asked(plan: LinearAttentionPlan) -> tuple[bool, ...]:
    return tuple(one.source is Source.ASKED for one in (plan.prefill, plan.decode, plan.verify))


def without(library: str) -> DeviceCaps:
    return replace(SM90, libraries={name: version for name, version in INSTALLED.items() if name != library})


# F25


def test_f25_each_runner_has_three_frozen_kernels_that_explain_prints(gdn: Path) -> None:
    plans = planned(gdn, caps=SERVER).plans
    assert triple(plans.target.linear_attention) == ("native", "native", "native")
    shown = explain_json(plans, {})["runners"]["target"]["decisions"]
    assert [shown[f"linear_attention.{phase}"]["value"] for phase in PHASES] == ["native"] * 3
    with pytest.raises(FrozenInstanceError):
        plans.target.linear_attention.decode = plans.target.linear_attention.verify  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        plans.target.linear_attention.decode.value = "torch"  # type: ignore[misc]


@pytest.mark.parametrize("family", [*GDN_FAMILIES, "kimi_linear"])
def test_every_hybrid_family_text_only_or_wrapped_answers(tmp_path: Path, family: str) -> None:
    plan = plan_of(write_hybrid_headers(tmp_path / family, family))
    assert all(one.value is not None for one in vars_of(plan.linear_attention))
    kind = "kda" if family == "kimi_linear" else "gdn"
    wrong = "flashinfer" if kind == "kda" else "helion"
    with pytest.raises(KernelUnavailable, match="linear_attention.decode"):
        plan_of(write_hybrid_headers(tmp_path / family, family), linear_attention_decode=wrong)


def vars_of(plan: LinearAttentionPlan) -> tuple[Decision[str | None], ...]:
    return plan.prefill, plan.decode, plan.verify


# F26: phase flag, then the runner's own default, then the base flag; a verify follows decode


@pytest.mark.parametrize(
    ("flags", "expected", "by_ask"),
    [
        ((), ("native", "native", "native"), (False, False, False)),
        (("--linear-attention", "torch"), ("torch", "torch", "torch"), (True, True, True)),
        (("--linear-attention.prefill", "torch"), ("torch", "native", "native"), (True, False, False)),
        (("--linear-attention.decode", "torch"), ("native", "torch", "torch"), (False, True, False)),
        (("--linear-attention.verify", "torch"), ("native", "native", "torch"), (False, False, True)),
        (
            ("--linear-attention", "torch", "--linear-attention.prefill", "reference"),
            ("reference", "torch", "torch"),
            (True, True, True),
        ),
        (
            ("--linear-attention", "torch", "--linear-attention.decode", "reference"),
            ("torch", "reference", "reference"),
            (True, True, False),
        ),
        (
            ("--linear-attention", "torch", "--linear-attention.verify", "native"),
            ("torch", "torch", "native"),
            (True, True, True),
        ),
        (
            ("--linear-attention", "torch", "--linear-attention.decode", "auto"),
            ("torch", "native", "native"),
            (True, False, False),
        ),
        (
            ("--linear-attention.decode", "reference", "--linear-attention.verify", "torch"),
            ("native", "reference", "torch"),
            (False, True, True),
        ),
    ],
)
def test_f26_a_phase_flag_goes_before_the_base_flag_and_verify_follows_decode(
    gdn: Path, flags: tuple[str, ...], expected: tuple[str, ...], by_ask: tuple[bool, ...]
) -> None:
    plan = flagged(gdn, *flags)
    assert (triple(plan), asked(plan)) == (expected, by_ask)


@pytest.mark.parametrize(
    ("flags", "expected", "by_ask"),
    [
        ((), ("flashinfer", "triton", "triton"), (False, False, False)),
        (("--linear-attention", "reference"), ("flashinfer", "reference", "reference"), (False, True, True)),
        (("--linear-attention.prefill", "torch"), ("torch", "triton", "triton"), (True, False, False)),
        (
            ("--linear-attention", "reference", "--linear-attention.prefill", "triton"),
            ("triton", "reference", "reference"),
            (True, True, True),
        ),
        (("--linear-attention", "flashinfer"), ("flashinfer", "flashinfer", "flashinfer"), (False, True, True)),
        (("--linear-attention.prefill", "flashinfer"), ("flashinfer", "triton", "triton"), (True, False, False)),
    ],
)
def test_f26_the_runners_own_default_stands_between_phase_flag_and_base_flag(
    gdn: Path, flags: tuple[str, ...], expected: tuple[str, ...], by_ask: tuple[bool, ...]
) -> None:
    plan = flagged(gdn, *flags, caps=SM90)
    assert (triple(plan), asked(plan)) == (expected, by_ask)


@pytest.mark.parametrize(
    "source",
    [
        {"flags": {"--linear-attention": "reference"}},
        {"flags": {"--target.linear-attention": "reference"}},
        {"linear_attention": "reference"},
        {"linear_attention_base": "reference"},
        {"target": {"linear_attention": {"base": "reference"}}},
    ],
)
def test_f26_a_base_setting_is_known_as_one_in_every_spelling(gdn: Path, source: dict[str, Any]) -> None:
    plan = plan_of(gdn, SM90, **source).linear_attention
    assert triple(plan) == ("flashinfer", "reference", "reference")
    (note,) = plan.prefill.notes
    assert "reference was asked for all phases" in note.reason and "own default" in note.reason


@pytest.mark.parametrize(
    "source",
    [
        {"flags": {"--linear-attention.prefill": "reference"}},
        {"flags": {"--target.linear-attention.prefill": "reference"}},
        {"linear_attention_prefill": "reference"},
        {"linear_attention": {"prefill": "reference"}},
    ],
)
def test_f26_a_phase_setting_is_known_as_one_in_every_spelling(gdn: Path, source: dict[str, Any]) -> None:
    plan = plan_of(gdn, SM90, **source).linear_attention
    assert triple(plan) == ("reference", "triton", "triton")


def test_f26_without_its_default_a_runner_obeys_the_base_flag_and_the_plan_says_what_stood_against_it(
    gdn: Path,
) -> None:
    plan = flagged(gdn, "--linear-attention", "reference", caps=gpu_host("8.0"))
    assert triple(plan) == ("reference", "reference", "reference")
    assert {r.value for r in plan.prefill.rejected} == {"flashinfer"}
    assert plan.prefill.reason == "asked" and not plan.prefill.notes


def test_f26_a_verify_says_that_it_follows_decode_and_why_not_where_it_cannot(gdn: Path) -> None:
    plan = flagged(gdn, "--linear-attention.decode", "torch")
    assert (plan.verify.rule, plan.verify.reason) == ("linear_attention.verify.follows_decode", "follows decode")
    assert plan.verify.requested.is_auto
    overridden = flagged(gdn, "--linear-attention", "native", "--linear-attention.decode", "torch").verify
    assert overridden.value == "torch"
    assert "native was asked for all phases (--linear-attention): a verify follows decode" in overridden.notes[0].reason


# F27


def facts_of_defaults() -> set[str]:
    return {"caps.sm", "caps.cuda_version", "caps.library.flashinfer-python", "schedule.prefill_chunk"}


@pytest.mark.parametrize("kernel", ["reference", "torch", "triton"])
@pytest.mark.parametrize("phase", PHASES)
def test_f27_an_explicit_kernel_reads_its_own_conditions_only(gdn: Path, kernel: str, phase: str) -> None:
    decision = plan_of(gdn, SM90, **{f"linear_attention_{phase}": kernel}).decisions()[f"linear_attention.{phase}"]
    assert (decision.value, decision.source, decision.rejected) == (kernel, Source.ASKED, ())
    assert {check.value for check in decision.checked} == {kernel}
    own = {"caps.sm"} if kernel == "triton" else set[str]()
    assert set(decision.inputs) & facts_of_defaults() == own
    others = {"native", "torch", "triton", "flashinfer", "reference"} - {kernel}
    assert not [fact for fact in decision.inputs for other in others if fact.startswith(f"caps.failed.{other}")]


class Forbidden(Mapping[str, str]):
    """A table of which some names may be asked for, and nothing else."""

    def __init__(self, allowed: set[str], values: Mapping[str, str] | None = None) -> None:
        self._allowed, self._values = allowed, values or {}

    def __getitem__(self, name: str) -> str:
        if name not in self._allowed:
            raise AssertionError(f"{name} was looked at")
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("the whole table was looked at")

    def __len__(self) -> int:
        raise AssertionError("the whole table was looked at")


class Unseen(DeviceCaps):
    """A host whose GPUs and CUDA version nobody may look at."""

    __slots__ = ()

    @property
    def sm(self) -> str | None:
        raise AssertionError("the compute capability was looked at")

    @property
    def cuda_version(self) -> str | None:  # type: ignore[override]
        raise AssertionError("the CUDA version was looked at")

    @cuda_version.setter
    def cuda_version(self, value: object) -> None:
        pass


def unseen(kernels: set[str]) -> DeviceCaps:
    """SM90 as a host of which only these kernels' self-tests may be looked at."""
    given = {name: getattr(SM90, name) for name in DeviceCaps.__dataclass_fields__ if name != "cuda_version"}
    tables = {"kernels": Forbidden(kernels), "libraries": Forbidden(set())}
    return Unseen(**given | tables)


ELSEWHERE = {
    "attention": "reference",
    "matmul_kernel": "reference",
    "moe_kernel": "reference",
    "sampling_kernel": "reference",
}


@pytest.mark.parametrize("kernel", ["reference", "torch"])
def test_f27_with_an_explicit_kernel_no_fact_of_another_or_of_the_default_is_ever_read(gdn: Path, kernel: str) -> None:
    phases = {f"linear_attention_{phase}": kernel for phase in PHASES}
    plan = plan_of(gdn, unseen({"reference", kernel}), **ELSEWHERE, **phases)
    assert triple(plan.linear_attention) == (kernel, kernel, kernel)


@pytest.mark.parametrize("open_phase", PHASES[:2])
def test_f27_the_same_host_stops_a_phase_that_is_left_to_the_engine(gdn: Path, open_phase: str) -> None:
    phases = {f"linear_attention_{phase}": "torch" for phase in PHASES if phase != open_phase}
    with pytest.raises(AssertionError, match="was looked at"):
        plan_of(gdn, unseen({"reference", "torch"}), **ELSEWHERE, **phases)


def test_f27_a_verify_that_follows_decode_reads_that_kernel_only(gdn: Path) -> None:
    phases = {f"linear_attention_{phase}": "torch" for phase in ("prefill", "decode")}
    assert triple(plan_of(gdn, unseen({"reference", "torch"}), **ELSEWHERE, **phases).linear_attention)[2] == "torch"


# F28, and the default itself


def test_f28_a_default_is_never_written_back_as_if_asked(gdn: Path) -> None:
    plans = planned(gdn, caps=SM90).plans
    decision = plans.target.linear_attention.prefill
    assert decision.requested.is_auto and decision.source is not Source.ASKED
    shown = explain_json(plans, {})["runners"]["target"]["decisions"]["linear_attention.prefill"]
    assert (shown["requested"], shown["value"]) == ("auto", "flashinfer")
    assert shown["rule"] == "linear_attention.prefill.default.flashinfer"


@pytest.mark.parametrize(
    ("caps", "settings", "is_taken", "says"),
    [
        (SM90, {}, True, ""),
        (SM90, {"state_dtype": "bfloat16"}, False, "float32 on SM 9.0, not bfloat16"),
        (SM90, {"prefill_chunk": 32768}, True, ""),
        (SM90, {"prefill_chunk": 32769}, False, "at most 32768 rows on SM 9.0, not 32769"),
        (gpu_host("9.0", cuda=None), {}, True, ""),
        (SM100, {}, False, "bfloat16 on SM 10.0, not float32"),
        (SM100, {"state_dtype": "bfloat16"}, True, ""),
        (SM100, {"state_dtype": "bfloat16", "prefill_chunk": 8192}, True, ""),
        (SM100, {"state_dtype": "bfloat16", "prefill_chunk": 8193}, False, "at most 8192 rows"),
        (gpu_host("10.0", "12.9"), {"state_dtype": "bfloat16"}, False, "CUDA 13.0 on SM 10.0, not 12.9"),
        (gpu_host("10.0", None), {"state_dtype": "bfloat16"}, False, "not unknown"),
        (gpu_host("8.9"), {}, False, "SM 9.x or 10.x, not 8.9"),
        (gpu_host("12.0"), {}, False, "SM 9.x or 10.x, not 12.0"),
        (without("flashinfer-python"), {}, False, "needs flashinfer-python, not installed"),
        (
            replace(SM90, kernels={**SM90.kernels, "flashinfer": "failed: states differ"}),
            {},
            False,
            "self-test failed: states differ",
        ),
    ],
)
def test_the_flashinfer_prefill_default_and_everything_that_stands_against_it(
    gdn: Path, caps: DeviceCaps, settings: dict[str, Any], is_taken: bool, says: str
) -> None:
    if is_taken:
        assert plan_of(gdn, caps, **settings).linear_attention.prefill.value == "flashinfer"
        return
    if settings.get("state_dtype") == "bfloat16":  # then no other kernel can either
        with pytest.raises(KernelUnavailable, match="linear_attention.prefill: nothing can be chosen") as caught:
            plan_of(gdn, caps, **settings)
        assert says in str(caught.value)
        return
    plan = plan_of(gdn, caps, **settings).linear_attention
    assert plan.prefill.value == "triton"
    assert any(says in rejected.reason for rejected in plan.prefill.rejected if rejected.value == "flashinfer")


def test_exact_numerics_take_no_default_that_is_not() -> None:
    flashinfer = next(k for k in kernels_for("delta.prefill") if k.backend == "flashinfer")
    (condition,) = [one for one in flashinfer.requires if one.id == "kernel.flashinfer.not_exact"]
    assert condition.blocks is Blocks.ALWAYS
    blocked = condition.check(FactView({"ask.exact": True}, condition.reads))
    assert blocked is not None and "exact numerics were asked for" in blocked.reason
    assert condition.check(FactView({"ask.exact": False}, condition.reads)) is None


@pytest.mark.parametrize("dim", [64, 256])
def test_heads_that_flashinfer_has_not_are_no_default(tmp_path: Path, dim: int) -> None:
    model = write_hybrid_headers(tmp_path / "m", "qwen3_next", linear_key_head_dim=128, linear_value_head_dim=dim)
    plan = plan_of(model, SM90).linear_attention
    assert plan.prefill.value == "triton"
    assert f"heads of 128, not value_dim {dim}" in plan.prefill.reason


def test_a_model_with_kda_layers_has_no_such_default_and_looks_at_no_condition_of_it(tmp_path: Path) -> None:
    own = {"full_attn_layers": [4], "kda_layers": [1, 2, 3, 5], "head_dim": 128, "num_heads": 2,
           "short_conv_kernel_size": 4}  # fmt: skip
    model = write_hybrid_headers(tmp_path / "m", "kimi_linear", linear_attn_config=own)
    plan = plan_of(model, SM90).linear_attention
    assert triple(plan) == ("triton", "triton", "triton")
    assert "flashinfer" not in {check.value for check in plan.prefill.checked}


def test_on_a_cpu_no_condition_of_a_gpu_default_is_looked_at(gdn: Path) -> None:
    auto, based = plan_of(gdn, LAPTOP), plan_of(gdn, LAPTOP, linear_attention="reference")
    assert {check.value for check in auto.linear_attention.prefill.checked} == {"native", "triton", "torch"}
    assert {check.value for check in based.linear_attention.prefill.checked} == {"reference"}
    assert not {"caps.sm", "caps.cuda_version"} & set(based.linear_attention.prefill.inputs)


# F32


@pytest.mark.parametrize(
    ("flags", "caps", "says"),
    [
        (("--linear-attention.verify", "cutedsl"), SM90, "cutedsl has no verify kernel, only prefill and decode"),
        (("--linear-attention.decode", "nv_cutedsl"), SM90, "nv_cutedsl has no decode kernel, only verify"),
        (("--linear-attention.prefill", "cutedsl"), SM90, "no cutedsl kernels in this version"),
        (("--linear-attention.prefill", "flashkda"), SM90, "flashkda has kda, no gdn"),
        (("--linear-attention.decode", "helion"), SM90, "helion has kda, no gdn"),
        (("--linear-attention.decode", "intel_xpu"), SM90, "no intel_xpu kernels"),
        (("--linear-attention.decode", "triton"), SERVER, "triton needs a CUDA device, not cpu"),
        (("--linear-attention", "triton"), SERVER, "triton needs a CUDA device, not cpu"),
        (("--linear-attention.decode", "native"), SM90, "native runs on the CPU, not on cuda"),
        (("--linear-attention.decode", "native"), replace(SERVER, compiler=None), "no C++ compiler"),
        (
            ("--linear-attention.verify", "native"),
            replace(SERVER, kernels={"native.delta": "failed: states differ"}),
            "self-test failed: states differ",
        ),
        (("--linear-attention", "nv_cutedsl"), SERVER, "no nv_cutedsl kernels"),
    ],
)
def test_f32_a_kernel_that_cannot_run_in_its_phase_family_or_host_is_an_error_that_names_those_that_can(
    gdn: Path, flags: tuple[str, str], caps: DeviceCaps, says: str
) -> None:
    with pytest.raises(KernelUnavailable) as caught:
        flagged(gdn, *flags, caps=caps)
    text = str(caught.value)
    assert says in text and flags[0] in text and "target: linear_attention." in text
    assert "can run: " in text and "reference" in text.rpartition("can run: ")[2]
    assert flags[1] not in text.rpartition("can run: ")[2].split(".")[0].split(", ")


def test_f32_a_word_that_nobody_knows_is_refused_with_the_known_ones(gdn: Path) -> None:
    with pytest.raises(PlanError, match="linear_attention.prefill = tritn") as caught:
        flagged(gdn, "--linear-attention", "tritn")
    assert caught.value.slug == "plan/unknown-value"
    assert "native, triton, torch, flashinfer, reference" in str(caught.value)


def test_f32_under_auto_the_same_kernel_is_passed_over_and_listed(gdn: Path) -> None:
    plan = plan_of(gdn, replace(SERVER, kernels={"native.delta": "failed: states differ"})).linear_attention
    assert triple(plan) == ("torch", "torch", "torch")
    assert [(r.value, r.rule) for r in plan.decode.rejected][0] == ("native", "kernel.native.delta_self_test")


def test_an_ask_that_names_a_runner_without_linear_attention_is_an_error_and_one_for_both_a_note(
    tmp_path: Path,
) -> None:
    dense = write_tiny_headers(tmp_path / "dense", "llama")
    with pytest.raises(PlanError, match="0 linear-attention layers") as caught:
        flagged(dense, "--target.linear-attention.decode", "torch")
    assert caught.value.slug == "plan/does-not-apply"
    plan = flagged(dense, "--linear-attention", "torch")
    assert triple(plan) == (None, None, None)
    assert plan.decode.reason == "0 linear-attention layers" and "torch" in plan.decode.notes[0].reason


# numerics


def test_numerics_are_exact_where_one_exact_kernel_runs_all_phases(tmp_path: Path) -> None:
    model = write_hybrid_headers(
        tmp_path / "m", "qwen3_5_text", linear_value_head_dim=32, rope_parameters={**ROPE, "partial_rotary_factor": 0.5}
    )
    plan = plan_of(model)
    assert triple(plan.linear_attention) == ("native", "native", "native")
    assert (plan.attention.decode.value, plan.numerics.value) == ("native", Numerics.EXACT)
    for phase in PHASES:
        torch = plan_of(model, **{f"linear_attention_{phase}": "torch"})
        assert torch.numerics.value is Numerics.FAST
        assert f"delta.{phase}" in torch.numerics.inputs["kernels.not_exact"]
    mixed = plan_of(model, linear_attention_verify="reference")
    assert mixed.numerics.inputs["kernels.not_exact"] == ["delta.verify"]
    assert plan_of(model, linear_attention="reference").numerics.value is Numerics.EXACT


ROPE = {"rope_type": "default", "rope_theta": 10000000, "mrope_interleaved": True, "mrope_section": [4, 2, 2]}


def test_asked_for_exact_numerics_the_engine_takes_exact_kernels_and_refuses_an_ask_for_others(tmp_path: Path) -> None:
    model = write_hybrid_headers(tmp_path / "m", "qwen3_5_text", rope_parameters={**ROPE, "partial_rotary_factor": 0.5})
    plan = plan_of(model, numerics="exact")
    assert triple(plan.linear_attention) == ("reference", "reference", "reference")
    assert plan.numerics.value is Numerics.EXACT
    with pytest.raises(KernelUnavailable, match="numerics = exact"):
        plan_of(model, numerics="exact", linear_attention="torch")


def test_a_gpu_with_another_major_has_no_limits_to_compare_with() -> None:
    gpu = Gpu(name="old", memory_bytes=1, memory_free=1, sm="7.5")
    assert replace(SM90, gpus=(gpu,)).sm == "7.5" and replace(SM90, gpus=()).sm is None and LAPTOP.sm is None
