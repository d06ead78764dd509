"""The shared-experts decision as a table: stored form, widths, kernel, ranks and host -> value, rule, reason (F1-F5).

Every condition holds in one generated case and blocks in another; which ones an ask may override is stated here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from proa.arch.layout import ExpertFiles, MoELayout, ScaleOn, SharedWeight
from proa.conditions import Blocked, Blocks, Condition, FactView, Source, evaluate
from proa.errors import PlanError
from proa.kernels.caps import DeviceCaps
from proa.plan import runner
from proa.plan.context import RunnerContext
from proa.plan.decision import Decision
from proa.plan.planned import Resolved
from proa.plan.rules.moe import FUSION, spans
from proa.plan.runner_plan import RunnerPlan
from proa.units import SharedExperts
from tests.factories.headers import GPU_HOST, LAPTOP, planned
from tests.plan.expert_headers import SHARED_FAMILIES, write_experts

FUSED, SEPARATE = SharedExperts.FUSED, SharedExperts.SEPARATE
FINE: dict[str, Any] = {
    "routed.storage": "bfloat16",
    "shared.storage": "bfloat16",
    "routed.width": 32,
    "shared.width": 64,
    "routed.activation": "silu",
    "shared.activation": "silu",
    "plan.moe_kernel": "reference",
    "kernel.has_slots": True,
    "parallel.expert": 1,
    "plan.device": "cuda",
}
BREAKS: dict[str, tuple[dict[str, Any], Blocks, Source, str]] = {
    "moe.fuse.storage_differs": (
        {"routed.storage": "fp8 128x128"}, Blocks.ALWAYS, Source.CHECKPOINT, "fp8 128x128, shared ones as bfloat16",
    ),
    "moe.fuse.width_differs": ({"shared.width": 48}, Blocks.ALWAYS, Source.CHECKPOINT, "48 does not divide"),
    "moe.fuse.activation_differs": (
        {"routed.activation": "silu with a limit of 10"}, Blocks.ALWAYS, Source.CHECKPOINT,
        "by silu with a limit of 10, shared ones by silu",
    ),
    "moe.fuse.no_slots": ({"kernel.has_slots": False}, Blocks.ALWAYS, Source.CONSTRAINT, "reference experts kernel"),
    "moe.fuse.expert_parallel": ({"parallel.expert": 2}, Blocks.ALWAYS, Source.CONSTRAINT, "over 2 ranks"),
    "moe.fuse.no_gain": ({"plan.device": "cpu"}, Blocks.AUTO, Source.HARDWARE, "CPU"),
}  # fmt: skip


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_experts(tmp_path_factory.mktemp("shared") / "glm", "glm4_moe")


def shared(resolved: Resolved) -> Decision[Any]:
    return resolved.plans.target.shared_experts


def layouts(resolved: Resolved) -> dict[int, MoELayout]:
    return dict(resolved.plans.target.layout.moe)


def routed_only(name: str) -> bool:
    return ".experts." in name


# conditions


@pytest.mark.parametrize("condition", FUSION, ids=lambda condition: condition.id)
def test_f3_every_condition_holds_and_blocks_and_says_why(condition: Condition) -> None:
    broken, blocks, source, says = BREAKS[condition.id]
    held, found = (evaluate([condition], facts)[0] for facts in (FINE, FINE | broken))
    assert held.blocked is None and found.blocked is not None
    assert (condition.blocks, found.blocked.source) == (blocks, source)
    assert says in found.blocked.reason
    assert set(found.inputs) <= set(condition.reads)


def test_f3_what_is_not_stored_at_all_blocks_nothing_here() -> None:
    storage = FUSION[0]
    for missing in ({"routed.storage": ""}, {"shared.storage": ""}):
        assert evaluate([storage], FINE | {"routed.storage": "fp8 128x128"} | missing)[0].blocked is None


CASES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {}, "moe.fuse.ok"),
    ({"fp8": routed_only}, {}, "moe.fuse.storage_differs"),
    ({"moe_intermediate_size": 48}, {}, "moe.fuse.ok"),
    ({}, {"expert_parallel": 2}, "moe.fuse.expert_parallel"),
    ({}, {"device": "cpu"}, "moe.fuse.no_gain"),
    ({"fp8": routed_only}, {"expert_parallel": 2, "device": "cpu"}, "moe.fuse.storage_differs"),
]


@pytest.mark.parametrize(("files", "asks", "rule"), CASES)
def test_f3_the_first_blocking_condition_is_the_reason_and_all_others_are_listed(
    tmp_path: Path, files: dict[str, Any], asks: dict[str, Any], rule: str
) -> None:
    decision = shared(planned(write_experts(tmp_path / "m", "glm4_moe", **files), caps=GPU_HOST, **asks))
    assert decision.rule == rule
    assert decision.value is (FUSED if rule == "moe.fuse.ok" else SEPARATE)
    assert [c.condition for c in decision.checked] == [c.id for c in FUSION]
    blocked = [c.condition for c in decision.checked if c.reason is not None]
    assert [r.rule for r in decision.rejected] == blocked and blocked[:1] == ([rule] if blocked else [])
    expected = {"expert_parallel": "moe.fuse.expert_parallel", "device": "moe.fuse.no_gain"}
    assert {expected[ask] for ask in asks} <= set(blocked)


@pytest.mark.parametrize("family", SHARED_FAMILIES)
def test_auto_fuses_on_cuda_and_lays_out_separately_on_a_cpu_for_a_reason_of_the_host(
    tmp_path: Path, family: str
) -> None:
    model = write_experts(tmp_path / "m", family, is_stacked=False)
    cuda, cpu = (shared(planned(model, caps=caps)) for caps in (GPU_HOST, LAPTOP))
    assert (cuda.value, cuda.source, cuda.rule) == (FUSED, Source.DEFAULT, "moe.fuse.ok")
    assert (cpu.value, cpu.source, cpu.rule) == (SEPARATE, Source.HARDWARE, "moe.fuse.no_gain")


def test_f1_headers_without_weights_give_the_decision_and_the_same_digest_twice(glm: Path) -> None:
    first, second = (planned(glm, caps=GPU_HOST).plans.target for _ in range(2))
    assert first.shared_experts.value is FUSED and first.digest == second.digest


# config edits (F2)


@pytest.mark.parametrize(
    ("overrides", "value", "reason"),
    [
        ({"n_shared_experts": 0}, None, "no shared experts"),
        ({"n_shared_experts": 1}, FUSED, "one kernel"),
        ({"n_shared_experts": 2}, FUSED, "one kernel"),
        ({"n_routed_experts": 6}, FUSED, "one kernel"),
        ({"first_k_dense_replace": 2}, FUSED, "layer 2: "),
    ],
)
def test_f2_the_answer_follows_the_config(
    tmp_path: Path, overrides: dict[str, Any], value: SharedExperts | None, reason: str
) -> None:
    overrides = {"num_nextn_predict_layers": 0, **overrides}
    decision = shared(planned(write_experts(tmp_path / "m", "glm4_moe", **overrides), caps=GPU_HOST))
    assert decision.value is value and reason in decision.reason


def test_f12_the_name_of_the_architecture_is_no_fact_of_the_decision(tmp_path: Path) -> None:
    names = ("DeepseekV3ForCausalLM", "MistralLarge3ForCausalLM")
    answers = [
        shared(planned(write_experts(tmp_path / n, "deepseek_v3", architectures=[n]), caps=GPU_HOST)) for n in names
    ]
    assert answers[0] == answers[1] and answers[0].value is FUSED


@pytest.mark.parametrize("family", ["qwen3_moe", "minimax_m2", "llama"])
def test_a_family_without_shared_experts_says_that_it_does_not_apply(tmp_path: Path, family: str) -> None:
    from tests.factories.checkpoints import tiny_config
    from tests.factories.headers import write_headers

    model = write_headers(tmp_path / "m", tiny_config(family))
    decision = shared(planned(model, shared_experts="fused"))
    assert (decision.value, decision.source, decision.reason) == (None, Source.CHECKPOINT, "no shared experts")
    assert "fused was asked for" in decision.notes[0].reason
    with pytest.raises(PlanError, match=r"--target\.shared-experts") as caught:
        planned(model, flags={"--target.shared-experts": "fused"})
    assert caught.value.slug == "plan/does-not-apply"


# what was asked


@pytest.mark.parametrize("caps", [LAPTOP, GPU_HOST])
@pytest.mark.parametrize("files", [{}, {"fp8": routed_only}])
def test_f4_separate_is_always_possible_and_reads_no_fact(
    tmp_path: Path, files: dict[str, Any], caps: DeviceCaps
) -> None:
    decision = shared(planned(write_experts(tmp_path / "m", "glm4_moe", **files), caps=caps, shared_experts="separate"))
    assert (decision.value, decision.source, decision.rule) == (SEPARATE, Source.ASKED, "moe.fuse.asked")
    assert (dict(decision.inputs), decision.checked, decision.notes, decision.rejected) == ({}, (), (), ())


def test_f4_fused_against_a_preference_is_taken_and_the_preference_kept_as_a_note(glm: Path) -> None:
    decision = shared(planned(glm, caps=LAPTOP, shared_experts="fused"))
    assert (decision.value, decision.source, decision.rule) == (FUSED, Source.ASKED, "moe.fuse.asked")
    assert [note.condition for note in decision.notes] == ["moe.fuse.no_gain"]
    assert shared(planned(glm, caps=GPU_HOST, shared_experts="fused")).notes == ()


@pytest.mark.parametrize(
    ("files", "asks", "rule"),
    [
        ({"fp8": routed_only}, {}, "moe.fuse.storage_differs"),
        ({}, {"expert_parallel": 2}, "moe.fuse.expert_parallel"),
    ],
)
def test_f4_f5_fused_against_what_blocks_always_is_an_error_that_names_it(
    tmp_path: Path, files: dict[str, Any], asks: dict[str, Any], rule: str
) -> None:
    model = write_experts(tmp_path / "m", "glm4_moe", **files)
    with pytest.raises(PlanError, match=rule) as caught:
        planned(model, caps=GPU_HOST, flags={"--shared-experts": "fused"}, **asks)
    assert (caught.value.slug, caught.value.exit_code) == ("plan/shared-experts", 2)
    assert "--shared-experts" in str(caught.value) and "layers 1..2" in str(caught.value)


def test_f5_a_width_of_no_whole_slots_blocks_always(tmp_path: Path) -> None:
    model = write_experts(tmp_path / "m", "qwen2_moe", shared_expert_intermediate_size=48)
    assert shared(planned(model, caps=GPU_HOST)).rule == "moe.fuse.width_differs"
    with pytest.raises(PlanError, match="48 does not divide into slots of 32"):
        planned(model, caps=GPU_HOST, shared_experts="fused")


def test_a_family_without_conditions_of_its_own_follows_the_ask(tmp_path: Path) -> None:  # F13
    model = write_experts(tmp_path / "m", "qwen2_moe")
    for ask in (FUSED, SEPARATE):
        found = planned(model, caps=LAPTOP, shared_experts=ask.value)
        assert shared(found).value is ask
        assert all(layout.is_fused is (ask is FUSED) for layout in layouts(found).values())


# a family's own conditions


def opted_in(facts: FactView) -> Blocked | None:
    del facts
    return Blocked("only when asked for", Source.DEFAULT)


@pytest.fixture
def decide(glm: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Plans of a family that has the given conditions of its own."""

    def plan(conditions: tuple[Condition, ...], **asks: Any) -> Mapping[str, RunnerPlan]:
        original, plans = runner.decide, dict[str, RunnerPlan]()

        def with_conditions(ctx: RunnerContext) -> RunnerPlan:
            made = original(replace(ctx, family=replace(ctx.family, fusion=conditions)))
            plans[ctx.role.value] = made
            return made

        monkeypatch.setattr("proa.plan.resolve.decide", with_conditions)
        planned(glm, caps=GPU_HOST, speculative="nextn", **asks)
        return plans

    return plan


