"""Configs of hybrid families as specs. Expected values are those of the config files and of the models' cards."""

from __future__ import annotations

from typing import Any

import pytest

from proa.arch.blocks import AttentionSpec, FFNSpec, GroupScore, MLASpec, MoESpec, RopeKind, Score, StateTensor
from proa.arch.decoder import DecoderSpec
from proa.arch.delta_blocks import Decay, DeltaSpec, OutputGate
from proa.arch.parameters import main_ropes
from proa.arch.registry import Reading, read_config
from proa.checkpoint.hf_config import HFView
from proa.errors import ConfigError
from proa.units import DType
from tests.factories.checkpoints import tiny_config
from tests.factories.hybrid_checkpoints import HYBRID_FAMILIES, hybrid_config

QWEN = tuple(family for family in HYBRID_FAMILIES if family != "kimi_linear")


def read(config: dict[str, Any]) -> Reading:
    return read_config(HFView(config, where="config.json"))


def spec_of(family: str, **overrides: Any) -> DecoderSpec:
    return read(hybrid_config(family, **overrides)).spec


def delta_of(family: str, **overrides: Any) -> DeltaSpec:
    mixer = spec_of(family, **overrides).layers[0].mixer
    assert isinstance(mixer, DeltaSpec)
    return mixer


def attention_of(family: str, **overrides: Any) -> AttentionSpec:
    mixer = spec_of(family, **overrides).layers[-1].mixer
    assert isinstance(mixer, AttentionSpec)
    return mixer


def experts_of(family: str, **overrides: Any) -> MoESpec:
    ffn = spec_of(family, **overrides).layers[-1].ffn
    assert isinstance(ffn, MoESpec)
    return ffn


def refused(family: str, slug: str, match: str, **overrides: Any) -> None:
    with pytest.raises(ConfigError, match=match) as caught:
        spec_of(family, **overrides)
    assert caught.value.slug == slug and "config.json" in str(caught.value)


@pytest.mark.parametrize("family", HYBRID_FAMILIES)
def test_no_key_of_a_released_config_is_left_unread(family: str) -> None:
    assert dict(read(hybrid_config(family)).report.unknown) == {}


@pytest.mark.parametrize("family", QWEN)
def test_three_layers_of_gated_deltanet_come_before_each_of_gated_full_attention(family: str) -> None:
    spec = spec_of(family, num_hidden_layers=8)
    assert [isinstance(layer.mixer, DeltaSpec) for layer in spec.layers] == [True, True, True, False] * 2
    assert [layer.index for layer in spec.delta_layers] == [0, 1, 2, 4, 5, 6]
    mixer = delta_of(family)
    assert (mixer.key_heads, mixer.value_heads, mixer.key_dim, mixer.value_dim, mixer.taps) == (2, 4, 16, 24, 4)
    assert (mixer.decay, mixer.gate, mixer.rank) == (Decay.HEAD, OutputGate.SILU, None)


@pytest.mark.parametrize("family", QWEN)
def test_layer_types_win_over_the_interval(family: str) -> None:
    kinds = ["full_attention", "linear_attention", "linear_attention", "full_attention"]
    assert [layer.index for layer in spec_of(family, layer_types=kinds).delta_layers] == [1, 2]
    assert [layer.index for layer in spec_of(family, full_attention_interval=2).delta_layers] == [0, 2]


@pytest.mark.parametrize("kinds", [["linear_attention"] * 3, ["linear_attention"] * 3 + ["sliding_attention"]])
def test_layer_types_of_another_length_or_kind_are_refused(kinds: list[str]) -> None:
    refused("qwen3_next", "config/value", "layer_types must say", layer_types=kinds)


@pytest.mark.parametrize("family", QWEN)
def test_every_norm_lacks_one_but_that_of_the_linear_attention(family: str) -> None:
    spec = spec_of(family)
    assert {layer.norm.offset for layer in spec.layers} == {spec.final_norm.offset} == {1.0}
    norm = attention_of(family).qk_norm
    assert norm is not None and (norm.offset, norm.is_whole) == (1.0, False)
    assert (delta_of(family).norm.offset, delta_of(family).norm.eps) == (0.0, 1e-6)


def test_kimis_norms_are_plain_and_the_latent_one_keeps_its_own_epsilon() -> None:
    spec = spec_of("kimi_linear")
    latent = spec.layers[3].mixer
    assert isinstance(latent, MLASpec)
    assert (spec.final_norm.offset, delta_of("kimi_linear").norm.eps, latent.norm.eps) == (0.0, 1e-5, 1e-6)


@pytest.mark.parametrize("family", QWEN)
def test_full_attention_is_gated_and_rotates_a_quarter_of_each_head_in_halves(family: str) -> None:
    mixer = attention_of(family)
    assert (mixer.num_heads, mixer.num_kv_heads, mixer.head_dim, mixer.is_gated) == (4, 2, 32, True)
    assert (mixer.rope.kind, mixer.rope.dim, mixer.rope.base) == (RopeKind.DEFAULT, 8, 1e7)
    assert not mixer.rope.is_interleaved  # `mrope_interleaved` is about axes, not about pairs
    assert not attention_of(family, attn_output_gate=False).is_gated
    assert not attention_of(family).qkv_bias and attention_of(family, attention_bias=True).output_bias


