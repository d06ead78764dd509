"""Each family's config as a spec. Expected values are those of the config files and of the released models' cards."""

from __future__ import annotations

from typing import Any

import pytest

from proa.arch.blocks import AttentionSpec, FFNSpec, RopeKind, RopeSpec
from proa.arch.decoder import DecoderSpec
from proa.arch.registry import FAMILIES, family_of, read_config
from proa.checkpoint.hf_config import HFView
from proa.errors import ConfigError
from tests.factories.checkpoints import tiny_config

LLAMA3 = tiny_config("llama")["rope_scaling"]


def spec_of(family: str, **overrides: Any) -> DecoderSpec:
    return read_config(HFView(tiny_config(family, **overrides), where="config.json")).spec


def mixer_of(spec: DecoderSpec) -> AttentionSpec:
    mixer = spec.layers[0].mixer
    assert isinstance(mixer, AttentionSpec)
    return mixer


def rope_of(spec: DecoderSpec) -> RopeSpec:
    return mixer_of(spec).rope


def test_llama_reads_heads_sizes_and_llama3_rope() -> None:
    spec = spec_of("llama")
    mixer = mixer_of(spec)
    assert (spec.family, spec.vocab, spec.hidden, len(spec.layers), spec.max_positions) == ("llama", 512, 64, 3, 1024)
    assert (mixer.num_heads, mixer.num_kv_heads, mixer.head_dim, mixer.scale) == (4, 2, 16, 0.25)
    assert (mixer.qkv_bias, mixer.output_bias, mixer.qk_norm, mixer.window) == (False, False, None, None)
    rope = mixer.rope
    assert (rope.kind, rope.base, rope.dim, rope.factor) == (RopeKind.LLAMA3, 500000.0, 16, 8.0)
    assert (rope.low_freq_factor, rope.high_freq_factor, rope.original_max_position) == (1.0, 4.0, 64)


def test_llama_biases_follow_the_config() -> None:
    spec = spec_of("llama", attention_bias=True, mlp_bias=True)
    ffn = spec.layers[0].ffn
    assert isinstance(ffn, FFNSpec)
    assert (mixer_of(spec).qkv_bias, mixer_of(spec).output_bias, ffn.bias) == (True,) * 3


def test_linear_rope_and_both_spellings_give_the_same_spec() -> None:
    old = spec_of("llama", rope_scaling={"type": "linear", "factor": 2.0}, rope_theta=1e4)
    new = spec_of(
        "llama", rope_scaling=None, rope_theta=None,
        rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
    )  # fmt: skip
    assert old == new
    assert (rope_of(old).kind, rope_of(old).factor) == (RopeKind.LINEAR, 2.0)


def test_an_absent_head_dim_is_hidden_over_heads_and_absent_kv_heads_are_all_heads() -> None:
    mixer = mixer_of(spec_of("llama", head_dim=None, num_key_value_heads=None))
    assert (mixer.head_dim, mixer.num_kv_heads) == (16, 4)


def test_qwen2_has_biased_q_k_v_and_an_unbiased_output() -> None:
    spec = spec_of("qwen2")
    mixer = mixer_of(spec)
    assert (mixer.qkv_bias, mixer.output_bias, mixer.qk_norm, spec.tied_head) == (True, False, None, True)


def test_qwen2_slides_only_from_max_window_layers_on_and_only_when_told_to() -> None:
    off = spec_of("qwen2", sliding_window=32, max_window_layers=1)
    on = spec_of("qwen2", use_sliding_window=True, sliding_window=32, max_window_layers=1)
    assert [layer.mixer.window for layer in off.layers] == [None, None]
    assert [layer.mixer.window for layer in on.layers] == [None, 32]


def test_layer_types_name_the_sliding_layers_where_the_config_lists_them() -> None:
    kinds = ["sliding_attention", "full_attention"]
    spec = spec_of("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=2, layer_types=kinds)
    assert [layer.mixer.window for layer in spec.layers] == [8, None]


@pytest.mark.parametrize("kinds", [["sliding_attention"] * 3, ["full_attention"] * 2, ["chunked_attention"] * 3])
def test_layer_types_that_do_not_fit_the_model_are_an_error(kinds: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: layer_types") as caught:
        spec_of("llama", layer_types=kinds)
    assert caught.value.slug == "config/value"


def test_qwen3_normalises_q_and_k_per_head_and_states_its_head_size() -> None:
    mixer = mixer_of(spec_of("qwen3"))
    assert mixer.qk_norm is not None
    assert not mixer.qk_norm.is_whole
    assert (mixer.qk_norm.eps, mixer.head_dim, mixer.qkv_bias, mixer.scale) == (1e-6, 32, False, 32**-0.5)


def test_mistral_slides_in_every_layer_or_in_none() -> None:
    assert {layer.mixer.window for layer in spec_of("mistral").layers} == {None}
    assert [layer.mixer.window for layer in spec_of("mistral", sliding_window=24).layers] == [24, 24, 24]


@pytest.mark.parametrize(
    ("overrides", "what"),
    [
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3"),
        ({"num_attention_heads": 0}, "num_attention_heads = 0"),
        ({"head_dim": 15}, "head_dim = 15"),
        ({"head_dim": None, "hidden_size": 66}, "hidden_size = 66"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000"),
        ({"vocab_size": -1}, "vocab_size = -1"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps = 0"),
        ({"rope_theta": -1.0}, "rope_theta = -1"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor = 0"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor = 1 must be greater than 1"),
        ({"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 0}}, "original_max_position_embeddings = 0"),
    ],
)
def test_sizes_that_cannot_be_are_named(overrides: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        spec_of("llama", **overrides)
    assert (caught.value.slug, what in str(caught.value), "config.json" in str(caught.value)) == (
        "config/value", True, True,
    )  # fmt: skip


def test_an_unknown_architecture_names_the_nearest_known_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        family_of(HFView({"architectures": ["Qwen2VLForCausalLM"]}, where="here/config.json"))
    text = str(caught.value)
    assert caught.value.slug == "arch/unknown"
    assert "here/config.json" in text and "Qwen2VLForCausalLM" in text and "Qwen2ForCausalLM" in text


def test_a_config_without_architectures_is_not_guessed_at() -> None:
    with pytest.raises(ConfigError, match="architecture llama"):
        family_of(HFView({"model_type": "llama"}, where="config.json"))


def test_no_two_families_claim_one_architecture() -> None:
    names = [name for family in FAMILIES for name in family.architectures]
    assert len(names) == len(set(names))