def test_a_familys_preference_steers_auto_of_both_its_runners_and_an_ask_overrides_it(decide: Any) -> None:
    own = Condition(id="glm.fuse.opt_in", reads=(), blocks=Blocks.AUTO, check=opted_in)
    for plan in decide((own,)).values():
        assert (plan.shared_experts.value, plan.shared_experts.rule) == (SEPARATE, "glm.fuse.opt_in")
    for plan in decide((own,), shared_experts="fused").values():
        assert plan.shared_experts.value is FUSED
        assert [note.condition for note in plan.shared_experts.notes] == ["glm.fuse.opt_in"]


def test_a_familys_impossibility_is_an_error_when_fused_is_asked_for(decide: Any) -> None:
    own = Condition(id="glm.fuse.clamp", reads=(), blocks=Blocks.ALWAYS, check=opted_in)
    assert decide((own,))["draft"].shared_experts.rule == "glm.fuse.clamp"
    with pytest.raises(PlanError, match=r"glm\.fuse\.clamp"):
        decide((own,), shared_experts="fused")


# layers that differ


def test_a_layer_with_another_form_gets_its_own_answer_and_the_plan_says_which(tmp_path: Path) -> None:
    model = write_experts(
        tmp_path / "m", "glm4_moe", num_hidden_layers=5, num_nextn_predict_layers=0,
        fp8=lambda name: ".layers.3." in name and ".experts." in name,
    )  # fmt: skip
    found = planned(model, caps=GPU_HOST)
    decision = shared(found)
    assert decision.value == {"1..2, 4": FUSED, "3": SEPARATE}
    assert (decision.rule, decision.source) == ("moe.fuse.storage_differs", Source.CHECKPOINT)
    assert "layers 1..2, 4: one kernel" in decision.reason and "layer 3: routed experts are" in decision.reason
    assert decision.inputs["routed.storage"] == {"1..2, 4": "bfloat16", "3": "fp8 32x32"}
    assert {index for index, layout in layouts(found).items() if layout.is_fused} == {1, 2, 4}
    assert not any(place.is_shared_slot for name, place in found.target.names.expected().items() if ".3." in name)
    with pytest.raises(PlanError, match="cannot be in layer 3: "):
        planned(model, caps=GPU_HOST, shared_experts="fused")


