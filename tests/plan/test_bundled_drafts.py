"""A draft inside its target's checkpoint: asked for or not, from its own tensors, beside its target (F8, F16-F18)."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proa.arch.weights import Borrowed, Elsewhere, LeftOut, Place, Unknown
from proa.conditions import Source
from proa.errors import PlanError
from proa.loading.dry_run import inspect
from proa.plan.explain import explain_json, explain_table, explain_why
from proa.units import Algorithm, DType, SharedExperts
from tests.factories.checkpoints import tiny_config
from tests.factories.headers import GPU_HOST, LAPTOP, SERVER, planned, write_headers
from tests.plan.expert_headers import NEXTN_FAMILIES, write_experts

FUSED, SEPARATE = SharedExperts.FUSED, SharedExperts.SEPARATE
DRAFT_LAYER = {"glm_moe_dsa": 4}  # 3 in the others: the number behind the last layer


def of_draft(name: str, layer: int = 3) -> bool:
    return name.startswith(f"model.layers.{layer}.")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("drafts")
    return {family: write_experts(root / family, family) for family in NEXTN_FAMILIES}


@pytest.fixture(scope="module")
def glm(models: dict[str, Path]) -> Path:
    return models["glm4_moe"]


@pytest.mark.parametrize("family", NEXTN_FAMILIES)
def test_an_asked_draft_has_a_plan_of_its_own_and_both_account_for_every_tensor(
    models: dict[str, Path], family: str
) -> None:
    resolved = planned(models[family], speculative="nextn")
    plans, layer = resolved.plans, DRAFT_LAYER.get(family, 3)
    assert plans.draft is not None and resolved.draft is not None and plans.contract is not None
    assert (plans.draft.family, plans.draft.num_layers) == (f"{family}/nextn", 1)
    assert (plans.draft.head.value, plans.draft.head.rule) == ("borrowed", "head.borrowed")
    assert [spec.index for spec in resolved.draft.spec.layers] == [layer]
    for name in resolved.target.checkpoint.tensors:
        mine, theirs = resolved.target.names.claim(name), resolved.draft.names.claim(name)
        owner, other = (theirs, mine) if of_draft(name, layer) else (mine, theirs)
        assert isinstance(owner, Place | Borrowed) and other == Elsewhere()
    document = inspect(resolved)
    assert document["unclaimed"] == []
    assert all(not part["missing"] and not part["wrong"] for part in document["runners"].values())


@pytest.mark.parametrize("family", NEXTN_FAMILIES)
def test_a_draft_that_nobody_asked_for_is_left_out_by_name_and_a_stray_name_in_it_is_unknown(
    models: dict[str, Path], family: str
) -> None:
    resolved = planned(models[family])
    layer = DRAFT_LAYER.get(family, 3)
    assert resolved.draft is None and resolved.plans.contract is None
    names = resolved.target.names
    for name in resolved.target.checkpoint.tensors:
        claim = names.claim(name)
        assert isinstance(claim, LeftOut) is of_draft(name, layer)
        if isinstance(claim, LeftOut):
            assert claim.reason == "nextn draft, 1 layer, not asked for"
    for stray in (f"model.layers.{layer}.mlp.surprise.weight", f"model.layers.{layer + 1}.enorm.weight"):
        assert isinstance(names.claim(stray), Unknown)


def test_scales_of_an_unasked_quantised_draft_are_left_out_with_it(tmp_path: Path) -> None:
    model = write_experts(tmp_path / "m", "glm4_moe", fp8=lambda name: True)
    names = planned(model).target.names
    assert isinstance(names.claim("model.layers.3.mlp.experts.0.up_proj.weight_scale_inv"), LeftOut)
    assert isinstance(names.claim("model.layers.3.enorm.weight_scale_inv"), Unknown)


@pytest.mark.parametrize("ask", [None, "none", "ngram"])
def test_what_is_bundled_is_taken_only_when_asked_for(glm: Path, ask: str | None) -> None:
    plans = planned(glm, **({} if ask is None else {"speculative": ask})).plans
    assert plans.draft is None and plans.speculative.value.value == (ask or "none")
    said = [note.condition for note in plans.speculative.notes]
    assert said == (["speculative.bundled"] if ask is None else ["speculative.only_asked"] if ask == "ngram" else [])


# what cannot be


@pytest.mark.parametrize(
    ("family", "files", "says"),
    [
        ("qwen3_moe", {}, "checkpoints of the qwen3_moe family bundle no nextn draft"),
        ("glm4_moe", {"num_nextn_predict_layers": 0}, "announces no nextn layer"),
        ("glm4_moe", {"drop": of_draft}, "stripped"),
        ("deepseek_v3", {"dspark_block_size": 5}, r"DSpark stages \(dspark_block_size\)"),
    ],
)
def test_nextn_of_a_checkpoint_without_such_a_draft_is_refused_by_name(
    tmp_path: Path, family: str, files: dict[str, Any], says: str
) -> None:
    model = write_experts(tmp_path / "m", family, **files)
    with pytest.raises(PlanError, match=says) as caught:
        planned(model, speculative="nextn")
    assert caught.value.slug == "plan/refused"
    assert "speculative = nextn" in str(caught.value)
    assert planned(model).plans.draft is None  # and nothing else stops the target


def test_a_stripped_draft_stays_announced_and_is_no_missing_tensor_of_the_target(tmp_path: Path) -> None:
    resolved = planned(write_experts(tmp_path / "m", "glm4_moe", drop=of_draft))
    document = inspect(resolved)
    assert document["unclaimed"] == [] and not document["runners"]["target"]["missing"]
    assert resolved.plans.speculative.notes == ()


# from another checkpoint


def test_a_draft_may_come_from_another_checkpoint_of_its_target(glm: Path, tmp_path: Path) -> None:
    donor = write_experts(tmp_path / "donor", "glm4_moe", dtype="F32")
    resolved = planned(glm, draft=donor, speculative="nextn")
    plans = resolved.plans
    assert plans.draft is not None and resolved.draft is not None
    assert (plans.draft.checkpoint, plans.draft.dtype.value, plans.target.dtype.value) == (
        str(donor), DType.F32, DType.BF16,
    )  # fmt: skip
    mine, theirs = resolved.target.names, resolved.draft.names
    unused = mine.claim("model.layers.3.enorm.weight")
    assert isinstance(unused, LeftOut) and "taken from another checkpoint" in unused.reason
    assert isinstance(theirs.claim("model.layers.3.enorm.weight"), Place)
    kept = theirs.claim("model.layers.1.mlp.gate.weight")
    assert isinstance(kept, LeftOut) and "the draft alone is taken" in kept.reason
    assert inspect(resolved)["unclaimed"] == []


def test_a_draft_path_without_an_ask_for_nextn_stays_a_whole_model(glm: Path) -> None:
    plans = planned(glm, draft=glm).plans
    assert plans.speculative.value is Algorithm.STANDALONE
    assert plans.draft is not None and plans.draft.num_layers == 3


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"hidden_size": 96}, "hidden size: 64 in the target, 96 in the draft"),
        ({"vocab_size": 544}, "embedding rows: 512 in the target, 544 in the draft"),
        ({"num_hidden_layers": 4}, "layer 3"),
    ],
)
def test_a_draft_of_another_target_is_refused_with_the_first_difference(
    glm: Path, tmp_path: Path, overrides: dict[str, Any], says: str
) -> None:
    donor = write_experts(tmp_path / "donor", "glm4_moe", **overrides)
    with pytest.raises(PlanError, match=says) as caught:
        planned(glm, draft=donor, speculative="nextn")
    assert (caught.value.slug, caught.value.role) == ("plan/pair", "draft")


# the contract


def test_the_contract_names_taps_borrows_and_a_length_that_is_measured(glm: Path) -> None:
    plans = planned(glm, speculative="nextn").plans
    assert plans.contract is not None
    found = json.loads(json.dumps(explain_json(plans, {})))["pair"]
    assert (found["algorithm"], found["num_draft_tokens"], found["measures_length"]) == ("nextn", 3, True)
    assert found["taps"] == [{"point": "after the final norm", "width": 64}]
    assert (found["borrows"], found["vocab_map"], found["draft_vocab"]) == (["embed", "head"], None, 512)
    asked = planned(glm, speculative="nextn", num_draft_tokens=1).plans.contract
    assert asked is not None and (asked.num_draft_tokens.value, asked.measures_length) == (1, False)
    assert "ok: vocab, hidden, layers, taps" in explain_table(plans)
    assert "pair.taps: holds" in explain_why(plans, "pair")


def test_the_memory_of_a_draft_is_its_own_layer_and_nothing_that_it_borrows(models: dict[str, Path]) -> None:
    memory = planned(models["glm4_moe_lite"], speculative="nextn").plans.memory
    row = 32 + 8  # latent and shared rotated key
    assert memory.page_bytes == {"target": 3 * row * 16 * 2, "draft": row * 16 * 2}
    alone = planned(models["glm4_moe_lite"]).plans.memory
    assert alone.weights_bytes["target"] == memory.weights_bytes["target"]
    assert memory.weights_bytes["draft"] < alone.weights_bytes["target"] - 2 * 2 * 512 * 64


def test_hidden_rows_that_wait_for_a_draft_are_in_the_memory_plan(models: dict[str, Path]) -> None:
    """At most one of 64 bfloat16 elements beside each row of the target's cache."""
    plans = planned(models["glm4_moe_lite"], speculative="nextn").plans
    most = plans.memory.target_pages.value * 16 * 64 * 2
    assert plans.memory.hidden_bytes == most == explain_json(plans, {})["memory"]["hidden_bytes"]
    assert plans.memory.target_pages.inputs["memory.hidden_bytes"] == most
    for other in ({}, {"speculative": "ngram"}, {"draft": models["glm4_moe_lite"]}):
        assert planned(models["glm4_moe_lite"], **other).plans.memory.hidden_bytes == 0
    pages = explain_json(plans, {})["memory"]["page_bytes"]
    cache = plans.memory.target_pages.value * pages["target"] + plans.memory.draft_pages.value * pages["draft"]
    weights = sum(plans.memory.weights_bytes.values())
    asked = {"speculative": "nextn", "kv_memory": cache}
    most = planned(models["glm4_moe_lite"], **asked).plans.memory.target_pages.value * 16 * 64 * 2
    for more, told in ((most, []), (most - 1, ["weights, states, hidden rows and pages take"])):
        caps = replace(LAPTOP, memory_available=weights + cache + more)
        notes = planned(models["glm4_moe_lite"], caps=caps, **asked).plans.memory.target_pages.notes
        assert [note.reason.partition(" take")[0] + " take" for note in notes] == told


