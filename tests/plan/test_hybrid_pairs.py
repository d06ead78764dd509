"""Two runners, one of them with linear attention: neither's choice touches the other's (rows F29, F30, F34, F38)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proa.conditions import Source
from proa.errors import KernelUnavailable, PlanError
from proa.plan.decision import Decision
from proa.plan.runner_plan import LinearAttentionPlan, PhasePlan, RunnerPlan
from tests.factories.headers import SERVER, planned, write_tiny_headers
from tests.plan.hybrid_headers import SM90, SM100, WIDE, write_hybrid_headers

MODELS = ("gdn", "kda", "dense")
PHASES = ("prefill", "decode", "verify")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("pairs")
    return {
        "gdn": write_hybrid_headers(root / "gdn", "qwen3_next", **WIDE),
        "kda": write_hybrid_headers(root / "kda", "kimi_linear"),
        "dense": write_tiny_headers(root / "dense", "llama"),
    }


def pair(target: Path, draft: Path, **options: Any) -> tuple[RunnerPlan, RunnerPlan]:
    plans = planned(target, draft=draft, **options).plans
    assert plans.draft is not None and plans.contract is not None
    return plans.target, plans.draft


def triple(plan: PhasePlan) -> tuple[str | None, ...]:
    return plan.prefill.value, plan.decode.value, plan.verify.value


# F29


@pytest.mark.parametrize("target", MODELS)
@pytest.mark.parametrize("draft", MODELS)
def test_f29_a_second_runner_leaves_the_firsts_plan_and_digest_as_they_are(
    models: dict[str, Path], target: str, draft: str
) -> None:
    for caps in (SERVER, SM90):
        alone = planned(models[target], caps=caps).plans.target
        beside, own = pair(models[target], models[draft], caps=caps)
        assert (beside, beside.digest) == (alone, alone.digest)
        assert triple(own.linear_attention) == triple(planned(models[draft], caps=caps).plans.target.linear_attention)


KERNELS = st.sampled_from(["auto", "native", "torch", "reference"])


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    target=st.sampled_from(MODELS),
    draft=st.sampled_from(MODELS[:2]),
    asks=st.fixed_dictionaries({}, optional={f"draft_linear_attention_{phase}": KERNELS for phase in PHASES}),
    rollback=st.sampled_from(["auto", "replay", "states"]),
)
def test_f29_whatever_is_asked_of_the_second_runner_the_firsts_digest_stays(
    models: dict[str, Path], target: str, draft: str, asks: dict[str, str], rollback: str
) -> None:
    asks = {name: kernel for name, kernel in asks.items() if not (draft == "kda" and kernel == "native")}
    alone = planned(models[target], caps=SERVER).plans.target
    beside, own = pair(models[target], models[draft], caps=SERVER, draft_rollback=rollback, **asks)
    assert (beside, beside.digest) == (alone, alone.digest)
    for phase in PHASES:
        kernel = asks.get(f"draft_linear_attention_{phase}", "auto")
        assert kernel in ("auto", own.decisions()[f"linear_attention.{phase}"].value)


def test_f29_a_second_runner_that_cannot_be_planned_says_so_and_leaves_the_first_alone(
    models: dict[str, Path],
) -> None:
    with pytest.raises(KernelUnavailable, match="draft: linear_attention.decode = triton") as caught:
        pair(models["gdn"], models["gdn"], caps=SERVER, draft_linear_attention_decode="triton")
    assert "The target is unaffected" in str(caught.value)


# F30


def test_f30_a_draft_may_hold_other_kernels_than_its_target(models: dict[str, Path]) -> None:
    flags = {"--draft.linear-attention.prefill": "torch", "--target.linear-attention.decode": "reference"}
    target, draft = pair(models["gdn"], models["gdn"], caps=SERVER, flags=flags)
    assert triple(target.linear_attention) == ("native", "reference", "reference")
    assert triple(draft.linear_attention) == ("torch", "native", "native")
    assert target.linear_attention.prefill.requested.is_auto and draft.linear_attention.decode.requested.is_auto
    assert target.digest != draft.digest


def test_f30_a_draft_never_inherits_its_targets_answer(models: dict[str, Path]) -> None:
    flags = {"--target.linear-attention": "reference"}
    target, draft = pair(models["gdn"], models["gdn"], caps=SERVER, flags=flags)
    assert triple(target.linear_attention) == ("reference", "reference", "reference")
    assert triple(draft.linear_attention) == ("native", "native", "native")


def test_f30_a_flag_without_a_role_is_asked_of_both(models: dict[str, Path]) -> None:
    both = pair(models["gdn"], models["kda"], caps=SERVER, flags={"--linear-attention.decode": "torch"})
    for plan in both:
        assert (plan.linear_attention.decode.value, plan.linear_attention.decode.source) == ("torch", Source.ASKED)
    target, draft = pair(models["gdn"], models["dense"], caps=SERVER, flags={"--linear-attention.decode": "torch"})
    assert (target.linear_attention.decode.value, draft.linear_attention.decode.value) == ("torch", None)
    assert draft.linear_attention.decode.notes


# The default of one runner is not the other's


@pytest.mark.parametrize(("caps", "asks"), [(SM90, {}), (SM100, {"target_state_dtype": "bfloat16"})])
def test_only_the_runner_whose_model_has_gdn_layers_gets_the_flashinfer_default(
    models: dict[str, Path], caps: Any, asks: dict[str, str]
) -> None:
    target, draft = pair(models["gdn"], models["dense"], caps=caps, **asks)
    assert target.linear_attention.prefill.value == "flashinfer"
    assert target.linear_attention.prefill.requested.is_auto
    assert triple(draft.linear_attention) == (None, None, None)
    other, kda = pair(models["gdn"], models["kda"], caps=caps, **asks)
    assert other == target
    assert triple(kda.linear_attention) == ("triton", "triton", "triton")


def test_the_reverse_pair_gives_it_to_the_draft(models: dict[str, Path]) -> None:
    target, draft = pair(models["dense"], models["gdn"], caps=SM90)
    assert triple(target.linear_attention) == (None, None, None)
    assert triple(draft.linear_attention) == ("flashinfer", "triton", "triton")


# F34


def test_f34_each_runner_holds_its_own_attention_kernel_per_phase(models: dict[str, Path]) -> None:
    target, draft = pair(models["dense"], models["dense"], caps=SERVER, flags={"--draft.attention": "reference"})
    assert (triple(target.attention), triple(draft.attention)) == (("native",) * 3, ("reference",) * 3)
    assert target == planned(models["dense"], caps=SERVER).plans.target


# F38


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_moe"])
def test_f38_the_bundled_draft_of_a_hybrid_has_no_linear_attention_and_says_so(tmp_path: Path, family: str) -> None:
    model = write_hybrid_headers(tmp_path / family, family)
    plans = planned(model, caps=SERVER, speculative="nextn").plans
    assert plans.draft is not None
    for decision in (*leaves(plans.draft.linear_attention), plans.draft.state_dtype, plans.draft.rollback):
        assert (decision.value, decision.source) == (None, Source.CHECKPOINT)
        assert decision.reason == "0 linear-attention layers" and decision.inputs == {"spec.linear_layers": 0}
    assert all(leaf.value is not None for leaf in leaves(plans.target.linear_attention))
    assert plans.memory.state_slots["draft"].value == 0
    with pytest.raises(PlanError, match="draft: linear_attention.verify = torch") as caught:
        planned(model, caps=SERVER, speculative="nextn", flags={"--draft.linear-attention.verify": "torch"})
    assert caught.value.slug == "plan/does-not-apply"


def leaves(plan: LinearAttentionPlan) -> tuple[Decision[str | None], ...]:
    return plan.prefill, plan.decode, plan.verify
