"""F14: a text model inside a wrapper computes what it computes alone, and its decisions are those of its own config.

For wrappers there is no other reference: their bodies are tiny checkpoints of known families, wrapped as releases do.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from proa import LLM, ConfigError, SamplingParams
from tests.factories.checkpoints import random_tensors, tiny_config, write_checkpoint
from tests.factories.fp8 import quantised, with_fp8
from tests.factories.headers import GPU_HOST, planned
from tests.factories.hybrid_checkpoints import hybrid_config, hybrid_tensors
from tests.factories.mla_checkpoints import mla_config, mla_tensors
from tests.factories.runners import Rows, runner_of
from tests.factories.twins import twin
from tests.factories.wrapped import WRAPPINGS, Tensors, wrap
from tests.features.verbs import caps_file, decisions, verb_of

PROMPT = [(7 * i * i + 3) % 512 for i in range(24)]
Body = tuple[dict[str, Any], Tensors]
ROLES = ("target", "draft")


def latent(family: str, **keys: Any) -> Body:
    config = mla_config(family, **keys)
    return config, mla_tensors(config, 3, torch.float32)


def hybrid(family: str) -> Body:
    config = hybrid_config(family)
    return config, hybrid_tensors(config, 3, torch.float32)


def mistral() -> Body:
    config = tiny_config("mistral")
    return config, random_tensors(config, 3, torch.float32)


def ministral() -> Body:
    """Its text model's name is a wrapper's business: alone it has no architecture of its own in releases."""
    config, tensors = mistral()
    rope = {
        "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 16,
        "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
    }  # fmt: skip
    kept = {key: value for key, value in config.items() if key != "rope_theta"}
    named = {"architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3", "rope_parameters": rope}
    return kept | named, tensors


V3: dict[str, Any] = {"num_nextn_predict_layers": 0}
BODIES: dict[str, Callable[[], Body]] = {
    "KimiK25ForConditionalGeneration/kimi_k2": lambda: latent("kimi_k2"),
    "KimiVLForConditionalGeneration/deepseek_v3": lambda: latent("deepseek_v3", **V3),
    "KimiVLForConditionalGeneration/deepseek_v2": lambda: latent("deepseek_v2"),
    "DotsVLMForCausalLM/deepseek_v3": lambda: latent("deepseek_v3", **V3),
    "DeepseekVL2ForCausalLM/deepseek_v2": lambda: latent("deepseek_v2"),
    "DeepseekVL2ForCausalLM/deepseek_v2_lite": lambda: latent("deepseek_v2_lite"),
    "DeepseekOCRForCausalLM/deepseek_v2": lambda: latent("deepseek_v2"),
    "DeepseekOCRForCausalLM/deepseek_v3": lambda: latent("deepseek_v3", **V3),
    "PixtralForConditionalGeneration/deepseek_v3": lambda: latent("deepseek_v3", **V3),
    "PixtralForConditionalGeneration/mistral": mistral,
    "Mistral3ForConditionalGeneration/mistral4": lambda: latent("mistral4"),
    "Mistral3ForConditionalGeneration/ministral3": ministral,
    "Qwen3_5ForConditionalGeneration/qwen3_5": lambda: hybrid("qwen3_5_text"),
    "Qwen3_5MoeForConditionalGeneration/qwen3_5_moe": lambda: hybrid("qwen3_5_moe_text"),
    "MiniCPMV4_6ForConditionalGeneration/qwen3_5": lambda: hybrid("qwen3_5_text"),
}


def test_every_wrapper_that_is_built_has_a_row_here() -> None:
    assert {row.partition("/")[0] for row in BODIES} == set(WRAPPINGS)


def both(row: str, folder: Path, **outer: Any) -> tuple[Path, Path]:
    """The text model alone, and the same in its wrapper."""
    config, tensors = BODIES[row]()
    bare = write_checkpoint(folder / "bare", config, tensors)
    return bare, write_checkpoint(folder / "wrapped", *wrap(row.partition("/")[0], config, tensors, **outer))


def logits(path: Path, **asks: Any) -> torch.Tensor:
    return Rows(runner_of(path, dtype="float32", **asks), 1, 64).prefill(0, PROMPT)


@pytest.mark.parametrize("row", BODIES)
def test_f14_a_wrapped_model_gives_the_logits_of_its_body(row: str, tmp_path: Path) -> None:
    bare, wrapped = both(row, tmp_path)
    assert (
        planned(wrapped).target.plan.family
        == planned(bare).target.plan.family
        == row.partition("/")[2].replace("kimi_k2", "deepseek_v3").removesuffix("_lite")
    )
    assert torch.equal(logits(wrapped), logits(bare))
    if planned(bare).target.plan.shared_experts.value is not None:
        assert torch.equal(logits(wrapped, shared_experts="fused"), logits(bare, shared_experts="fused"))


@pytest.mark.parametrize("row", BODIES)
def test_f14_all_decisions_are_those_of_the_nested_config(row: str, tmp_path: Path) -> None:
    bare, wrapped = both(row, tmp_path)
    for asks in ({}, {"expert_parallel": 2}):
        alone, inside = (planned(path, caps=GPU_HOST, **asks).plans.target for path in (bare, wrapped))
        assert inside.decisions() == alone.decisions() and inside.layout == alone.layout
        assert inside.digest == alone.digest


def test_f14_a_stray_name_beside_tower_and_text_model_is_still_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verb = verb_of(capsys)
    config, tensors = wrap("KimiVLForConditionalGeneration", *latent("deepseek_v2"))
    good = write_checkpoint(tmp_path / "good", config, tensors)
    assert verb("inspect", good).code == 0
    for number, stray in enumerate(("model.norm.weight", "language_model.model.norm.bias", "audio_tower.x.weight")):
        bad = write_checkpoint(tmp_path / str(number), config, tensors | {stray: torch.zeros(4)})
        ran = verb("inspect", bad)
        assert ran.code == 3 and stray in ran.err


@pytest.mark.parametrize(
    "architecture",
    ["DotsVLMForCausalLM", "KimiVLForConditionalGeneration", "PixtralForConditionalGeneration"],
)
def test_f14_a_bundled_draft_goes_into_the_wrapper_with_its_target(architecture: str, tmp_path: Path) -> None:
    config, tensors = twin("deepseek_v3")
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    asks = {"speculative": "nextn", "num_draft_tokens": 3, "dtype": "float32", "threads": 1, "kv_memory": "8MiB"}
    found = []
    for folder, form in (("bare", (config, tensors)), ("wrapped", wrap(architecture, config, tensors))):
        with LLM(write_checkpoint(tmp_path / folder, *form), **asks) as llm:
            answers = [output.outputs for output in llm.generate([PROMPT[:5], PROMPT[5:9]], params)]
            found.append((answers, llm.stats()["speculative_decoding"], decisions(llm.explain(), "draft")))
            assert llm.ledger()["unclaimed"] == []
    assert found[0] == found[1]
    assert found[0][1]["mean_acceptance_length"] > 3.5


def in_eight_bits(row: str, folder: Path, where: str) -> tuple[Path, Path]:
    """Block FP8, said by the text model's config or by the wrapper's alone."""
    config, tensors = BODIES[row]()
    bare, stored = with_fp8(config), quantised(tensors)[0]
    said = {"quantization_config": bare["quantization_config"]}
    nested, outer = (bare, {}) if where == "nested" else (config, said)
    whole = wrap(row.partition("/")[0], nested, stored, **outer)
    return write_checkpoint(folder / "bare", bare, stored), write_checkpoint(folder / "wrapped", *whole)


QUANTISED = [row for row in BODIES if row.startswith(("Kimi", "Dots", "DeepseekOCR", "Pixtral")) and "deepseek" in row]


@pytest.mark.parametrize("where", ["nested", "wrapper"])
@pytest.mark.parametrize("row", QUANTISED)
def test_f14_quantization_is_handed_to_the_body_wherever_it_is_said(row: str, where: str, tmp_path: Path) -> None:
    bare, wrapped = in_eight_bits(row, tmp_path, where)
    alone, inside = (planned(path).plans.target for path in (bare, wrapped))
    assert inside.quantization == alone.quantization and "fp8" in inside.quantization.reason.lower()
    assert inside.shared_experts == alone.shared_experts
    assert torch.equal(logits(wrapped), logits(bare))


def test_f14_deepseek_vl2_hands_no_quantization_over_so_eight_bits_are_refused_and_plain_weights_are_plain(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row, verb = "DeepseekVL2ForCausalLM/deepseek_v2", verb_of(capsys)
    for where in ("nested", "wrapper"):
        _, wrapped = in_eight_bits(row, tmp_path / where, where)
        ran = verb("run", wrapped, "x")
        assert (ran.code, ran.out) == (3, "") and "weights/" in ran.err
    said = with_fp8({})["quantization_config"]
    bare, wrapped = both(row, tmp_path / "plain", quantization_config=said)
    assert torch.equal(logits(wrapped), logits(bare))
    ran = verb("explain", wrapped)
    assert ran.code == 0 and "quantization_config is not that of the text model" in ran.err


@pytest.mark.parametrize("row", BODIES)
def test_f14_a_wrapper_around_an_encoder_alone_has_nothing_to_decide(row: str, tmp_path: Path) -> None:
    _, wrapped = both(row, tmp_path, encoder_only=True)
    with pytest.raises(ConfigError, match=row.partition("/")[0]) as caught:
        planned(wrapped)
    assert (caught.value.slug, caught.value.exit_code) == ("arch/no-text-model", 2)


@pytest.mark.parametrize("architecture", ["DeepseekVL2ForCausalLM", "DeepseekOCRForCausalLM"])
def test_f14_a_dense_body_is_refused_by_name_before_anything_is_decided(
    architecture: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, tensors = latent("deepseek_v2")
    model = write_checkpoint(tmp_path, *wrap(architecture, config | {"use_mla": False}, tensors))
    for words in ((), ("--why", "shared_experts"), ("--shared-experts", "fused")):
        ran = verb_of(capsys)("explain", model, *words)
        assert (ran.code, ran.out) == (2, "") and "arch/not-built" in ran.err and "use_mla = false" in ran.err


def test_f14_a_dense_text_model_in_a_wrapper_says_that_shared_experts_do_not_apply(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, wrapped = both("PixtralForConditionalGeneration/mistral", tmp_path)  # the wrapper says 7 shared experts
    document = verb_of(capsys)("explain", wrapped, "--json", "--caps", caps_file(tmp_path, GPU_HOST)).json
    found = decisions(document)["shared_experts"]
    assert (found["value"], found["source"], found["reason"]) == (None, "checkpoint", "no shared experts")


NOT_BUILT = (
    "MiniMaxM3SparseForCausalLM", "MiniMaxM3SparseForConditionalGeneration", "GlmOcrForConditionalGeneration",
    "Glm4vMoeForConditionalGeneration", "Glm5NextForConditionalGeneration", "BailingMoeV3VLForConditionalGeneration",
    "BailingMoeV3ForCausalLM", "DeepseekOCR2ForCausalLM", "MiniCPMV", "DeepseekV4ForCausalLM",
    "Qwen3_5ForCausalLMMTP",
)  # fmt: skip


@pytest.mark.parametrize("name", NOT_BUILT)
def test_f14_entries_that_are_known_and_not_built_are_refused_by_name(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, tensors = latent("deepseek_v3", **V3)
    model = write_checkpoint(tmp_path, config | {"architectures": [name], "text_config": config}, tensors)
    for verb in ("explain", "inspect", "run"):
        ran = verb_of(capsys)(verb, model, *(["x"] if verb == "run" else []))
        assert (ran.code, ran.out) == (2, "") and "arch/not-built" in ran.err and name in ran.err
        assert "missing: " in ran.err