def test_a_long_context_is_yarn_over_the_same_axes() -> None:
    rope = hybrid_config("qwen3_5_text")["rope_parameters"]
    scaled = rope | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    assert attention_of("qwen3_5", rope_parameters=scaled).rope.kind is RopeKind.YARN


@pytest.mark.parametrize("section", [[2, 1], [4, 2, 2], [5, -1, 0], ["a", 2, 2]])
def test_shares_of_the_axes_that_do_not_cover_the_rotated_pairs_are_refused(section: list[object]) -> None:
    rope = hybrid_config("qwen3_5_text")["rope_parameters"] | {"mrope_section": section}
    refused("qwen3_5", "config/value", "mrope_section", rope_parameters=rope)


def test_axes_of_rope_stay_unknown_to_families_that_do_not_judge_them() -> None:
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]}
    with pytest.raises(ConfigError, match="mrope_section"):
        read(tiny_config("qwen3", rope_theta=None, rope_parameters=rope))


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text"])
def test_experts_are_chosen_by_softmax_beside_a_gated_shared_one_of_its_own_width(family: str) -> None:
    moe = experts_of(family, shared_expert_intermediate_size=48)
    assert (moe.num_experts, moe.top_k, moe.width) == (8, 2, 32)
    assert moe.shared is not None and (moe.shared.count, moe.shared.width, moe.shared.is_gated) == (1, 48, True)
    assert (moe.router.score, moe.router.has_bias, moe.router.renormalise) == (Score.SOFTMAX, False, True)
    assert not experts_of(family, norm_topk_prob=False).router.renormalise
    assert experts_of(family, shared_expert_intermediate_size=0).shared is None
    refused(family, "config/value", "shared_expert_intermediate_size", shared_expert_intermediate_size=-1)


def test_qwen3_next_may_have_dense_layers_and_qwen3_5_may_not() -> None:
    spec = spec_of("qwen3_next", mlp_only_layers=[1])
    assert [layer.index for layer in spec.moe_layers] == [0, 2, 3]
    refused("qwen3_5_moe", "config/unimplemented", "mlp_only_layers", mlp_only_layers=[1])


def test_dense_qwen3_5_has_an_mlp_in_every_layer() -> None:
    assert {layer.ffn for layer in spec_of("qwen3_5").layers} == {FFNSpec(width=128, bias=False)}


@pytest.mark.parametrize(
    ("family", "text"), [("qwen3_5", "qwen3_5_text"), ("qwen3_5_moe", "qwen3_5_moe_text")]
)  # fmt: skip
def test_a_wrapped_text_model_is_the_same_as_one_alone(family: str, text: str) -> None:
    wrapped, alone = read(hybrid_config(family)), read(hybrid_config(text))
    assert wrapped.spec == alone.spec and dict(wrapped.drafts) == dict(alone.drafts)
    assert (wrapped.family.name, wrapped.family.fusion) == (alone.family.name, alone.family.fusion)
    assert not alone.report.notes and len(wrapped.report.notes) == 1


def test_the_wrappers_body_follows_the_text_models_type_and_not_the_wrappers_name() -> None:
    config = hybrid_config("qwen3_5") | {"architectures": ["Qwen3_5MoeForConditionalGeneration"]}
    assert read(config).family.name == "qwen3_5"
    config["text_config"] = hybrid_config("qwen3_5_text", model_type="qwen4_text")
    with pytest.raises(ConfigError, match="model_type = 'qwen4_text'") as caught:
        read(config)
    assert caught.value.slug == "arch/not-built"


@pytest.mark.parametrize("name", ["MiniCPMV4_6ForConditionalGeneration", "MiniCPMV4_7ForConditionalGeneration"])
def test_minicpm_v_has_a_qwen3_5_inside(name: str) -> None:
    config = hybrid_config("qwen3_5") | {"architectures": [name], "model_type": "minicpmv4_6", "insert_layer_id": 6}
    found = read(config)
    assert found.family.name == "qwen3_5" and found.spec == spec_of("qwen3_5_text")
    assert set(found.prefixes) == {"model.vision_tower.", "model.merger."}


def test_kimi_counts_its_layers_from_one() -> None:
    spec = spec_of("kimi_linear")
    assert [type(layer.mixer) for layer in spec.layers] == [DeltaSpec, DeltaSpec, DeltaSpec, MLASpec, DeltaSpec]
    assert spec.max_positions == 1024
    mixer = delta_of("kimi_linear")
    assert (mixer.key_heads, mixer.value_heads, mixer.key_dim, mixer.value_dim, mixer.taps) == (4, 4, 16, 16, 4)
    assert (mixer.decay, mixer.gate, mixer.rank) == (Decay.CHANNEL, OutputGate.SIGMOID, 16)


