"""Tiny random checkpoints of latent attention: configs as the releases spell them, tensor names and shapes, weights.

Written from the published tensor names (families.md of the project's notes), not from the weight rules under test.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from tests.factories.checkpoints import write_checkpoint
from tests.factories.moe_checkpoints import nextn_shapes, stacked, stacked_shapes, with_copies
from tests.factories.tokenizer import BOS, EOS, PAD

MLA_FAMILIES = (
    "deepseek_v2",
    "deepseek_v2_lite",
    "deepseek_v3",
    "kimi_k2",
    "deepseek_v32",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "mistral4",
)
Shapes = Iterator[tuple[str, tuple[int, ...]]]

_LATENT = {
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 16,
}  # fmt: skip
_EXPERTS = {
    "intermediate_size": 128, "moe_intermediate_size": 32, "n_routed_experts": 8, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    "n_group": 2, "topk_group": 1,
}  # fmt: skip
_V3 = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
_V2 = {"scoring_func": "softmax", "topk_method": "greedy", "moe_layer_freq": 1, "norm_topk_prob": False}
_YARN = {
    "type": "yarn", "factor": 4, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1,
    "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
_ROPE = {"rope_theta": 10000, "rope_scaling": _YARN}
_INDEX = {"index_topk": 16, "index_head_dim": 16, "index_n_heads": 8}
_FLAT = {"n_group": 1, "topk_group": 1}
_NEXTN = {"num_nextn_predict_layers": 1}


def _configs() -> dict[str, dict[str, Any]]:
    lite = _YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}
    scaled = {"rope_type": "yarn", "rope_theta": 10000.0, "llama_4_scaling_beta": 0.1}
    grouped = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 16.0}
    return {
        "deepseek_v2": {"architectures": ["DeepseekV2ForCausalLM"], **_ROPE, **_V2, "n_shared_experts": 2, **grouped},
        "deepseek_v2_lite": {
            "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "rope_theta": 10000,
            "rope_scaling": lite, "q_lora_rank": None, **_V2, **_FLAT, "n_shared_experts": 2,
            "routed_scaling_factor": 1.0,
        },
        "deepseek_v3": {"architectures": ["DeepseekV3ForCausalLM"], **_ROPE, **_V3, **_NEXTN},
        "kimi_k2": {"architectures": ["DeepseekV3ForCausalLM"], **_ROPE, **_V3, **_FLAT, "rope_theta": 50000.0},
        "deepseek_v32": {"architectures": ["DeepseekV32ForCausalLM"], **_ROPE, **_V3, **_NEXTN, **_INDEX},
        "glm4_moe_lite": {
            "architectures": ["Glm4MoeLiteForCausalLM"], "topk_method": "noaux_tc", "rope_theta": 1000000,
            "rope_scaling": None, "partial_rotary_factor": 1.0, "rms_norm_eps": 1e-5, **_FLAT, **_NEXTN,
        },
        "glm_moe_dsa": {
            "architectures": ["GlmMoeDsaForCausalLM"], **_V3, **_FLAT, **_NEXTN, **_INDEX, "num_hidden_layers": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000}, "rms_norm_eps": 1e-5,
            "indexer_rope_interleave": True, "index_topk_freq": 2, "index_skip_topk_offset": 1,
        },
        "mistral4": {
            "architectures": ["Mistral4ForCausalLM"], "rope_parameters": _YARN | scaled, **_FLAT,
            "first_k_dense_replace": 0, "routed_scaling_factor": 1.0,
        },
    }  # fmt: skip


def mla_config(family: str, **overrides: Any) -> dict[str, Any]:
    """config.json of the tiny model; KeyError for an unknown family."""
    shared = {
        "model_type": family, "vocab_size": 512, "hidden_size": 64, "hidden_act": "silu", "num_hidden_layers": 3,
        "max_position_embeddings": 1024, "attention_bias": False, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
        "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD, "torch_dtype": "float32", **_LATENT, **_EXPERTS,
    }  # fmt: skip
    return shared | _configs()[family] | overrides


def mla_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Hub name and shape of every stored tensor; experts in one tensor where the family's releases have them so."""
    shapes = dict(_listed_shapes(config))
    return stacked_shapes(shapes) if config["model_type"] == "mistral4" else shapes


def _listed_shapes(config: Mapping[str, Any]) -> Shapes:
    hidden, count, drafts = config["hidden_size"], config["num_hidden_layers"], config.get("num_nextn_predict_layers")
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(count + (drafts or 0)):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield from _latent_shapes(f"{prefix}.self_attn", config)
        if "index_topk" in config and (layer >= count or _selects(config, layer)):
            yield from _index_shapes(f"{prefix}.self_attn.indexer", config)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        if layer >= config["first_k_dense_replace"]:
            yield from _expert_shapes(f"{prefix}.mlp", config)
        else:
            yield from _mlp(f"{prefix}.mlp", hidden, config["intermediate_size"])
    if drafts:
        yield from nextn_shapes(config)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (config["vocab_size"], hidden)


