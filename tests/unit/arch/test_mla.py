"""Latent attention, indexers and the DeepSeek-shaped families as specs."""

from __future__ import annotations

import math
from typing import Any

import pytest

from proa.arch.blocks import FFNSpec, GroupScore, MLASpec, MoESpec, Score
from proa.arch.decoder import DecoderSpec
from proa.arch.registry import Reading, read_config
from proa.checkpoint.hf_config import HFView
from proa.errors import ConfigError
from proa.units import Algorithm
from tests.factories.mla_checkpoints import MLA_FAMILIES, mla_config


def reading(family: str, **overrides: Any) -> Reading:
    return read_config(HFView(mla_config(family, **overrides), where="config.json"))


def spec_of(family: str, **overrides: Any) -> DecoderSpec:
    return reading(family, **overrides).spec


def mixer(family: str, layer: int = 0, **overrides: Any) -> MLASpec:
    found = spec_of(family, **overrides).layers[layer].mixer
    assert isinstance(found, MLASpec)
    return found


def experts(family: str, **overrides: Any) -> MoESpec:
    found = spec_of(family, **overrides).layers[-1].ffn
    assert isinstance(found, MoESpec)
    return found


@pytest.mark.parametrize("family", MLA_FAMILIES)
def test_sizes_are_the_configs_and_no_key_is_left_over(family: str) -> None:
    found = mixer(family)
    sizes = (found.num_heads, found.kv_rank, found.nope_dim, found.rope_dim, found.value_dim)
    assert sizes == (4, 32, 16, 8, 16)
    assert found.q_rank == (None if family == "deepseek_v2_lite" else 32)
    assert found.rope is not None and found.rope.is_interleaved and found.rope.dim == 8
    assert reading(family).report.unknown == {}


@pytest.mark.parametrize("family", MLA_FAMILIES)
def test_inner_norms_have_their_own_eps_whatever_the_layers_norms_have(family: str) -> None:
    """The published classes take their default, 1e-6, for q_a_layernorm and kv_a_layernorm."""
    spec = spec_of(family, rms_norm_eps=1e-5)
    assert [layer.mixer.norm.eps for layer in spec.layers if isinstance(layer.mixer, MLASpec)] == [1e-6] * len(
        spec.layers
    )
    assert spec.final_norm.eps == spec.layers[0].norm.eps == 1e-5


@pytest.mark.parametrize(
    ("family", "mscale"),
    [
        ("deepseek_v3", 0.1 * math.log(4) + 1),
        ("deepseek_v2_lite", 0.1 * 0.707 * math.log(4) + 1),
        ("mistral4", 0.1 * math.log(4) + 1),
        ("glm4_moe_lite", 1.0),
        ("glm_moe_dsa", 1.0),
    ],
)
def test_scores_are_scaled_by_the_head_size_and_the_square_of_yarns_mscale(family: str, mscale: float) -> None:
    assert mixer(family).scale == pytest.approx(24**-0.5 * mscale**2, rel=1e-12)


def test_without_mscale_all_dim_the_rotation_is_scaled_and_the_scores_are_not() -> None:
    scaling = {"type": "yarn", "factor": 4, "original_max_position_embeddings": 64}
    found = mixer("deepseek_v3", rope_scaling=scaling)
    assert found.scale == pytest.approx(24**-0.5)
    assert found.rope is not None and found.rope.yarn is not None
    assert found.rope.yarn.magnitude == pytest.approx(0.1 * math.log(4) + 1)


def test_rope_may_be_said_not_to_be_interleaved() -> None:
    found = mixer("glm4_moe_lite", rope_interleave=False)
    assert found.rope is not None and not found.rope.is_interleaved


def test_queries_grow_with_their_position_in_mistral_4_only() -> None:
    scale = mixer("mistral4").query_scale
    assert scale is not None and (scale.beta, scale.original) == (0.1, 64)
    assert mixer("deepseek_v3").query_scale is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_key_value_heads": 2}, "num_key_value_heads = 2"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim = 7 must be even"),
        ({"kv_lora_rank": 0}, "kv_lora_rank = 0 is out of range"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 contradicts"),
        ({"qk_head_dim": 16}, "qk_head_dim = 16 is not the sum 24"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace = -1"),
        ({"mlp_layer_types": ["dense", "sparse"]}, "mlp_layer_types"),
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers = 2"),
    ],
)
def test_a_value_that_the_family_does_not_mean_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        spec_of("deepseek_v3", **change)


def test_keys_that_repeat_the_sizes_are_accepted() -> None:
    found = reading("deepseek_v3", partial_rotary_factor=8 / 24, qk_head_dim=24, head_dim=8)
    assert found.spec == spec_of("deepseek_v3") and found.report.unknown == {}


