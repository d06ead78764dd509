from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from proa.checkpoint.gguf import read_gguf
from proa.checkpoint.gguf_hub import hub_config, hub_generation, hub_name, hub_tensors
from proa.checkpoint.gguf_names import ARCHES
from proa.checkpoint.types import RopePermuted, TensorInfo
from proa.errors import CheckpointError
from tests.factories import raw_files as raw
from tests.factories.raw_files import F32, STRING, U32, array, pair

BASE: dict[str, tuple[int, Any]] = {
    "block_count": (U32, 2),
    "context_length": (U32, 128),
    "embedding_length": (U32, 32),
    "feed_forward_length": (U32, 64),
    "attention.head_count": (U32, 4),
    "attention.head_count_kv": (U32, 2),
    "attention.layer_norm_rms_epsilon": (F32, 0.5),
    "rope.freq_base": (F32, 500000.0),
}
TENSORS = {"token_embd.weight": [32, 10], "output_norm.weight": [32], "output.weight": [32, 10]}


@pytest.fixture
def opened(tmp_path: Path):
    """Config and tensors of a GGUF with these extra metadata (`own`: of the architecture's prefix) and tensors."""

    def build(
        arch: str = "llama",
        own: dict[str, tuple[int, Any]] | None = None,
        tensors: dict[str, list[int]] | None = None,
        other: list[bytes] | None = None,
        without: tuple[str, ...] = (),
    ) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        pairs = [pair("general.architecture", STRING, arch), *(other or [])]
        pairs += [pair(f"{arch}.{key}", *value) for key, value in (BASE | (own or {})).items() if key not in without]
        table, at = [], 0
        for name, dims in (TENSORS | (tensors or {})).items():
            if name not in without:
                table.append(raw.tensor(name, dims, 0, at))
                size = 4
                for dim in dims:
                    size *= dim
                at += size + -size % 32
        (tmp_path / "m.gguf").write_bytes(raw.gguf(pairs, table, bytes(at)))
        gguf = read_gguf(tmp_path / "m.gguf")
        config = hub_config(gguf)
        return config, hub_tensors(gguf, config)

    return build


@pytest.mark.parametrize(
    ("arch", "name"), [("llama", "LlamaForCausalLM"), ("qwen2", "Qwen2ForCausalLM"), ("qwen3", "Qwen3ForCausalLM")]
)
def test_the_config_is_what_the_hubs_config_json_would_say(opened: Any, arch: str, name: str) -> None:
    config, _ = opened(arch, {"attention.key_length": (U32, 16), "attention.value_length": (U32, 16)})
    assert config == {
        "architectures": [name],
        "model_type": arch,
        "num_hidden_layers": 2,
        "max_position_embeddings": 128,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 0.5,
        "rope_theta": 500000.0,
        "vocab_size": 10,
        "tie_word_embeddings": False,
    }


def test_the_head_is_tied_when_no_output_matrix_is_stored(opened: Any) -> None:
    assert opened(without=("output.weight",))[0]["tie_word_embeddings"] is True


def test_unknown_keys_of_the_architecture_are_kept_as_stored_and_keys_of_others_are_not_config(opened: Any) -> None:
    config, _ = opened(own={"foo.bar": (U32, 3)}, other=[pair("general.name", STRING, "x"), pair("qwen2.odd", U32, 1)])
    assert config["llama.foo.bar"] == 3
    assert not {"general.name", "qwen2.odd"} & set(config)


def test_a_sliding_window_is_passed_on(opened: Any) -> None:
    assert opened(own={"attention.sliding_window": (U32, 24)})[0]["sliding_window"] == 24