def test_projections_of_one_kind_in_different_forms_are_compared_one_by_one(tmp_path: Path) -> None:
    both_down = write_experts(tmp_path / "a", "glm4_moe", fp8=lambda name: "down_proj" in name)
    decision = shared(planned(both_down, caps=GPU_HOST))
    assert decision.value is FUSED
    assert decision.inputs["shared.storage"] == "fp8 32x32 (down), bfloat16 (gate_up)"
    only_routed = write_experts(tmp_path / "b", "glm4_moe", fp8=lambda n: "down_proj" in n and ".experts." in n)
    assert shared(planned(only_routed, caps=GPU_HOST)).rule == "moe.fuse.storage_differs"


@pytest.mark.parametrize(
    ("layers", "text"), [([4], "4"), ([1, 2, 3], "1..3"), ([1, 3], "1, 3"), ([0, 1, 3, 5, 6], "0..1, 3, 5..6")]
)
def test_layer_numbers_are_written_short(layers: list[int], text: str) -> None:
    assert spans(layers) == text


# layouts


@pytest.mark.parametrize(
    ("family", "overrides", "slots", "weight"),
    [
        ("glm4_moe", {}, (8,), SharedWeight.ONE),
        ("deepseek_v2", {}, (8, 9), SharedWeight.ONE),
        ("deepseek_v3", {"routed_scaling_factor": 16.0}, (8,), SharedWeight.ONE),
        ("qwen2_moe", {}, (8, 9), SharedWeight.TOKEN_GATE),
    ],
)
def test_f7_fused_experts_take_the_slots_after_the_routed_ones(
    tmp_path: Path, family: str, overrides: dict[str, Any], slots: tuple[int, ...], weight: SharedWeight
) -> None:
    model = write_experts(tmp_path / "m", family, **overrides)
    for layout in layouts(planned(model, caps=GPU_HOST)).values():
        assert (layout.num_routed, layout.shared_slots, layout.num_slots) == (8, slots, 8 + len(slots))
        assert (layout.shared_weight, layout.scale_on) == (weight, ScaleOn.WEIGHTS)
    for layout in layouts(planned(model, caps=LAPTOP)).values():
        assert (layout.shared_slots, layout.num_slots) == ((), 8)


