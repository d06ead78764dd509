"""Wrappers as lenses: whose config and quantization is handed on, how names change, and what does not apply.

The rows are the wrapper entries that per-runner decisions must get right; each reads a config whose top level
contradicts the nested one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from proa.arch.blocks import AttentionSpec, MoESpec
from proa.arch.parameters import decoder_parameters
from proa.arch.registry import Reading, family_of, read_config
from proa.arch.weights import LeftOut, NameMap, Place, Unknown
from proa.arch.wrappers import NOT_BUILT, WRAPPERS, body_of
from proa.checkpoint.hf_config import HFView
from proa.errors import ConfigError
from tests.factories.checkpoints import tensor_shapes, tiny_config
from tests.factories.layouts import layout_of
from tests.factories.mla_checkpoints import kimi_k25_config, mla_config, mla_shapes

NESTED_QUANT = {"quant_method": "none", "said_by": "nested"}
OUTER_QUANT = {"quant_method": "none", "said_by": "wrapper"}
# What a wrapper's top level may say beside, or against, its text model.
LIES = {"n_shared_experts": 7, "n_routed_experts": 2, "hidden_size": 3, "num_hidden_layers": 1, "vocab_size": 9}

KIMI_VL = mla_config("kimi_k2", architectures=["DeepseekV3ForCausalLM"], model_type="deepseek_v3")
V2 = mla_config("deepseek_v2")
V3 = mla_config("deepseek_v3", num_nextn_predict_layers=0)
MISTRAL = {key: value for key, value in tiny_config("mistral").items() if key != "architectures"}

ROWS: dict[str, tuple[str, dict[str, Any], str, str]] = {
    # wrapper: key of the nested config, that config, family of the body, prefix of its tensors
    "KimiK25ForConditionalGeneration": ("text_config", mla_config("kimi_k2"), "deepseek_v3", "language_model."),
    "KimiVLForConditionalGeneration": ("text_config", KIMI_VL, "deepseek_v3", "language_model."),
    "DotsVLMForCausalLM": ("language_config", V3, "deepseek_v3", ""),
    "DeepseekVL2ForCausalLM": ("language_config", V2, "deepseek_v2", "language."),
    "DeepseekOCRForCausalLM": ("text_config", V3, "deepseek_v3", ""),
    "PixtralForConditionalGeneration": ("text_config", V3, "deepseek_v3", "language_model."),
    "Mistral3ForConditionalGeneration": ("text_config", mla_config("mistral4"), "mistral4", "language_model."),
}


def wrapped(name: str, **outer: Any) -> dict[str, Any]:
    key, nested, *_ = ROWS[name]
    return {"architectures": [name], **LIES, "vision_config": {"hidden_size": 8}, key: nested, **outer}


def read(config: Mapping[str, Any]) -> Reading:
    return read_config(HFView(config, where="config.json"))


def names_of(found: Reading) -> NameMap:
    stacked = [layer.index for layer in found.spec.layers] if found.family.name == "mistral4" else []
    layout = layout_of(found.spec, fused=[], stacked=stacked)
    names = NameMap(found.weights(found.spec, layout), found.prefixes)
    names.check(decoder_parameters(found.spec, layout))
    return names


@pytest.mark.parametrize("name", ROWS)
def test_the_nested_config_decides_and_not_what_the_wrapper_says_beside_it(name: str) -> None:
    _, nested, family, _ = ROWS[name]
    found = read(wrapped(name))
    assert found.family.name == family
    assert (found.spec.hidden, found.spec.vocab) == (64, 512)
    assert len(found.spec.layers) == nested["num_hidden_layers"]
    experts = found.spec.layers[-1].ffn
    assert isinstance(experts, MoESpec) and experts.shared is not None
    assert (experts.num_experts, experts.shared.count) == (8, nested["n_shared_experts"])
    assert any(name in note for note in found.report.notes)


@pytest.mark.parametrize("name", ROWS)
def test_every_tensor_of_the_text_model_is_claimed_under_the_wrappers_prefix(name: str) -> None:
    _, nested, _, prefix = ROWS[name]
    names = names_of(read(wrapped(name)))
    shapes = mla_shapes(nested)
    for stored, shape in shapes.items():
        claim = names.claim(prefix + stored)
        assert isinstance(claim, Place) and claim.shape == shape
    assert set(names.expected()) == {prefix + stored for stored in shapes}


@pytest.mark.parametrize(
    ("name", "stored", "reason"),
    [
        ("KimiK25ForConditionalGeneration", "vision_tower.encoder.blocks.0.wqkv.weight", "vision tower"),
        ("KimiK25ForConditionalGeneration", "mm_projector.proj.0.bias", "projector"),
        ("KimiVLForConditionalGeneration", "multi_modal_projector.linear_1.weight", "projector"),
        ("DotsVLMForCausalLM", "vision_tower.blocks.3.attn.qkv.weight", "vision tower"),
        ("DeepseekVL2ForCausalLM", "vision.blocks.0.norm1.weight", "vision tower"),
        ("DeepseekVL2ForCausalLM", "image_newline", "projector"),
        ("DeepseekOCRForCausalLM", "model.sam_model.pos_embed", "vision tower"),
        ("DeepseekOCRForCausalLM", "model.projector.layers.weight", "projector"),
        ("Mistral3ForConditionalGeneration", "vision_tower.patch_conv.weight", "vision tower"),
        ("PixtralForConditionalGeneration", "multi_modal_projector.norm.weight", "projector"),
    ],
)
def test_towers_and_projectors_are_left_out_with_the_reason_and_their_like_is_not(
    name: str, stored: str, reason: str
) -> None:
    names = names_of(read(wrapped(name)))
    claim = names.claim(stored)
    assert isinstance(claim, LeftOut) and reason in claim.reason
    assert isinstance(names.claim(f"x.{stored}"), Unknown)


@pytest.mark.parametrize("name", ROWS)
def test_without_the_prefix_a_text_tensor_is_not_the_wrappers(name: str) -> None:
    prefix = ROWS[name][3]
    claim = names_of(read(wrapped(name))).claim("model.norm.weight")
    assert isinstance(claim, Unknown) == bool(prefix)


@pytest.mark.parametrize("name", ROWS)
def test_the_nested_quantization_wins_over_the_wrappers(name: str) -> None:
    key, nested, *_ = ROWS[name]
    config = wrapped(name, quantization_config=OUTER_QUANT)
    config[key] = nested | {"quantization_config": NESTED_QUANT}
    said = body_of(HFView(config, where="config.json")).get("quantization_config", {})
    # DeepSeek-VL2 builds its text model without any quantization, whatever the file says.
    assert said.get("said_by") == (None if name == "DeepseekVL2ForCausalLM" else "nested")


@pytest.mark.parametrize("name", ROWS)
def test_a_body_without_quantization_gets_the_wrappers_if_the_wrapper_hands_it_on(name: str) -> None:
    config = wrapped(name, quantization_config=OUTER_QUANT)
    said = body_of(HFView(config, where="config.json")).get("quantization_config", {})
    is_kept_back = name == "DeepseekVL2ForCausalLM"
    assert said.get("said_by") == (None if is_kept_back else "wrapper")
    notes = read(config).report.notes
    assert any("quantization_config is not that of the text model" in note for note in notes) == is_kept_back


@pytest.mark.parametrize("name", ROWS)
def test_an_encoder_alone_has_no_text_model_to_decide_about(name: str) -> None:
    with pytest.raises(ConfigError, match=name) as caught:
        read(wrapped(name, encoder_only=True))
    assert caught.value.slug == "arch/no-text-model"
    assert read(wrapped(name, encoder_only=False)).spec.hidden == 64


@pytest.mark.parametrize("name", ["DeepseekVL2ForCausalLM", "DeepseekOCRForCausalLM"])
def test_a_dense_body_is_refused_by_name(name: str) -> None:
    key = ROWS[name][0]
    with pytest.raises(ConfigError, match="use_mla = false") as caught:
        read(wrapped(name, **{key: V2 | {"use_mla": False}}))
    assert caught.value.slug == "arch/not-built"
    found = read(wrapped(name, **{key: V2 | {"use_mla": True}}))
    assert found.family.name == "deepseek_v2" and found.report.unknown == {}


def test_deepseek_ocr_with_v3s_router_is_v3_whatever_use_mla_says() -> None:
    found = read(wrapped("DeepseekOCRForCausalLM", text_config=V3 | {"use_mla": False}))
    assert found.family.name == "deepseek_v3"


def test_kimi_vl_reads_the_router_of_its_text_config_not_the_architecture_named_in_it() -> None:
    found = read(wrapped("KimiVLForConditionalGeneration", text_config=V2 | {"architectures": ["LlamaForCausalLM"]}))
    assert found.family.name == "deepseek_v2"


def test_dots_may_keep_the_text_models_keys_at_the_top() -> None:
    config = V3 | {"architectures": ["DotsVLMForCausalLM"], "model_type": "dots_vlm", "vision_config": {"depth": 1}}
    found = read(config)
    assert found.family.name == "deepseek_v3" and found.report.unknown == {}
    assert isinstance(names_of(found).claim("vision_tower.x.weight"), LeftOut)


def test_deepseek_vl2_is_known_by_its_model_type_since_its_releases_name_no_architecture() -> None:
    found = read({"model_type": "deepseek_vl_v2", "language_config": V2})
    assert found.family.name == "deepseek_v2"
    assert "language.model.norm.weight" in names_of(found).expected()


@pytest.mark.parametrize(
    ("text", "family"),
    [
        (MISTRAL, "mistral"),
        (MISTRAL | {"model_type": "ministral3"}, "ministral3"),
        (mla_config("mistral4"), "mistral4"),
        (V3, "deepseek_v3"),
    ],
)
def test_the_body_of_mistral_3_and_pixtral_follows_the_model_type(text: dict[str, Any], family: str) -> None:
    for name in ("PixtralForConditionalGeneration", "Mistral3ForConditionalGeneration"):
        assert read({"architectures": [name], "text_config": text}).family.name == family
    with pytest.raises(ConfigError, match="model_type = 'qwen2'") as caught:
        read({"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text | {"model_type": "qwen2"}})
    assert caught.value.slug == "arch/not-built"


def test_ministral_3_has_yarn_and_queries_that_grow() -> None:
    scaling = {
        "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 64,
        "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
    }  # fmt: skip
    text = {key: value for key, value in MISTRAL.items() if key != "rope_theta"}
    text |= {"model_type": "ministral3", "rope_parameters": scaling}
    found = read({"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text})
    for layer in found.spec.layers:
        assert isinstance(layer.mixer, AttentionSpec) and layer.mixer.query_scale is not None
        assert (layer.mixer.query_scale.beta, layer.mixer.query_scale.original) == (0.1, 64)
        # Both mscales are 1: neither the rotation nor the scores are scaled (transformers, ministral3).
        assert layer.mixer.rope.yarn is not None and layer.mixer.rope.yarn.magnitude == 1.0
        assert layer.mixer.scale == 32**-0.5
    prefixed = {f"language_model.{name}" for name, _ in tensor_shapes(MISTRAL)}
    assert set(names_of(found).expected()) == prefixed


def test_shared_keys_of_the_wrapper_hold_where_the_body_is_silent() -> None:
    text = {key: value for key, value in MISTRAL.items() if key not in ("tie_word_embeddings", "eos_token_id")}
    outer = {"architectures": ["Mistral3ForConditionalGeneration"], "tie_word_embeddings": True, "eos_token_id": 7}
    assert read(outer | {"text_config": text}).spec.tied_head
    assert not read(outer | {"text_config": text | {"tie_word_embeddings": False}}).spec.tied_head
    assert body_of(HFView(outer | {"text_config": text}, where="config.json")).int("eos_token_id") == 7


def test_a_wrapper_without_its_nested_config_names_the_key() -> None:
    with pytest.raises(ConfigError, match=r"KimiK25ForConditionalGeneration keeps .* in text_config"):
        read({"architectures": ["KimiK25ForConditionalGeneration"]})


def test_two_nested_text_models_are_refused() -> None:
    with pytest.raises(ConfigError, match="both text_config and language_config") as caught:
        read(wrapped("DeepseekOCRForCausalLM", language_config=V3))
    assert caught.value.slug == "config/ambiguous-nesting"


def test_an_unknown_wrapper_is_unknown_however_well_known_its_text_model_is() -> None:
    with pytest.raises(ConfigError, match="LlavaForConditionalGeneration") as caught:
        read({"architectures": ["LlavaForConditionalGeneration"], "text_config": tiny_config("mistral")})
    assert caught.value.slug == "arch/unknown"


@pytest.mark.parametrize("name", [*NOT_BUILT, "DeepseekV3ForCausalLMNextN", "Qwen3MoeForCausalLMMTP"])
def test_known_entries_that_are_not_built_are_refused_by_name_with_what_is_missing(name: str) -> None:
    with pytest.raises(ConfigError, match=name) as caught:
        read({"architectures": [name], "text_config": V3})
    assert caught.value.slug == "arch/not-built"
    assert any("missing: " in fact for fact in caught.value.facts)


def test_nothing_is_both_built_and_not_built() -> None:
    wrapping = [name for wrapper in WRAPPERS for name in wrapper.architectures]
    assert len(set(wrapping)) == len(wrapping)
    for name in wrapping:
        with pytest.raises(ConfigError):
            family_of(HFView({"architectures": [name]}, where="config.json"))
    assert not set(wrapping) & set(NOT_BUILT)


def test_a_whole_wrapped_config_of_kimi_k25_is_read() -> None:
    found = read(kimi_k25_config())
    assert found.family.name == "deepseek_v3" and found.report.unknown == {}
    assert found.report.where == "config.json"
