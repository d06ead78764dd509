"""F8, F10, F16, F17, F37, F38 and F40: two runners of one checkpoint, each with answers and kernels of its own."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from proa import LLM, SamplingParams
from tests.factories.checkpoints import write_checkpoint
from tests.factories.fp8 import quantised, with_fp8
from tests.factories.headers import write_headers
from tests.factories.hybrid_checkpoints import hybrid_config, hybrid_shapes
from tests.factories.native import probed, why_not
from tests.factories.twins import twin, write_twin
from tests.features.verbs import Verb, decisions
from tests.plan.expert_headers import NEXTN_FAMILIES, write_experts

WHY_NOT = why_not(probed())
K = 3
SETTINGS = {"dtype": "float32", "threads": 1, "max_model_len": 256, "kv_memory": "8MiB"}
NEXTN = {**SETTINGS, "speculative": "nextn", "num_draft_tokens": K}
PROMPTS = [[10, 11, 12], [40] * 7]
SAMPLED = SamplingParams(temperature=0.8, seed=3, max_tokens=24, logprobs=2, ignore_eos=True)
GREEDY = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
ROLES = ("target", "draft")


def in_eight_bits(path: Path, which: Any) -> Path:
    """A twin (its draft is layer 1) of which some linear maps are stored as block FP8."""
    config, tensors = twin("glm4_moe")
    return write_checkpoint(path, with_fp8(config), quantised(tensors, which=which)[0])


def with_plain_draft(path: Path, family: str) -> Path:
    """The target in block FP8, its draft the values that these codes mean, as plain weights."""
    config, tensors = twin(family)
    stored, meant = quantised(tensors, which=lambda name: ".layers.0." in name)
    own = [name for name in tensors if ".layers.0." in name]
    draft = {name.replace(".layers.0.", ".layers.1."): meant[name].clone() for name in own}
    return write_checkpoint(path, with_fp8(config), stored | draft)


def routed_of_target(name: str) -> bool:
    return ".experts." in name and ".layers.0." in name


def answers(llm: LLM, params: SamplingParams = SAMPLED) -> list[Any]:
    return [output.outputs for output in llm.generate(PROMPTS, params)]


# F8, F10, F16


def test_f8_target_and_draft_hold_different_answers_before_and_after_they_ran(tmp_path: Path, verb: Verb) -> None:
    model = in_eight_bits(tmp_path, routed_of_target)
    words = (model, "--speculative", "nextn", "--draft.shared-experts", "fused")
    explained = verb("explain", *words, "--json").json
    with LLM(model, draft_shared_experts="fused", **NEXTN) as llm:
        before = llm.explain()
        llm.generate(PROMPTS, GREEDY)
        after, built = llm.explain(), {role: said for role, (said, _) in llm.descriptions().items()}
    assert before == after
    for document in (explained, after):
        target, draft = (decisions(document, role)["shared_experts"] for role in ROLES)
        assert (target["value"], target["rule"], target["requested"]) == (
            "separate", "moe.fuse.storage_differs", "auto",
        )  # fmt: skip
        assert (draft["value"], draft["rule"], draft["requested"]) == ("fused", "moe.fuse.asked", "fused")
    assert built["target"]["layout"]["shared_experts"] == {"0": "separate"}
    assert built["draft"]["layout"]["shared_experts"] == {"1": "fused"}
    refused = verb("explain", *words[:-2], "--shared-experts", "fused")
    assert refused.code == 2 and "target: shared_experts = fused" in refused.err


def test_f8_the_reverse_the_draft_in_eight_bits_is_separate_and_its_target_is_fused(tmp_path: Path) -> None:
    model = in_eight_bits(tmp_path, lambda name: ".experts." in name and ".layers.1." in name)
    with LLM(model, target_shared_experts="fused", **NEXTN) as llm:
        answers(llm)
        found = {role: decisions(llm.explain(), role)["shared_experts"] for role in ROLES}
    assert (found["target"]["value"], found["draft"]["value"]) == ("fused", "separate")
    assert found["draft"]["rule"] == "moe.fuse.storage_differs"


def test_f10_both_runners_answers_are_listed_with_rule_inputs_and_source(tmp_path: Path) -> None:
    with LLM(write_twin("deepseek_v3", tmp_path), target_shared_experts="fused", **NEXTN) as llm:
        answers(llm)
        found = json.loads(json.dumps(llm.explain()))["runners"]
    for role in ROLES:
        assert found[role]["role"] == role
        for name, decision in found[role]["decisions"].items():
            assert decision["rule"] and decision["reason"] and decision["source"], name
    target, draft = (found[role]["decisions"]["shared_experts"] for role in ROLES)
    assert (target["value"], target["source"]) == ("fused", "asked")
    assert target["inputs"]["routed.storage"] == target["inputs"]["shared.storage"] == "float32"
    assert [note["condition"] for note in target["notes"]] == ["moe.fuse.no_gain"]
    assert (draft["value"], draft["source"], draft["rule"]) == ("separate", "hardware", "moe.fuse.no_gain")
    assert draft["inputs"]["plan.device"] == "cpu"


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_f16_a_draft_that_quantisation_left_out_is_plain_loads_whole_and_is_right(family: str, tmp_path: Path) -> None:
    model = with_plain_draft(tmp_path, family)
    with LLM(model, **NEXTN) as llm:
        llm.generate(PROMPTS, GREEDY)
        explained, ledger, stats = llm.explain(), llm.ledger(), llm.stats()
    assert decisions(explained, "draft")["quantization"]["reason"] == (
        "no quantised tensors (excluded from the checkpoint's fp8)"
    )
    assert "fp8" in decisions(explained, "target")["quantization"]["reason"].lower()
    for role in ROLES:
        account = ledger["runners"][role]
        assert account["unexpected"] == account["missing"] == account["left_out"] == []
        assert account["tensors"]["total"] == account["tensors"]["placed"] + account["tensors"]["borrowed"]
    assert stats["speculative_decoding"]["mean_acceptance_length"] > K + 0.5


@pytest.mark.parametrize("excluded", [True, False], ids=["excluded", "in eight bits too"])
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5", "qwen3_5_moe"])
def test_f16_a_draft_in_a_wrapper_is_asked_with_the_form_of_its_own_tensors(
    family: str, excluded: bool, tmp_path: Path, gpu: tuple[str, Path], verb: Verb
) -> None:
    """Qwen3.5's `mtp.*` beside a text model in eight bits: what the config says of the whole does not decide."""
    config = with_fp8(hybrid_config(family))
    shapes = hybrid_shapes(config)
    in_fp8 = [name for name in shapes if name.endswith("_proj.weight") and not (excluded and name.startswith("mtp."))]
    scales = {f"{name}_scale_inv": tuple(-(-size // 32) for size in shapes[name]) for name in in_fp8}
    kinds = dict.fromkeys(in_fp8, "F8_E4M3") | dict.fromkeys(scales, "F32")
    model = write_headers(tmp_path, config, shapes={**shapes, **scales}, dtypes=kinds)
    words = (model, "--json", "--speculative", "nextn")
    found = {role: decisions(verb("explain", *words, *gpu).json, role)["quantization"] for role in ROLES}
    assert "fp8" in found["target"]["reason"].lower()
    if excluded:
        assert found["draft"]["reason"] == "no quantised tensors (excluded from the checkpoint's fp8)"
    else:
        assert "fp8" in found["draft"]["reason"].lower()
    account = verb("inspect", *words)
    assert account.code == 0 and account.json["unclaimed"] == []
    assert account.json["runners"]["draft"]["unexpected"] == account.json["runners"]["draft"]["missing"] == []


# F17


NOTHING = "(?!)"
# Names that are stored in eight bits, what is asked for, and whether the draft is fused then (on a CPU, where nothing
# speaks for it but an ask). The draft's layer is number 3, in GLM-5 number 4.
HOW: dict[str, tuple[str, tuple[str, ...], bool]] = {
    "as planned": (NOTHING, (), False),
    "fused": (NOTHING, ("--shared-experts", "fused"), True),
    "separate": (NOTHING, ("--shared-experts", "separate"), False),
    "only the draft fused": (NOTHING, ("--target.shared-experts", "separate", "--draft.shared-experts", "fused"), True),
    "only the target fused": (
        NOTHING, ("--target.shared-experts", "fused", "--draft.shared-experts", "separate"), False,
    ),
    "over two ranks": (NOTHING, ("--expert-parallel", "2"), False),
    "routed experts in eight bits": (r"\.experts\.", (), False),
    "the draft's routed experts in eight bits": (
        r"layers\.LAST\..*\.experts\.", ("--target.shared-experts", "fused"), False,
    ),
    "all in eight bits": ("", ("--shared-experts", "fused"), True),
}  # fmt: skip


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("family", NEXTN_FAMILIES)
def test_f17_every_tensor_of_the_draft_has_one_place_whatever_its_layout(
    family: str, how: str, tmp_path: Path, verb: Verb
) -> None:
    pattern, words, is_fused = HOW[how]
    in_fp8 = re.compile(pattern.replace("LAST", "4" if family == "glm_moe_dsa" else "3"))
    model = write_experts(tmp_path, family, fp8=lambda name: in_fp8.search(name) is not None)
    ran = verb("inspect", model, "--json", "--speculative", "nextn", *words)
    assert ran.code == 0, ran.err
    for role in ROLES:
        account = ran.json["runners"][role]
        assert (account["unexpected"], account["missing"], account["left_out"]) == ([], [], [])
        tensors, parameters = account["tensors"], account["parameters"]
        assert tensors["total"] == tensors["placed"] + tensors["fused"] + tensors["borrowed"]
        assert parameters["total"] == parameters["filled"] + parameters["borrowed"]
        assert parameters["twice"] == parameters["missing"] == 0
    assert ran.json["unclaimed"] == []
    assert (ran.json["runners"]["draft"]["tensors"]["fused"] > 0) is is_fused


@pytest.mark.parametrize("layout", ["fused", "separate"])
def test_f17_a_loaded_draft_took_every_tensor_of_its_layer_once(layout: str, tmp_path: Path) -> None:
    with LLM(write_twin("glm4_moe", tmp_path), draft_shared_experts=layout, **NEXTN) as llm:
        account = llm.ledger()["runners"]["draft"]
        llm.generate(PROMPTS, GREEDY)
        assert llm.stats()["speculative_decoding"]["mean_acceptance_length"] > 3.5
    layer = len([name for name in twin("glm4_moe")[1] if name.startswith("model.layers.1.")])
    assert account["tensors"]["total"] == layer
    assert (account["unexpected"], account["missing"], account["parameters"]["twice"]) == ([], [], 0)


# F37


@pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
@pytest.mark.parametrize("asked", [("native", "reference"), ("reference", "native")])
def test_f37_each_runner_runs_the_experts_kernel_of_its_plan_from_start_to_end(
    asked: tuple[str, str], tmp_path: Path
) -> None:
    asks = {"target_moe_kernel": asked[0], "draft_moe_kernel": asked[1]}
    with LLM(write_twin("glm4_moe", tmp_path), **asks, **NEXTN) as llm:
        runners = llm._open_parts.runners
        packed = {role: used(runner.kernel_calls()) for role, runner in runners.items()}
        llm.generate(PROMPTS, GREEDY)
        calls = {role: runner.kernel_calls() for role, runner in runners.items()}
        said = {role: told["moe_kernel"] for role, (told, _) in llm.descriptions().items()}
        planned = {role: decisions(llm.explain(), role)["moe_kernel"]["value"] for role in ROLES}
    expected = dict(zip(ROLES, asked, strict=True))
    assert said == planned == expected
    for role in ROLES:
        assert packed[role] == used(calls[role]) == {expected[role]}  # while building, and while running
        counts = [calls[role][f"{op}/{expected[role]}"] for op in ("route", "experts")]
        assert counts[0] == counts[1] > 10


def used(calls: dict[str, int]) -> set[str]:
    """The backends of every op of experts that was called."""
    ops = {name: backend for name, _, backend in (key.partition("/") for key in calls)}
    return {ops[op] for op in ("pack_experts", "route", "experts") if op in ops}


# F38


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5", "qwen3_5_moe"])
def test_f38_the_draft_of_a_hybrid_has_no_linear_layers_and_says_so(
    family: str, tmp_path: Path, gpu: tuple[str, Path], verb: Verb
) -> None:
    config = hybrid_config(family)
    model = write_headers(tmp_path, config, shapes=hybrid_shapes(config))
    words = (model, "--speculative", "nextn", *gpu)
    document = verb("explain", *words, "--json").json
    for phase in ("prefill", "decode", "verify"):
        target, draft = (decisions(document, role)[f"linear_attention.{phase}"] for role in ROLES)
        assert target["value"] is not None
        assert (draft["value"], draft["source"]) == (None, "checkpoint")
        assert draft["reason"] == "0 linear-attention layers"
        (line,) = [
            one for one in verb("explain", *words).out.splitlines() if one.startswith(f"linear_attention.{phase} ")
        ]
        assert "not applicable" in line and "draft: 0 linear-attention layers" in line
    refused = verb("explain", *words, "--draft.linear-attention", "reference")
    assert refused.code == 2 and "plan/does-not-apply" in refused.err and "draft" in refused.err


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"layer_types": ["linear_attention"] * 4}, "announces no nextn layer"),
        ({"layer_types": ["full_attention", "mamba", "full_attention", "full_attention"]}, "layer_types must say"),
    ],
)
def test_f38_a_hybrid_that_cannot_be_is_refused(
    keys: dict[str, Any], says: str, tmp_path: Path, gpu: tuple[str, Path], verb: Verb
) -> None:
    config = hybrid_config("qwen3_next")
    model = write_headers(tmp_path, config | keys, shapes=hybrid_shapes(config))
    ran = verb("explain", model, "--speculative", "nextn", *gpu)
    assert (ran.code, ran.out) == (2, "") and says in ran.err