def _selects(config: Mapping[str, Any], layer: int) -> bool:
    """With the tiny GLM-5's frequency 2 and offset 1: layers 0 and 2. Without these keys: all layers."""
    return config.get("index_topk_freq", 1) == 1 or layer % 2 == 0


def _latent_shapes(prefix: str, config: Mapping[str, Any]) -> Shapes:
    hidden, heads, rank = config["hidden_size"], config["num_attention_heads"], config["q_lora_rank"]
    nope, rotated, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    latent, queries = config["kv_lora_rank"], heads * (nope + rotated)
    if rank is None:
        yield f"{prefix}.q_proj.weight", (queries, hidden)
    else:
        yield f"{prefix}.q_a_proj.weight", (rank, hidden)
        yield f"{prefix}.q_a_layernorm.weight", (rank,)
        yield f"{prefix}.q_b_proj.weight", (queries, rank)
    yield f"{prefix}.kv_a_proj_with_mqa.weight", (latent + rotated, hidden)
    yield f"{prefix}.kv_a_layernorm.weight", (latent,)
    yield f"{prefix}.kv_b_proj.weight", (heads * (nope + value), latent)
    yield f"{prefix}.o_proj.weight", (hidden, heads * value)


def _index_shapes(prefix: str, config: Mapping[str, Any]) -> Shapes:
    heads, dim, hidden = config["index_n_heads"], config["index_head_dim"], config["hidden_size"]
    yield f"{prefix}.wq_b.weight", (heads * dim, config["q_lora_rank"])
    yield f"{prefix}.wk.weight", (dim, hidden)
    yield f"{prefix}.k_norm.weight", (dim,)
    yield f"{prefix}.k_norm.bias", (dim,)
    yield f"{prefix}.weights_proj.weight", (heads, hidden)


def _expert_shapes(prefix: str, config: Mapping[str, Any]) -> Shapes:
    hidden, width, experts = config["hidden_size"], config["moe_intermediate_size"], config["n_routed_experts"]
    yield f"{prefix}.gate.weight", (experts, hidden)
    if config.get("topk_method") == "noaux_tc":
        yield f"{prefix}.gate.e_score_correction_bias", (experts,)
    for expert in range(experts):
        yield from _mlp(f"{prefix}.experts.{expert}", hidden, width)
    yield from _mlp(f"{prefix}.shared_experts", hidden, config["n_shared_experts"] * width)


def _mlp(prefix: str, hidden: int, width: int) -> Shapes:
    yield f"{prefix}.gate_proj.weight", (width, hidden)
    yield f"{prefix}.up_proj.weight", (width, hidden)
    yield f"{prefix}.down_proj.weight", (hidden, width)


def mla_tensors(config: Mapping[str, Any], seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Norms near 1, biases near 0, matrices scaled by fan-in; the head three times that, for clear greedy margins."""
    generator = torch.Generator().manual_seed(seed)

    def value(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        noise = torch.randn(shape, generator=generator)
        if len(shape) == 1:
            return noise * 0.1 + (1.0 if "norm" in name and name.endswith("weight") else 0.0)
        if "embed" in name:
            return noise
        return noise * ((3.0 if "lm_head" in name else 1.0) / math.sqrt(shape[1]))

    tensors = {name: value(name, shape).to(dtype) for name, shape in _listed_shapes(config)}
    tensors = with_copies(config, tensors)
    return stacked(tensors) if config["model_type"] == "mistral4" else tensors


def write_mla(
    family: str, path: Path, seed: int = 0, *, dtype: torch.dtype = torch.float32, shards: int = 1, **overrides: Any
) -> Path:
    """Write a checkpoint of `family` and return `path`. `overrides` replace keys of config.json."""
    config = mla_config(family, torch_dtype=str(dtype).removeprefix("torch."), **overrides)
    return write_checkpoint(path, config, mla_tensors(config, seed, dtype), shards=shards)


def kimi_k25_config(**text: Any) -> dict[str, Any]:
    """Kimi K2.5: Kimi K2 inside a wrapper with a vision tower."""
    return {
        "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "tie_word_embeddings": False,
        "torch_dtype": "float32", "media_placeholder_token_id": 500, "text_config": mla_config("kimi_k2", **text),
        "vision_config": {"hidden_size": 32, "num_hidden_layers": 1},
    }  # fmt: skip


def write_kimi_k25(path: Path, seed: int = 0) -> Path:
    """The wrapper's checkpoint: text tensors under `language_model.`, and two of a tower and a projector."""
    config = kimi_k25_config()
    text = mla_tensors(config["text_config"], seed, torch.float32)
    tensors = {f"language_model.{name}": tensor for name, tensor in text.items()}
    for name in ("vision_tower.encoder.final_layernorm.weight", "mm_projector.pre_norm.weight"):
        tensors[name] = torch.full((32,), 7.0)
    return write_checkpoint(path, config, tensors)