def test_kimi_has_no_positions_at_all() -> None:
    spec = spec_of("kimi_linear")
    latent = spec.layers[3].mixer
    assert isinstance(latent, MLASpec) and latent.rope is None
    assert (latent.q_rank, latent.kv_rank, latent.nope_dim, latent.rope_dim, latent.value_dim) == (None, 32, 16, 8, 16)
    assert latent.scale == pytest.approx(24**-0.5)
    assert main_ropes(spec) == ()
    refused("kimi_linear", "config/unimplemented", "mla_use_nope", mla_use_nope=False)


def test_kimis_experts_are_chosen_by_sigmoid_with_a_bias_behind_one_dense_layer() -> None:
    spec = spec_of("kimi_linear")
    assert [layer.index for layer in spec.moe_layers] == [1, 2, 3, 4]
    moe = experts_of("kimi_linear")
    assert (moe.num_experts, moe.top_k, moe.width) == (8, 2, 32)
    assert (moe.router.score, moe.router.has_bias, moe.router.renormalise) == (Score.SIGMOID, True, True)
    assert (moe.router.scale, moe.router.group_score) == (2.446, GroupScore.NONE)
    assert moe.shared is not None and (moe.shared.count, moe.shared.is_gated) == (1, False)


def test_kimis_groups_of_experts_count_only_where_they_are_used() -> None:
    grouped = experts_of("kimi_linear", num_expert_group=4, topk_group=2).router
    assert (grouped.num_groups, grouped.top_groups, grouped.group_score) == (4, 2, GroupScore.TOP2_SUM)
    assert experts_of("kimi_linear", num_expert_group=4, topk_group=2, use_grouped_topk=False).router.num_groups == 1
    refused("kimi_linear", "config/value", "topk_group = 3 of num_expert_group = 2", num_expert_group=2, topk_group=3)


def kimi_lists(full: list[object], linear: list[object]) -> dict[str, Any]:
    own = hybrid_config("kimi_linear")["linear_attn_config"]
    return {"linear_attn_config": own | {"full_attn_layers": full, "kda_layers": linear}}


@pytest.mark.parametrize(
    ("full", "linear", "what"),
    [
        ([3], [0, 1, 2, 4], "have 0"),
        ([4], [1, 2, 3, 4, 5], "have 4"),
        ([4], [1, 2, 3, 6], "have 6"),
        ([4], [1, 2, "3", 5], "have '3'"),
        ([4], [1, 2, 3], "layer 5 of 5 is in neither"),
    ],
)
def test_kimis_lists_must_have_every_layer_once(full: list[object], linear: list[object], what: str) -> None:
    refused("kimi_linear", "config/value", what, **kimi_lists(full, linear))


def test_a_key_that_is_not_known_inside_kimis_linear_attention_is_refused() -> None:
    own = hybrid_config("kimi_linear")["linear_attn_config"] | {"gate_lower_bound": -5.0}
    refused("kimi_linear", "config/unimplemented", "gate_lower_bound", linear_attn_config=own)
    spec_of("kimi_linear", linear_attn_config=own | {"gate_lower_bound": None})


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("llama", "attn_output_gate", True),
        ("llama", "linear_attn_config", {"num_heads": 4}),
        ("llama", "mtp_num_hidden_layers", 1),
        ("qwen3", "mla_use_nope", True),
        ("qwen3", "num_experts_per_token", 8),
        ("qwen3_moe", "num_shared_experts", 1),
    ],
)
def test_a_dense_family_does_not_take_a_hybrids_keys(family: str, key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=key) as caught:
        read(tiny_config(family) | {key: value})
    assert caught.value.slug == "config/unimplemented"


@pytest.mark.parametrize(
    ("key", "value", "slug"),
    [
        ("mamba_ssm_dtype", "bfloat16", "config/unimplemented"),
        ("output_gate_type", "sigmoid", "config/unimplemented"),
        ("linear_num_value_heads", 3, "config/value"),
        ("linear_num_key_heads", 10**9, "config/value"),
        ("num_attention_heads", 10**9, "config/value"),
        ("linear_conv_kernel_dim", 0, "config/value"),
        ("full_attention_interval", 0, "config/value"),
    ],
)
def test_a_value_that_cannot_be_or_is_not_built_is_refused_by_name(key: str, value: object, slug: str) -> None:
    refused("qwen3_5", slug, key, **{key: value})


def test_the_gate_may_be_called_swish() -> None:
    assert delta_of("qwen3_5", output_gate_type="swish").gate is OutputGate.SILU


def test_a_layer_of_linear_attention_keeps_two_tensors_and_no_rows() -> None:
    state = spec_of("qwen3_next").layers[0].state
    assert (state.kv_width, state.window) == (0, None)
    channels = 2 * 2 * 16 + 4 * 24
    assert state.recurrent == (
        StateTensor(name="conv", shape=(3, channels), dtype=None),
        StateTensor(name="delta", shape=(4, 16, 24), dtype=DType.F32),
    )
    assert [tensor.nbytes(DType.BF16) for tensor in state.recurrent] == [3 * channels * 2, 4 * 16 * 24 * 4]
    full = spec_of("qwen3_next").layers[3].state
    assert (full.kv_width, full.recurrent) == (2 * 2 * 32, ())