@pytest.mark.parametrize(
    ("own", "scaling"),
    [
        ({}, None),
        ({"rope.scaling.type": (STRING, "none"), "rope.scaling.factor": (F32, 4.0)}, None),
        (
            {"rope.scaling.type": (STRING, "linear"), "rope.scaling.factor": (F32, 4.0)},
            {"rope_type": "linear", "factor": 4.0},
        ),
        ({"rope.scaling.factor": (F32, 4.0)}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scale_linear": (F32, 2.0)}, {"rope_type": "linear", "factor": 2.0}),
        (
            {
                "rope.scaling.type": (STRING, "yarn"),
                "rope.scaling.factor": (F32, 4.0),
                "rope.scaling.original_context_length": (U32, 64),
                "rope.scaling.finetuned": (raw.BOOL, True),
                "rope.scaling.attn_factor": (F32, 0.5),
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attn_factor": 0.5},
        ),
    ],
)
def test_rope_scaling_is_spelt_as_in_the_hub(opened: Any, own: dict[str, Any], scaling: dict[str, Any] | None) -> None:
    config, _ = opened(own=own)
    assert config.get("rope_scaling") == scaling
    assert not any(key.startswith("llama.") for key in config)


def test_stored_rope_factors_are_a_kind_of_scaling_and_exclude_another_one(opened: Any) -> None:
    config, tensors = opened(tensors={"rope_freqs.weight": [4]})
    assert config["rope_scaling"] == {"rope_type": "factors"}
    assert tensors["rope_freqs.weight"].shape == (4,)
    with pytest.raises(CheckpointError, match=r"rope\.scaling\.type is 'linear', but rope_freqs"):
        opened(own={"rope.scaling.type": (STRING, "linear")}, tensors={"rope_freqs.weight": [4]})


def test_a_rope_over_a_part_of_the_head_is_said_in_the_hubs_key(opened: Any) -> None:
    assert "partial_rotary_factor" not in opened(own={"rope.dimension_count": (U32, 8)})[0]
    assert opened(own={"rope.dimension_count": (U32, 2)})[0]["partial_rotary_factor"] == 0.25


@pytest.mark.parametrize("own", [{"attention.value_length": (U32, 16)}, {"vocab_size": (U32, 11)}])
def test_facts_that_contradict_each_other_are_refused(opened: Any, own: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=next(iter(own))) as error:
        opened(own=own)
    assert error.value.slug == "checkpoint/gguf-contradiction"


def test_bias_keys_follow_from_the_stored_biases(opened: Any) -> None:
    config, _ = opened(tensors={"blk.0.attn_q.bias": [32], "blk.0.ffn_up.bias": [64]})
    assert config["attention_bias"] is True and config["mlp_bias"] is True
    config, _ = opened("qwen2", tensors={"blk.0.attn_q.bias": [32]})
    assert "attention_bias" not in config and "mlp_bias" not in config


@pytest.mark.parametrize(
    ("stored", "hub"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("output.weight", "lm_head.weight"),
        ("rope_freqs.weight", "rope_freqs.weight"),
        ("blk.0.attn_norm.weight", "model.layers.0.input_layernorm.weight"),
        ("blk.12.attn_q.weight", "model.layers.12.self_attn.q_proj.weight"),
        ("blk.1.attn_k.bias", "model.layers.1.self_attn.k_proj.bias"),
        ("blk.1.attn_v.weight", "model.layers.1.self_attn.v_proj.weight"),
        ("blk.1.attn_output.weight", "model.layers.1.self_attn.o_proj.weight"),
        ("blk.1.attn_q_norm.weight", "model.layers.1.self_attn.q_norm.weight"),
        ("blk.1.attn_k_norm.weight", "model.layers.1.self_attn.k_norm.weight"),
        ("blk.1.ffn_norm.weight", "model.layers.1.post_attention_layernorm.weight"),
        ("blk.1.ffn_gate.weight", "model.layers.1.mlp.gate_proj.weight"),
        ("blk.1.ffn_up.weight", "model.layers.1.mlp.up_proj.weight"),
        ("blk.1.ffn_down.weight", "model.layers.1.mlp.down_proj.weight"),
        ("blk.1.ffn_gate_exps.weight", "blk.1.ffn_gate_exps.weight"),
        ("blk.x.attn_q.weight", "blk.x.attn_q.weight"),
        ("blk.1.attn_q.scale", "blk.1.attn_q.scale"),
        ("blk.1.attn_q", "blk.1.attn_q"),
        ("weight", "weight"),
        ("", ""),
    ],
)
def test_a_tensor_has_its_hub_name_and_one_without_translation_keeps_its_own(stored: str, hub: str) -> None:
    assert hub_name(stored, ARCHES["llama"]) == hub


@pytest.mark.parametrize(
    ("arch", "stored", "hub"),
    [
        ("qwen3moe", "blk.1.ffn_gate_exps.weight", "model.layers.1.mlp.experts.gate_proj.weight"),
        ("qwen3moe", "blk.1.ffn_up_exps.weight", "model.layers.1.mlp.experts.up_proj.weight"),
        ("qwen3moe", "blk.1.ffn_down_exps.weight", "model.layers.1.mlp.experts.down_proj.weight"),
        ("qwen3moe", "blk.1.ffn_gate_inp.weight", "model.layers.1.mlp.gate.weight"),
        ("qwen3moe", "blk.1.ffn_gate_shexp.weight", "blk.1.ffn_gate_shexp.weight"),
        ("qwen3moe", "blk.1.ffn_gate.weight", "blk.1.ffn_gate.weight"),
        ("qwen2moe", "blk.1.ffn_gate_shexp.weight", "model.layers.1.mlp.shared_expert.gate_proj.weight"),
        ("qwen2moe", "blk.1.ffn_gate_inp_shexp.weight", "model.layers.1.mlp.shared_expert_gate.weight"),
        ("glm4moe", "blk.9.ffn_down_shexp.weight", "model.layers.9.mlp.shared_experts.down_proj.weight"),
        ("glm4moe", "blk.9.exp_probs_b.bias", "model.layers.9.mlp.gate.e_score_correction_bias"),
        ("glm4moe", "blk.9.exp_probs_b.weight", "blk.9.exp_probs_b.weight"),
        ("glm4moe", "blk.9.post_attention_norm.weight", "model.layers.9.post_attention_layernorm.weight"),
        ("glm4moe", "blk.9.nextn.shared_head_norm.weight", "model.layers.9.shared_head.norm.weight"),
    ],
)
def test_names_of_experts_are_those_of_the_architectures_family(arch: str, stored: str, hub: str) -> None:
    assert hub_name(stored, ARCHES[arch]) == hub


EXPERTS = {"expert_count": (U32, 8), "expert_used_count": (U32, 2), "expert_feed_forward_length": (U32, 16)}


def test_expert_counts_have_the_hubs_keys_and_what_a_file_does_not_say_is_the_architectures(opened: Any) -> None:
    config, _ = opened("qwen2moe", {**EXPERTS, "expert_shared_feed_forward_length": (U32, 24)})
    assert {key: config[key] for key in ("num_experts", "num_experts_per_tok", "moe_intermediate_size")} == {
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    }  # fmt: skip
    assert config["shared_expert_intermediate_size"] == 24
    assert config["norm_topk_prob"] is False and opened("qwen3moe", EXPERTS)[0]["norm_topk_prob"] is True
    assert opened("qwen3moe", {**EXPERTS, "expert_weights_norm": (raw.BOOL, False)})[0]["norm_topk_prob"] is False


def test_router_scores_of_another_kind_than_the_architectures_are_said(opened: Any) -> None:
    assert "scoring_func" not in opened("qwen3moe", {**EXPERTS, "expert_gating_func": (U32, 1)})[0]
    assert opened("qwen3moe", {**EXPERTS, "expert_gating_func": (U32, 2)})[0]["scoring_func"] == "sigmoid"
    assert opened("glm4moe", {"expert_gating_func": (U32, 2)})[0]["scoring_func"] == "sigmoid"
    assert opened("glm4moe", {"expert_gating_func": (U32, 9)})[0]["scoring_func"] == 9


def test_glm_counts_a_bundled_draft_beside_the_layers_and_says_what_is_rotated_and_normed(opened: Any) -> None:
    own = {"nextn_predict_layers": (U32, 1), "leading_dense_block_count": (U32, 1), "expert_weights_scale": (F32, 2.5)}
    config, _ = opened("glm4moe", {**own, "rope.dimension_count": (U32, 4)}, {"blk.0.attn_q_norm.weight": [8]})
    assert (config["num_hidden_layers"], config["num_nextn_predict_layers"]) == (1, 1)
    assert (config["first_k_dense_replace"], config["routed_scaling_factor"]) == (1, 2.5)
    assert (config["partial_rotary_factor"], config["use_qk_norm"]) == (0.5, True)
    whole, _ = opened("glm4moe")
    assert (whole["num_hidden_layers"], whole["partial_rotary_factor"], whole["use_qk_norm"]) == (2, 1.0, False)


LATENT = {
    "attention.kv_lora_rank": (U32, 512),
    "attention.key_length": (U32, 192),
    "attention.value_length": (U32, 128),
    "rope.dimension_count": (U32, 64),
    "expert_group_count": (U32, 8),
    "expert_group_used_count": (U32, 4),
}


@pytest.mark.parametrize("is_mla", [False, True])
def test_sizes_of_latent_heads_are_those_of_a_head_in_both_forms(opened: Any, is_mla: bool) -> None:
    own = dict(LATENT)
    if is_mla:  # rows that all heads share: 512 + 64 for keys, 512 for values
        own |= {"attention.key_length_mla": (U32, 192), "attention.value_length_mla": (U32, 128)}
        own |= {"attention.key_length": (U32, 576), "attention.value_length": (U32, 512)}
        own |= {"attention.head_count_kv": (U32, 1)}
    config, _ = opened("deepseek2", own)
    assert {key: config[key] for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")} == {
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    }  # fmt: skip
    assert config["num_key_value_heads"] == config["num_attention_heads"] == 4
    assert "partial_rotary_factor" not in config
    assert not any(key.startswith("deepseek2.") for key in config)


def test_a_correction_bias_tells_the_third_from_the_second_generation(opened: Any) -> None:
    second, _ = opened("deepseek2", LATENT)
    assert (second["architectures"], second["topk_method"]) == (["DeepseekV2ForCausalLM"], "group_limited_greedy")
    assert (second["n_group"], second["topk_group"], second["norm_topk_prob"]) == (8, 4, False)
    lite, _ = opened("deepseek2", {**LATENT, "expert_group_count": (U32, 1)})
    assert lite["topk_method"] == "greedy"
    third, _ = opened("deepseek2", LATENT, {"blk.1.exp_probs_b.bias": [8]})
    assert (third["architectures"], third["topk_method"]) == (["DeepseekV3ForCausalLM"], "noaux_tc")


def test_the_one_number_of_yarn_is_both_of_the_hubs(opened: Any) -> None:
    scaling = {"rope.scaling.type": (STRING, "yarn"), "rope.scaling.factor": (F32, 40.0)}
    config, _ = opened("deepseek2", {**LATENT, **scaling, "rope.scaling.yarn_log_multiplier": (F32, 0.0707)})
    assert config["rope_scaling"] == {"rope_type": "yarn", "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707}
    plain, _ = opened("deepseek2", {**LATENT, **scaling})
    assert plain["rope_scaling"] == {"rope_type": "yarn", "factor": 40.0}


@pytest.mark.parametrize("dims", [[32], [32, 1]])
def test_a_token_gate_is_a_matrix_of_one_row(opened: Any, dims: list[int]) -> None:
    _, tensors = opened("qwen2moe", tensors={"blk.0.ffn_gate_inp_shexp.weight": dims})
    assert tensors["model.layers.0.mlp.shared_expert_gate.weight"].shape == (1, 32)


def test_only_llamas_q_and_k_rows_are_marked_as_permuted(opened: Any) -> None:
    kinds = {
        f"blk.0.attn_{kind}.{part}": dims for kind in "qkv" for part, dims in (("weight", [32, 32]), ("bias", [32]))
    }
    _, tensors = opened(tensors=kinds)
    marked = {name: info.row_order for name, info in tensors.items() if info.row_order is not None}
    prefix = "model.layers.0.self_attn"
    assert marked == {
        f"{prefix}.q_proj.weight": RopePermuted(heads=4),
        f"{prefix}.q_proj.bias": RopePermuted(heads=4),
        f"{prefix}.k_proj.weight": RopePermuted(heads=2),
        f"{prefix}.k_proj.bias": RopePermuted(heads=2),
    }
    assert tensors[f"{prefix}.q_proj.weight"].stored_name == "blk.0.attn_q.weight"
    for arch in ("qwen2", "qwen3"):
        assert all(info.row_order is None for info in opened(arch, tensors=kinds)[1].values())


def test_two_tensors_that_stand_for_one_are_refused(opened: Any) -> None:
    with pytest.raises(CheckpointError, match=r"output\.weight and lm_head\.weight both stand for lm_head\.weight"):
        opened(tensors={"lm_head.weight": [32, 10]})


@pytest.mark.parametrize("arch", ["gemma3", "mixtral", "Llama", ""])
def test_another_architecture_is_refused_with_the_known_ones(opened: Any, arch: str) -> None:
    with pytest.raises(
        CheckpointError, match="read: llama, qwen2, qwen3, qwen2moe, qwen3moe, glm4moe, deepseek2"
    ) as error:
        opened(arch)
    assert error.value.slug == "checkpoint/gguf-architecture"
    assert repr(arch) in str(error.value)


@pytest.mark.parametrize(
    ("other", "slug"),
    [
        (pair("split.count", 2, 3), "checkpoint/gguf-split"),
        (pair("general.type", STRING, "adapter"), "checkpoint/wrong-form"),
        (pair("general.type", STRING, "mmproj"), "checkpoint/wrong-form"),
    ],
)
def test_parts_adapters_and_projectors_are_refused_by_name(opened: Any, other: bytes, slug: str) -> None:
    with pytest.raises(CheckpointError, match=r"m\.gguf") as error:
        opened(other=[other])
    assert error.value.slug == slug


def test_a_file_of_one_part_is_a_whole_file(opened: Any) -> None:
    assert opened(other=[pair("split.count", 2, 1), pair("general.type", STRING, "model")])[0]["vocab_size"] == 10


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ({}, {}),
        ({"bos_token_id": 1, "eos_token_id": 2}, {"bos_token_id": 1, "eos_token_id": 2}),
        ({"eos_token_id": 2, "eot_token_id": 2, "padding_token_id": 0}, {"eos_token_id": 2, "pad_token_id": 0}),
        ({"eos_token_id": 2, "eot_token_id": 5, "eom_token_id": 6}, {"eos_token_id": [2, 5, 6]}),
    ],
)
def test_the_ids_that_begin_and_end_a_text_are_the_generation_config(
    tmp_path: Path, ids: dict[str, int], expected: dict[str, Any]
) -> None:
    pairs = [pair(f"tokenizer.ggml.{key}", U32, value) for key, value in ids.items()]
    (tmp_path / "m.gguf").write_bytes(raw.gguf([*pairs, array("tokenizer.ggml.tokens", STRING, 0, b"")], [], b""))
    assert hub_generation(read_gguf(tmp_path / "m.gguf")) == expected
