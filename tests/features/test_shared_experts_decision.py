"""F1-F5, F12 and F15: the shared-experts decision as an outsider sees it, through `proa explain` on headers alone."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from proa import LLM
from tests.factories.headers import LAPTOP, SERVER, write_headers
from tests.factories.hybrid_checkpoints import hybrid_config, hybrid_shapes
from tests.factories.mla_checkpoints import mla_config
from tests.factories.twins import write_twin
from tests.features.verbs import FUSED_ASKED, SEPARATE_ASKED, Verb, caps_file, decisions, edit
from tests.plan.expert_headers import SHARED_FAMILIES, config_of, shapes_of, write_experts

Host = tuple[str, Path]
TWO_RANKS = ("--expert-parallel", "2")


def routed_only(name: str) -> bool:
    return ".experts." in name


@pytest.fixture
def glm(tmp_path: Path) -> Path:
    return write_experts(tmp_path / "glm", "glm4_moe", num_nextn_predict_layers=0)


def without_data(model: Path, folder: Path) -> Path:
    """A copy whose weight file ends where its data would begin."""
    copy = shutil.copytree(model, folder)
    stored = (model / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(stored[: 8 + int.from_bytes(stored[:8], "little")])
    return copy


@pytest.mark.parametrize("ask", [(), FUSED_ASKED], ids=["auto", "fused"])
def test_f1_headers_alone_give_the_decision_and_the_digest_that_a_built_engine_has(
    ask: tuple[str, ...], tmp_path: Path, verb: Verb
) -> None:
    model = write_twin("glm4_moe", tmp_path / "whole")
    headers = without_data(model, tmp_path / "headers")
    common = ("--speculative", "nextn", "--threads", "1", "--kv-memory", "8MiB", *ask)
    explained = verb("explain", headers, "--json", *common).json
    settings = {"speculative": "nextn", "threads": 1, "kv_memory": "8MiB"}
    with LLM(model, **settings, **({"shared_experts": "fused"} if ask else {})) as llm:
        built = llm.explain()
        found = {role: set(said["layout"]["shared_experts"].values()) for role, (said, _) in llm.descriptions().items()}
    said = {role: decisions(explained, role)["shared_experts"]["value"] for role in ("target", "draft")}
    assert said == dict.fromkeys(("target", "draft"), "fused" if ask else "separate")
    assert found == {role: {value} for role, value in said.items()}
    assert verb("run", headers, "x", *common).code == 3  # there are no weights to run
    for role in ("target", "draft"):
        assert explained["runners"][role]["digest"] == built["runners"][role]["digest"]
    assert explained["digest"] == built["digest"]


EDITS: dict[str, tuple[dict[str, Any], str | None, str]] = {
    "none shared": ({"n_shared_experts": 0}, None, "shared_experts.absent"),
    "one shared": ({"n_shared_experts": 1}, "fused", "moe.fuse.ok"),
    "two shared": ({"n_shared_experts": 2}, "fused", "moe.fuse.ok"),
    "as many experts as no release has": ({"n_routed_experts": 6}, "fused", "moe.fuse.ok"),
    "quantization without quantised tensors": (
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, "fused", "moe.fuse.ok"
    ),
}  # fmt: skip


@pytest.mark.parametrize("edited", EDITS)
def test_f2_the_answer_follows_an_edited_config(edited: str, glm: Path, gpu: Host, verb: Verb) -> None:
    keys, value, rule = EDITS[edited]
    edit(glm, **keys)
    ran = verb("explain", glm, "--json", *gpu)
    found = decisions(ran.json)["shared_experts"]
    assert (ran.code, found["value"], found["rule"]) == (0, value, rule)


def test_f2_the_answer_follows_the_stored_form_of_the_tensors(tmp_path: Path, gpu: Host, verb: Verb) -> None:
    model = write_experts(tmp_path / "m", "glm4_moe", fp8=routed_only, num_nextn_predict_layers=0)
    mixed = decisions(verb("explain", model, "--json", *gpu).json)["shared_experts"]
    assert (mixed["value"], mixed["rule"]) == ("separate", "moe.fuse.storage_differs")
    assert mixed["inputs"]["routed.storage"] == "fp8 32x32"
    alike = write_experts(tmp_path / "n", "glm4_moe", fp8=lambda name: True, num_nextn_predict_layers=0)
    found = decisions(verb("explain", alike, "--json", *gpu).json)["shared_experts"]
    assert (found["value"], found["inputs"]["shared.storage"]) == ("fused", "fp8 32x32")


# Per condition: how a user brings it about, and what must be listed beside it. `no_slots` needs a kernel package whose
# experts have no slots, `activation_differs` a family with a limit on some experts only; none exists
# (tests/plan/test_shared_experts.py judges the first itself, tests/families/test_hand_made.py has such a family).
ROWS: dict[str, tuple[dict[str, Any], tuple[str, ...], bool]] = {
    "moe.fuse.storage_differs": ({"fp8": routed_only}, (), True),
    "moe.fuse.width_differs": ({"shared_expert_intermediate_size": 48}, (), True),
    "moe.fuse.expert_parallel": ({}, TWO_RANKS, True),
    "moe.fuse.no_gain": ({}, (), False),
}
OTHERS = {"moe.fuse.no_slots", "moe.fuse.activation_differs"}


@pytest.mark.parametrize("rule", ROWS)
def test_f3_each_condition_of_the_published_table_can_be_the_reason_and_all_are_shown(
    rule: str, tmp_path: Path, gpu: Host, laptop: Host, verb: Verb
) -> None:
    files, words, on_gpu = ROWS[rule]
    host = gpu if on_gpu else laptop
    family = "qwen2_moe" if "shared_expert_intermediate_size" in files else "glm4_moe"
    published = {e["family"]: e["conditions"]["shared_experts"] for e in verb("explain", "--families", "--json").json
                 if "family" in e}[family]  # fmt: skip
    assert set(published) == set(ROWS) | OTHERS
    model = write_experts(tmp_path / "m", family, **files)
    found = decisions(verb("explain", model, "--json", *host, *words).json)["shared_experts"]
    assert (found["value"], found["rule"]) == ("separate", rule)
    why = verb("explain", model, "--why", "shared_experts", *host, *words)
    for condition in published:
        (line,) = [line for line in why.out.splitlines() if f": {condition} (" in line]
        assert line.startswith("    fused") and "no facts" not in line
        assert ("blocked: " in line, " holds " in line) == (condition == rule, condition != rule)


@pytest.mark.parametrize("family", SHARED_FAMILIES)
def test_f3_in_every_family_the_first_blocking_condition_wins_and_the_others_are_listed(
    family: str, tmp_path: Path, laptop: Host, verb: Verb
) -> None:
    shared = {name: "F32" for name in shapes_of(config_of(family)) if "shared_expert" in name}
    model = write_experts(tmp_path / "m", family, dtypes=shared)
    found = decisions(verb("explain", model, "--json", *laptop, *TWO_RANKS).json)["shared_experts"]
    order = ["moe.fuse.storage_differs", "moe.fuse.expert_parallel", "moe.fuse.no_gain"]
    assert (found["value"], found["rule"]) == ("separate", order[0])
    assert [entry["rule"] for entry in found["rejected"]] == order
    assert {entry["value"] for entry in found["rejected"]} == {"fused"}


def test_f4_the_four_asks(glm: Path, tmp_path: Path, gpu: Host, laptop: Host, verb: Verb) -> None:
    auto = decisions(verb("explain", glm, "--json", *gpu).json)["shared_experts"]
    assert (auto["value"], auto["requested"], auto["source"]) == ("fused", "auto", "default")
    separate = decisions(verb("explain", glm, "--json", *gpu, *SEPARATE_ASKED).json)["shared_experts"]
    assert (separate["value"], separate["requested"], separate["source"]) == ("separate", "separate", "asked")
    assert (separate["inputs"], separate["rejected"], separate["notes"]) == ({}, [], [])
    assert "no condition was asked" in verb("explain", glm, "--why", "shared-experts", *gpu, *SEPARATE_ASKED).out
    mixed = write_experts(tmp_path / "mixed", "glm4_moe", fp8=routed_only)
    refused = verb("explain", mixed, *gpu, *FUSED_ASKED)
    assert (refused.code, refused.out) == (2, "")
    assert "PlanError [plan/shared-experts]: target: " in refused.err and "--shared-experts" in refused.err
    assert "moe.fuse.storage_differs: routed experts are stored as fp8 32x32, shared ones as bfloat16" in refused.err
    overridden = decisions(verb("explain", glm, "--json", *laptop, *FUSED_ASKED).json)["shared_experts"]
    assert (overridden["value"], overridden["source"], overridden["rejected"]) == ("fused", "asked", [])
    assert [note["condition"] for note in overridden["notes"]] == ["moe.fuse.no_gain"]


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_f5_experts_in_eight_bits_beside_plain_shared_ones_are_never_fused(
    family: str, tmp_path: Path, gpu: Host, verb: Verb
) -> None:
    model = write_experts(tmp_path / "m", family, fp8=routed_only)
    found = decisions(verb("explain", model, "--json", *gpu).json)["shared_experts"]
    assert (found["value"], found["rule"], found["source"]) == ("separate", "moe.fuse.storage_differs", "checkpoint")
    for asked in (FUSED_ASKED, ("--target.shared-experts", "fused")):
        assert verb("explain", model, *gpu, *asked).code == 2
    assert verb("explain", model, *gpu, *SEPARATE_ASKED).code == 0


@pytest.mark.parametrize(
    ("architecture", "family"),
    [
        ("DeepseekV3ForCausalLM", "deepseek_v3"),
        ("MistralLarge3ForCausalLM", "deepseek_v3"),
        ("DeepseekV32ForCausalLM", "deepseek_v32"),
        ("GlmMoeDsaForCausalLM", "glm_moe_dsa"),
        ("Glm4MoeLiteForCausalLM", "glm4_moe_lite"),
    ],
)
def test_f12_every_name_leads_to_one_table_of_conditions_for_target_and_draft(
    architecture: str, family: str, tmp_path: Path, gpu: Host, verb: Verb
) -> None:
    model = write_experts(tmp_path / "m", family, architectures=[architecture])
    explained = verb("explain", model, "--json", "--speculative", "nextn", *gpu).json
    assert explained["runners"]["target"]["family"] == family
    assert explained["runners"]["draft"]["family"] == f"{family}/nextn"
    for role in ("target", "draft"):
        found = decisions(explained, role)["shared_experts"]
        assert (found["value"], found["rule"]) == ("fused", "moe.fuse.ok")


@pytest.mark.parametrize("name", ["DeepseekV3ForCausalLMNextN", "GlmMoeDsaForCausalLMNextN", "Glm4MoeForCausalLMNextN"])
def test_f12_the_name_of_a_draft_class_is_no_target_and_refused_by_name(
    name: str, glm: Path, gpu: Host, verb: Verb
) -> None:
    edit(glm, architectures=[name])
    ran = verb("explain", glm, *gpu)
    assert (ran.code, ran.out) == (2, "")
    assert "arch/not-built" in ran.err and name in ran.err


@pytest.mark.parametrize("ask", [(), FUSED_ASKED, SEPARATE_ASKED], ids=["auto", "fused", "separate"])
def test_f15_the_text_model_alone_and_inside_its_wrapper_get_the_same_decision(
    ask: tuple[str, ...], tmp_path: Path, gpu: Host, verb: Verb
) -> None:
    found = []
    for family in ("qwen3_5_moe_text", "qwen3_5_moe"):
        config = hybrid_config(family)
        model = write_headers(tmp_path / family, config, shapes=hybrid_shapes(config))
        words = (model, "--json", "--speculative", "nextn", *gpu, *ask)
        document = verb("explain", *words).json
        found.append([decisions(document, role)["shared_experts"] for role in ("target", "draft")])
        account = verb("inspect", model, "--json", "--speculative", "nextn", *ask).json
        assert account["unclaimed"] == []
    assert found[0] == found[1]
    assert [one["value"] for one in found[0]] == [ask[1] if ask else "fused"] * 2


def test_f15_contradicting_words_beside_the_text_models_config_change_nothing(
    tmp_path: Path, gpu: Host, verb: Verb
) -> None:
    text = mla_config("deepseek_v3", num_nextn_predict_layers=0)
    model = write_experts(tmp_path / "bare", "deepseek_v3", num_nextn_predict_layers=0)
    alone = decisions(verb("explain", model, "--json", *gpu).json)["shared_experts"]
    wrapped = {"architectures": ["DotsVLMForCausalLM"], "n_shared_experts": 0, "language_config": text}
    (model / "config.json").write_text(json.dumps(wrapped))
    assert decisions(verb("explain", model, "--json", *gpu).json)["shared_experts"] == alone


@pytest.mark.parametrize("isa", [LAPTOP.isa, SERVER.isa], ids=["without bf16", "with bf16"])
def test_f39_a_type_that_cannot_compute_falls_back_by_one_rule_in_both_runners(
    isa: tuple[str, ...], tmp_path: Path, verb: Verb
) -> None:
    model = write_experts(tmp_path / "m", "glm4_moe", dtype="F16")
    host = caps_file(tmp_path, replace(LAPTOP, isa=isa))
    document = verb("explain", model, "--json", "--speculative", "nextn", "--caps", host).json
    target, draft = (decisions(document, role)["dtype"] for role in ("target", "draft"))
    for found in (target, draft):
        assert (found["value"], found["rule"], found["source"]) == ("bfloat16", "dtype.no_fp16", "hardware")
        assert [entry["value"] for entry in found["rejected"]] == ["float16"]
    assert target["reason"] == draft["reason"]