# own tensors decide (F8, F16)


def test_f8_f16_a_plain_draft_beside_an_fp8_target_is_judged_by_its_own_tensors(tmp_path: Path) -> None:
    model = write_experts(tmp_path / "m", "deepseek_v3", fp8=lambda n: ".experts." in n and not of_draft(n))
    plans = planned(model, caps=GPU_HOST, speculative="nextn", flags={"--draft.shared-experts": "fused"}).plans
    assert plans.draft is not None
    target, draft = plans.target.shared_experts, plans.draft.shared_experts
    assert (target.value, target.rule) == (SEPARATE, "moe.fuse.storage_differs")
    assert (draft.value, draft.source) == (FUSED, Source.ASKED)
    assert plans.target.quantization.reason.startswith("fp8 32x32 (48 tensors) dequantised on load")
    assert plans.draft.quantization.reason == "no quantised tensors (excluded from the checkpoint's fp8)"
    assert planned(model, caps=GPU_HOST).plans.target == plans.target


def test_f8_the_reverse_an_fp8_draft_beside_a_plain_target(tmp_path: Path) -> None:
    model = write_experts(tmp_path / "m", "glm4_moe", fp8=lambda n: of_draft(n) and ".experts." in n)
    plans = planned(model, caps=GPU_HOST, speculative="nextn").plans
    assert plans.draft is not None
    assert (plans.target.shared_experts.value, plans.draft.shared_experts.value) == (FUSED, SEPARATE)
    assert plans.draft.shared_experts.reason.startswith("layer 3: routed experts are stored as fp8 32x32")
    assert "excluded" in plans.target.quantization.reason
    with pytest.raises(PlanError, match=r"draft: shared_experts = fused .*storage_differs"):
        planned(model, caps=GPU_HOST, speculative="nextn", shared_experts="fused")