@pytest.mark.parametrize("is_stacked", [False, True])
@pytest.mark.parametrize("caps", [LAPTOP, GPU_HOST])
def test_the_form_of_the_files_is_read_off_their_names_and_every_tensor_has_a_place(
    tmp_path: Path, is_stacked: bool, caps: DeviceCaps
) -> None:
    model = write_experts(tmp_path / "m", "glm4_moe", is_stacked=is_stacked)
    found = planned(model, caps=caps)
    files = ExpertFiles.STACKED if is_stacked else ExpertFiles.LISTED
    assert {layout.files for layout in layouts(found).values()} == {files}
    expected, stored = set(found.target.names.expected()), set(found.target.checkpoint.tensors)
    assert expected <= stored and all(".layers.3." in name for name in stored - expected)
    assert shared(found).value is (SEPARATE if caps is LAPTOP else FUSED)


def test_layouts_are_in_the_digest(glm: Path) -> None:
    fused, separate = (planned(glm, shared_experts=ask).plans.target for ask in ("fused", "separate"))
    assert fused.digest != separate.digest and fused.layout != separate.layout


def test_a_glob_may_not_hide_a_shared_expert_that_the_other_layout_would_place(glm: Path) -> None:
    from proa.errors import WeightError

    for ask in ("fused", "separate"):
        found = planned(glm, shared_experts=ask, allow_unexpected=["*.shared_experts.*"])
        assert all(found.target.names.knows(name) for name in found.target.checkpoint.tensors)
    stray = write_experts(glm.parent / "stray", "glm4_moe", add={"model.layers.1.mlp.extra": (1,)})
    assert planned(stray, allow_unexpected=["*.extra"]).target.names.knows("model.layers.1.mlp.extra")
    with pytest.raises(WeightError, match="another layout"):
        tied = write_experts(
            glm.parent / "tied", "glm4_moe", tie_word_embeddings=True, add={"lm_head.weight": (512, 64)}
        )
        planned(tied, allow_unexpected=["lm_head.*"])