# F40


def test_f40_one_line_per_decision_and_one_per_runner(tmp_path: Path, verb: Verb) -> None:
    model = write_twin("glm4_moe", tmp_path)
    words = ("--speculative", "nextn", "--dtype", "float32", "--threads", "1", "--kv-memory", "8MiB")
    document, table = verb("explain", model, *words, "--json").json, verb("explain", model, *words)
    knobs = [set(decisions(document, role)) for role in ROLES]
    assert knobs[0] == knobs[1]
    for knob in knobs[0]:
        lines = [line for line in table.out.splitlines() if line.split("  ")[0].rstrip() == knob]
        assert len(lines) == 1, knob
    done = verb("run", model, "x", "--raw", "--max-tokens", "4", "--num-draft-tokens", "2", *words)
    assert done.code == 0, done.err
    logged = done.err.splitlines()
    for role, family in zip(ROLES, ("glm4_moe", "glm4_moe/nextn"), strict=True):
        (line,) = [one for one in logged if one.startswith(f"{role} ({family}):")]
        for knob in ("dtype", "quantization", "shared_experts", "moe_kernel", "matmul_kernel", "attention"):
            assert len(re.findall(rf"(?:^|[ :,]){knob} ", line)) == 1, (knob, line)
    for knob in ("shared_experts", "moe_kernel"):
        assert len([line for line in logged if knob in line]) == len(ROLES)