@pytest.mark.parametrize("value", [FUSED, SEPARATE])
@pytest.mark.parametrize("role", ["target", "draft"])
def test_f8_each_runner_holds_its_own_answer(glm: Path, role: str, value: SharedExperts) -> None:
    other = FUSED if value is SEPARATE else SEPARATE
    flags = {"--shared-experts": other.value, f"--{role}.shared-experts": value.value}
    plans = planned(glm, speculative="nextn", flags=flags).plans
    assert plans.draft is not None
    answers = {"target": plans.target.shared_experts.value, "draft": plans.draft.shared_experts.value}
    assert answers == {"target": other, "draft": other} | {role: value}


def test_f17_the_drafts_names_follow_its_layout_in_both(glm: Path) -> None:
    for ask in ("fused", "separate"):
        resolved = planned(glm, speculative="nextn", draft_shared_experts=ask)
        assert resolved.draft is not None
        claim = resolved.draft.names.claim("model.layers.3.mlp.shared_experts.up_proj.weight")
        assert isinstance(claim, Place) and claim.is_shared_slot is (ask == "fused")
        resolved.draft.names.check(resolved.draft.parameters)
        assert not inspect(resolved)["runners"]["draft"]["unexpected"]


def test_f39_a_type_that_cannot_compute_falls_back_by_one_rule_in_both_runners(tmp_path: Path) -> None:
    plans = planned(write_experts(tmp_path / "m", "glm4_moe", dtype="F16"), speculative="nextn").plans
    assert plans.draft is not None
    rules = {(plan.dtype.value, plan.dtype.rule) for plan in (plans.target, plans.draft)}
    assert rules == {(DType.BF16, "dtype.no_fp16")}