class TestExperts:
    def test_v2_takes_groups_by_their_best_score_and_does_not_renormalise(self) -> None:
        router = experts("deepseek_v2").router
        assert (router.score, router.has_bias, router.renormalise) == (Score.SOFTMAX, False, False)
        assert (router.num_groups, router.top_groups, router.group_score) == (4, 2, GroupScore.MAX)
        assert router.scale == 16.0

    def test_v2_lite_chooses_freely_and_has_two_shared_experts(self) -> None:
        found = experts("deepseek_v2_lite")
        assert found.router.group_score is GroupScore.NONE
        assert found.shared is not None
        assert (found.shared.count, found.shared.width, found.shared.is_gated) == (2, 32, False)

    @pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32"])
    def test_v3_takes_groups_by_their_two_best_biased_scores(self, family: str) -> None:
        router = experts(family).router
        assert (router.score, router.has_bias, router.renormalise) == (Score.SIGMOID, True, True)
        assert (router.num_groups, router.top_groups, router.group_score) == (2, 1, GroupScore.TOP2_SUM)

    def test_mistral_4_is_softmax_in_groups_without_a_bias(self) -> None:
        router = experts("mistral4", n_group=2, topk_group=1).router
        assert (router.score, router.has_bias, router.renormalise) == (Score.SOFTMAX, False, True)
        assert router.group_score is GroupScore.TOP2_SUM

    def test_v2_refuses_to_renormalise_since_its_code_would_drop_the_scale_then(self) -> None:
        with pytest.raises(ConfigError, match="norm_topk_prob = true"):
            spec_of("deepseek_v2", norm_topk_prob=True)

    def test_dense_layers_come_first(self) -> None:
        kinds = [type(layer.ffn) for layer in spec_of("deepseek_v3", first_k_dense_replace=2).layers]
        assert kinds == [FFNSpec, FFNSpec, MoESpec]

    def test_a_layer_frequency_leaves_layers_between_dense(self) -> None:
        spec = spec_of("deepseek_v3", num_hidden_layers=5, moe_layer_freq=2, num_nextn_predict_layers=0)
        assert [layer.index for layer in spec.moe_layers] == [2, 4]

    def test_layer_kinds_may_be_listed(self) -> None:
        kinds = ["sparse", "dense", "sparse"]
        assert [layer.index for layer in spec_of("glm4_moe_lite", mlp_layer_types=kinds).moe_layers] == [0, 2]


class TestIndexer:
    def test_v32_selects_in_every_layer_with_half_split_rotation(self) -> None:
        found = [layer.mixer for layer in spec_of("deepseek_v32").layers]
        indexers = [one.indexer for one in found if isinstance(one, MLASpec)]
        assert all(one is not None and one.is_full and not one.rope.is_interleaved for one in indexers)
        first = indexers[0]
        assert first is not None
        assert (first.num_heads, first.head_dim, first.top_k, first.rope.dim) == (8, 16, 16, 8)
        assert first.norm_eps == 1e-6

    def test_glm_5_rotates_neighbours_and_shares_selections(self) -> None:
        assert full_layers() == [True, False, True, False]
        first = mixer("glm_moe_dsa").indexer
        assert first is not None and first.rope.is_interleaved

    def test_the_rotation_follows_the_config_where_it_says(self) -> None:
        first = mixer("glm_moe_dsa", indexer_rope_interleave=False).indexer
        assert first is not None and not first.rope.is_interleaved

    @pytest.mark.parametrize(
        ("keys", "full"),
        [
            ({}, [True] * 4),
            ({"index_topk_freq": 2}, [True, True, False, True]),  # the offset is 2 where the config is silent
            ({"index_topk_freq": 3, "index_skip_topk_offset": 1}, [True, False, False, True]),
            ({"index_topk_pattern": "FSSF"}, [True, False, False, True]),
            ({"index_topk_pattern": ["full", "shared", "full", "full"]}, [True, False, True, True]),
            ({"indexer_types": ["full", "full", "shared", "shared"]}, [True, True, False, False]),
            ({"indexer_types": ["full"] * 4, "index_topk_pattern": "FSSS"}, [True] * 4),
        ],
    )
    def test_which_layers_select_is_said_in_three_ways(self, keys: dict[str, Any], full: list[bool]) -> None:
        silent = {"index_topk_freq": None, "index_skip_topk_offset": None}
        assert full_layers(**(silent | keys)) == full

    @pytest.mark.parametrize(
        "keys",
        [
            {"indexer_types": ["shared", "full", "full", "full"]},
            {"indexer_types": ["full", "full"]},
            {"index_topk_pattern": "FFXF"},
            {"index_topk_pattern": 7},
            {"index_head_dim": 4},
            {"q_lora_rank": None},
            {"layer_types": ["indexed_attention"] * 3 + ["sliding_attention"]},
        ],
    )
    def test_a_selection_that_no_layer_could_make_is_refused(self, keys: dict[str, Any]) -> None:
        with pytest.raises(ConfigError):
            spec_of("glm_moe_dsa", **keys)

    def test_layer_kinds_of_a_resaved_config_are_accepted(self) -> None:
        assert full_layers(layer_types=["indexed_attention"] * 4) == [True, False, True, False]


def full_layers(**overrides: Any) -> list[bool]:
    mixers = [layer.mixer for layer in spec_of("glm_moe_dsa", **overrides).layers]
    return [one.indexer.is_full for one in mixers if isinstance(one, MLASpec) and one.indexer is not None]


class TestNextN:
    @pytest.mark.parametrize("family", MLA_FAMILIES)
    def test_a_draft_is_derived_where_the_config_announces_one(self, family: str) -> None:
        found = reading(family)
        announced = mla_config(family).get("num_nextn_predict_layers") == 1
        assert set(found.drafts) == ({Algorithm.NEXTN} if announced else set())

    def test_the_drafts_layer_is_the_targets_last_but_selects_itself(self) -> None:
        found = reading("glm_moe_dsa")
        (layer,) = found.drafts[Algorithm.NEXTN].decoder.layers
        last = found.spec.layers[-1]
        assert layer.index == 4 and layer.ffn == last.ffn
        assert isinstance(layer.mixer, MLASpec) and isinstance(last.mixer, MLASpec)
        assert layer.mixer.indexer is not None and last.mixer.indexer is not None
        assert layer.mixer.indexer.is_full and not last.mixer.indexer.is_full
