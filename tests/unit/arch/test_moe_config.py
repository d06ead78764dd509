"""MoE families' configs as specs. Expected values are those of the config files and of the released models' cards."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from proa.arch.blocks import AttentionSpec, FFNSpec, GroupScore, MoESpec, Score
from proa.arch.decoder import DecoderSpec
from proa.arch.registry import read_config
from proa.checkpoint.hf_config import HFView
from proa.errors import ConfigError
from tests.factories.checkpoints import tiny_config


def spec_of(family: str, **overrides: Any) -> DecoderSpec:
    return read_config(HFView(tiny_config(family, **overrides), where="config.json")).spec


def experts_of(family: str, layer: int = -1, **overrides: Any) -> MoESpec:
    ffn = spec_of(family, **overrides).layers[layer].ffn
    assert isinstance(ffn, MoESpec)
    return ffn


def attention_of(family: str, **overrides: Any) -> AttentionSpec:
    mixer = spec_of(family, **overrides).layers[0].mixer
    assert isinstance(mixer, AttentionSpec)
    return mixer


def test_qwen2_moe_has_a_gated_shared_expert_and_weights_that_are_not_renormalised() -> None:
    moe = experts_of("qwen2_moe")
    assert (moe.num_experts, moe.top_k, moe.width) == (8, 2, 32)
    assert moe.shared is not None
    assert (moe.shared.count, moe.shared.width, moe.shared.is_gated) == (1, 48, True)
    router = moe.router
    assert (router.score, router.has_bias, router.renormalise, router.scale) == (Score.SOFTMAX, False, False, 1.0)
    assert (attention_of("qwen2_moe").qkv_bias, attention_of("qwen2_moe", qkv_bias=False).qkv_bias) == (True, False)


def test_qwen3_moe_renormalises_and_shares_no_expert() -> None:
    moe = experts_of("qwen3_moe")
    assert moe.shared is None
    assert (moe.router.score, moe.router.renormalise, moe.router.num_groups) == (Score.SOFTMAX, True, 1)
    norm = attention_of("qwen3_moe").qk_norm
    assert norm is not None and not norm.is_whole


def test_qwen_experts_are_in_every_nth_layer_but_for_those_listed_as_dense() -> None:
    overrides = {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    spec = spec_of("qwen3_moe", **overrides)
    assert [layer.index for layer in spec.moe_layers] == [1, 5]
    dense = spec.layers[3].ffn
    assert isinstance(dense, FFNSpec) and dense.width == 128


def test_glm_rotates_half_of_each_head_and_has_biases_but_on_the_output() -> None:
    mixer = attention_of("glm4_moe")
    assert (mixer.head_dim, mixer.rope.dim, mixer.rope.is_interleaved) == (32, 16, False)
    assert (mixer.qkv_bias, mixer.output_bias, mixer.qk_norm is not None) == (True, False, True)
    bare = attention_of("glm4_moe", use_qk_norm=False, attention_bias=False)
    assert (bare.qkv_bias, bare.qk_norm) == (False, None)


def test_the_rotated_part_may_stand_in_the_rope_object() -> None:
    rope = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    mixer = attention_of("glm4_moe", partial_rotary_factor=None, rope_theta=None, rope_parameters=rope)
    assert (mixer.rope.dim, mixer.rope.base) == (8, 1e6)


def test_glm_experts_lie_behind_dense_layers_with_one_bias_for_the_choice() -> None:
    spec = spec_of("glm4_moe", first_k_dense_replace=2)
    assert [layer.index for layer in spec.moe_layers] == [2]
    moe = experts_of("glm4_moe", n_shared_experts=2)
    assert moe.shared is not None
    assert (moe.shared.count, moe.shared.width, moe.shared.is_gated) == (2, 32, False)
    router = moe.router
    assert (router.score, router.has_bias, router.renormalise, router.scale) == (Score.SIGMOID, True, True, 2.5)
    assert (router.num_groups, router.top_groups, router.group_score) == (1, 1, GroupScore.NONE)


def test_groups_are_worth_the_sum_of_their_two_best_with_a_bias_and_the_best_alone_without() -> None:
    biased = experts_of("glm4_moe", n_group=4, topk_group=2).router
    assert (biased.num_groups, biased.top_groups, biased.group_score) == (4, 2, GroupScore.TOP2_SUM)
    limited = experts_of("glm4_moe", n_group=4, topk_group=2, topk_method="group_limited_greedy").router
    assert (limited.has_bias, limited.group_score) == (False, GroupScore.MAX)
    greedy = experts_of("glm4_moe", n_group=4, topk_group=2, topk_method="greedy").router
    assert (greedy.has_bias, greedy.num_groups) == (False, 1)


def test_no_shared_experts_are_none() -> None:
    assert experts_of("glm4_moe", n_shared_experts=0).shared is None
    assert experts_of("glm4_moe", n_shared_experts=None).shared is None


def test_minimax_normalises_all_heads_at_once_and_rotates_rotary_dim_elements() -> None:
    mixer = attention_of("minimax_m2")
    assert mixer.qk_norm is not None and mixer.qk_norm.is_whole
    assert (mixer.rope.dim, mixer.head_dim, mixer.qkv_bias) == (16, 32, False)
    assert attention_of("minimax_m2", use_qk_norm=False).qk_norm is None
    assert attention_of("minimax_m2", rotary_dim=None).rope.dim == 32
    assert attention_of("minimax_m2", rotary_dim=None, partial_rotary_factor=0.25).rope.dim == 8


def test_minimax_experts_have_no_shared_one_and_no_scale_and_its_announced_modules_are_no_draft() -> None:
    reading = read_config(HFView(tiny_config("minimax_m2"), where="config.json"))
    moe = experts_of("minimax_m2")
    assert (moe.num_experts, moe.top_k, moe.width, moe.shared) == (8, 2, 32, None)
    router = moe.router
    assert (router.score, router.has_bias, router.renormalise, router.scale) == (Score.SIGMOID, True, True, 1.0)
    assert not experts_of("minimax_m2", use_routing_bias=False).router.has_bias
    assert (len(reading.spec.moe_layers), dict(reading.drafts), dict(reading.report.unknown)) == (3, {}, {})


IMPOSSIBLE = [
    ("qwen3_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok = 9 is more than the 8 experts"),
    ("qwen3_moe", {"num_experts": 0}, "num_experts = 0"),
    ("qwen3_moe", {"num_experts": 10**9}, "num_experts = 1000000000"),
    ("qwen3_moe", {"moe_intermediate_size": 0}, "moe_intermediate_size = 0"),
    ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step = 0"),
    ("qwen3_moe", {"mlp_only_layers": [3]}, "mlp_only_layers names 3"),
    ("qwen3_moe", {"mlp_only_layers": ["0"]}, "mlp_only_layers names '0'"),
    ("qwen2_moe", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size = 0"),
    ("glm4_moe", {"n_group": 3, "topk_group": 1}, "n_routed_experts = 8 does not divide into n_group = 3"),
    ("glm4_moe", {"n_group": 2, "topk_group": 3}, "topk_group = 3 of n_group = 2"),
    ("glm4_moe", {"n_group": 0}, "n_group = 0"),
    ("glm4_moe", {"n_group": 8, "topk_group": 8}, "n_group = 8 leaves one of 8 experts per group"),
    ("glm4_moe", {"n_group": 4, "topk_group": 1, "num_experts_per_tok": 3}, "more than the 2 experts of 1 of 4 groups"),
    ("glm4_moe", {"routed_scaling_factor": 0}, "routed_scaling_factor = 0"),
    ("glm4_moe", {"n_shared_experts": -1}, "n_shared_experts = -1"),
    ("glm4_moe", {"first_k_dense_replace": 4}, "first_k_dense_replace = 4"),
    ("glm4_moe", {"partial_rotary_factor": 1.5}, "partial_rotary_factor = 1.5"),
    ("glm4_moe", {"partial_rotary_factor": 0.1}, "partial_rotary_factor = 0.1"),
    ("minimax_m2", {"rotary_dim": 40}, "rotary_dim = 40"),
    ("minimax_m2", {"rotary_dim": 15}, "rotary_dim = 15"),
    ("minimax_m2", {"partial_rotary_factor": 0.25}, "rotary_dim = 16"),
]


@pytest.mark.parametrize(("family", "overrides", "what"), IMPOSSIBLE)
def test_sizes_that_cannot_be_together_are_named(family: str, overrides: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        spec_of(family, **overrides)
    assert caught.value.slug == "config/value"
    assert "config.json" in str(caught.value) and what in str(caught.value)


UNIMPLEMENTED = [
    ("glm4_moe", {"scoring_func": "gumbel"}, "scoring_func = 'gumbel'"),
    ("glm4_moe", {"topk_method": "random"}, "topk_method = 'random'"),
    ("glm4_moe", {"num_nextn_predict_layers": 2}, "num_nextn_predict_layers = 2"),
    ("glm4_moe", {"moe_layer_freq": 2}, "moe_layer_freq = 2"),
    ("glm4_moe", {"swiglu_limit": 7.0}, "swiglu_limit = 7.0"),
    ("minimax_m2", {"qk_norm_type": "per_head"}, "qk_norm_type = 'per_head'"),
    ("minimax_m2", {"attn_type_list": [1, 0, 1]}, "attn_type_list: 0"),
    ("minimax_m2", {"shared_intermediate_size": 32}, "shared_intermediate_size = 32"),
    ("minimax_m2", {"layernorm_mlp_beta": 3.5}, "layernorm_mlp_beta = 3.5"),
    ("qwen2_moe", {"use_sliding_window": True}, "use_sliding_window = True"),
    ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window = True"),
    ("qwen3_moe", {"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid'"),
    ("qwen3_moe", {"routed_scaling_factor": 2.5}, "routed_scaling_factor = 2.5"),
    ("qwen3_moe", {"n_shared_experts": 1}, "n_shared_experts = 1"),
    ("qwen3_moe", {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers = 1"),
    ("llama", {"norm_topk_prob": True}, "norm_topk_prob = True"),
]


@pytest.mark.parametrize(("family", "overrides", "what"), UNIMPLEMENTED)
def test_what_has_no_code_is_refused_by_name(family: str, overrides: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        spec_of(family, **overrides)
    assert caught.value.slug == "config/unimplemented"
    assert what in str(caught.value)


@pytest.mark.parametrize(
    "key", ["n_routed_experts", "norm_topk_prob", "routed_scaling_factor", "first_k_dense_replace"]
)
def test_what_the_experts_depend_on_has_no_default(key: str) -> None:
    with pytest.raises(ConfigError, match=key) as caught:
        spec_of("glm4_moe", **{key: None})
    assert caught.value.slug == "config/missing-key"


def test_a_router_that_lists_experts_by_token_has_no_choice_to_correct_or_group() -> None:
    router = experts_of("qwen3_moe").router
    assert replace(router, table=512).table == 512
    for more in ({"has_bias": True}, {"num_groups": 2, "group_score": GroupScore.MAX}):
        with pytest.raises(ValueError, match="no choice to correct or to group"):
            replace(router, table=512, **more)