def test_f40_the_table_has_one_line_per_decision_for_both_runners(glm: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        plans = planned(glm, speculative="nextn").plans
    lines = explain_table(plans).splitlines()
    for knob in plans.target.decisions():
        assert len([line for line in lines if line.split("  ")[0] == knob]) == 1
    assert caplog.records == []


# ranks


def test_two_ranks_give_two_reasons_where_one_gives_fused_twice(models: dict[str, Path]) -> None:
    model = models["glm4_moe_lite"]
    one = planned(model, caps=GPU_HOST, speculative="nextn").plans
    two = planned(model, caps=GPU_HOST, speculative="nextn", flags={"--expert-parallel": "2"}).plans
    assert one.draft is not None and two.draft is not None
    assert (one.target.shared_experts.value, one.draft.shared_experts.value) == (FUSED, FUSED)
    for plan, where in ((two.target, "layers 1..2: "), (two.draft, "layer 3: ")):
        decision = plan.shared_experts
        assert (decision.value, decision.rule) == (SEPARATE, "moe.fuse.expert_parallel")
        assert decision.reason.startswith(f"{where}the experts are divided over 2 ranks")
    (line,) = [line for line in explain_table(two).splitlines() if line.startswith("shared_experts")]
    assert "target: layers 1..2: " in line and "draft: layer 3: " in line


# no leaks


ASKS = {
    "target_dtype": ["auto", "float32"],
    "target_shared_experts": ["auto", "fused", "separate"],
    "target_moe_kernel": ["auto", "reference"],
    "target_page_size": ["auto", 4],
    "target_quantization": ["auto", "none"],
    "max_num_seqs": ["auto", 1],
    "num_draft_tokens": ["auto", 1, 3],
}


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    family=st.sampled_from(NEXTN_FAMILIES),
    caps=st.sampled_from([LAPTOP, SERVER, GPU_HOST]),
    asks=st.fixed_dictionaries({}, optional={key: st.sampled_from(values) for key, values in ASKS.items()}),
)
def test_no_plan_of_the_target_changes_that_of_its_draft(
    models: dict[str, Path], family: str, caps: Any, asks: dict[str, Any]
) -> None:
    alone = planned(models[family], caps=caps, speculative="nextn").plans.draft
    beside = planned(models[family], caps=caps, speculative="nextn", **asks).plans.draft
    assert alone is not None and beside is not None
    assert (beside, beside.digest) == (alone, alone.digest)


def test_a_draft_changes_nothing_in_the_plan_of_its_target(models: dict[str, Path]) -> None:
    for model in models.values():
        alone = planned(model).plans.target
        for ask in ("fused", "separate"):
            assert planned(model, speculative="nextn", draft_shared_experts=ask).plans.target == alone


def test_a_shared_config_warns_once(tmp_path: Path) -> None:
    config = tiny_config("glm4_moe") | {"harmless": 1}
    resolved = planned(write_headers(tmp_path / "m", config), speculative="nextn")
    assert [line.split(": ")[0] for line in resolved.warnings if "harmless" in line] == ["target"]
