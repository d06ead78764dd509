"""Tiny random checkpoints of models with linear attention: configs as the releases spell them, tensor names, weights.

Written from the published tensor names (families.md of the project's notes), not from the weight rules under test.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from tests.factories.checkpoints import write_checkpoint
from tests.factories.moe_checkpoints import stacked, stacked_shapes
from tests.factories.tokenizer import BOS, EOS, PAD

TEXT_FAMILIES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "kimi_linear")
WRAPPED_FAMILIES = ("qwen3_5", "qwen3_5_moe")
HYBRID_FAMILIES = (*TEXT_FAMILIES, *WRAPPED_FAMILIES)
Shapes = Iterator[tuple[str, tuple[int, ...]]]
T = TypeVar("T")

_QWEN = {
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 16, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_value_head_dim": 24, "attention_bias": False, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1024,
}  # fmt: skip
_QWEN_EXPERTS = {
    "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 32,
}  # fmt: skip
_QWEN_35 = {
    **_QWEN, "attn_output_gate": True, "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False,
    "mamba_ssm_dtype": "float32",
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25, "mrope_interleaved": True,
        "mrope_section": [2, 1, 1],
    },
}  # fmt: skip


def _configs() -> dict[str, dict[str, Any]]:
    return {
        "qwen3_next": {
            "architectures": ["Qwen3NextForCausalLM"], **_QWEN, **_QWEN_EXPERTS, "intermediate_size": 128,
            "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "partial_rotary_factor": 0.25,
            "rope_theta": 10000000, "rope_scaling": None,
        },
        "qwen3_5_text": {"architectures": ["Qwen3_5ForCausalLM"], **_QWEN_35, "intermediate_size": 128},
        "qwen3_5_moe_text": {"architectures": ["Qwen3_5MoeForCausalLM"], **_QWEN_35, **_QWEN_EXPERTS},
        "kimi_linear": {
            "architectures": ["KimiLinearForCausalLM"], "num_hidden_layers": 5, "num_attention_heads": 4,
            "num_key_value_heads": 4, "head_dim": 18, "q_lora_rank": None, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8, "v_head_dim": 16, "mla_use_nope": True, "intermediate_size": 128,
            "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_token": 2, "num_shared_experts": 1,
            "moe_renormalize": True, "moe_router_activation_func": "sigmoid", "num_expert_group": 1, "topk_group": 1,
            "use_grouped_topk": True, "routed_scaling_factor": 2.446, "first_k_dense_replace": 1, "moe_layer_freq": 1,
            "num_nextn_predict_layers": 0, "model_max_length": 1024, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
            "rope_scaling": None,
            "linear_attn_config": {
                "full_attn_layers": [4], "kda_layers": [1, 2, 3, 5], "head_dim": 16, "num_heads": 4,
                "short_conv_kernel_size": 4,
            },
        },
    }  # fmt: skip


def hybrid_config(family: str, **overrides: Any) -> dict[str, Any]:
    """config.json of the tiny model, `overrides` in its text model's part; KeyError for an unknown family."""
    if family in WRAPPED_FAMILIES:
        return wrapped_config(family, **overrides)
    shared = {
        "model_type": family, "vocab_size": 512, "hidden_size": 64, "hidden_act": "silu", "tie_word_embeddings": False,
        "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD, "torch_dtype": "float32",
    }  # fmt: skip
    return shared | _configs()[family] | overrides


def wrapped_config(family: str, **overrides: Any) -> dict[str, Any]:
    """Qwen3.5 as released: the text model inside a wrapper with a vision tower."""
    name = {"qwen3_5": "Qwen3_5ForConditionalGeneration", "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration"}[family]
    text = hybrid_config(f"{family}_text", **overrides)
    del text["architectures"]
    return {
        "architectures": [name], "model_type": family, "image_token_id": 500, "video_token_id": 501,
        "tie_word_embeddings": text["tie_word_embeddings"], "torch_dtype": "float32", "text_config": text,
        "vision_config": {"model_type": family, "hidden_size": 32, "depth": 1},
    }  # fmt: skip


def text_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return config.get("text_config", config)


def is_stacked(config: Mapping[str, Any]) -> bool:
    """Whether the family's releases in bfloat16 have all experts of a layer in one tensor."""
    return text_of(config)["model_type"] == "qwen3_5_moe_text"


def full_layers(config: Mapping[str, Any]) -> list[int]:
    """Layers of full attention, from 0."""
    c = text_of(config)
    if c["model_type"] == "kimi_linear":
        return [number - 1 for number in c["linear_attn_config"]["full_attn_layers"]]
    kinds = c.get("layer_types")
    if kinds is not None:
        return [index for index, kind in enumerate(kinds) if kind == "full_attention"]
    return [index for index in range(c["num_hidden_layers"]) if (index + 1) % c["full_attention_interval"] == 0]


def hybrid_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Hub name and shape of every stored tensor, the draft's and two of the vision tower included."""
    shapes = dict(_listed_shapes(text_of(config)))
    return _outside(config, stacked_shapes(shapes) if is_stacked(config) else shapes, (32,))


def hybrid_tensors(config: Mapping[str, Any], seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Norms near what makes them 1, biases near 0, matrices scaled by fan-in; the head three times that."""
    generator = torch.Generator().manual_seed(seed)
    is_qwen = text_of(config)["model_type"] != "kimi_linear"

    def value(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        noise = torch.randn(shape, generator=generator)
        if name.endswith("A_log"):
            return noise * 0.5 + 0.5
        if len(shape) == 1:
            lacks_one = is_qwen and not name.endswith("linear_attn.norm.weight")
            return noise * 0.1 + (1.0 if "norm" in name and not lacks_one else 0.0)
        if "embed_tokens" in name:
            return noise
        return noise * ((3.0 if "lm_head" in name else 1.0) / math.sqrt(shape[-1]))

    tensors = {name: value(name, shape).to(dtype) for name, shape in _listed_shapes(text_of(config))}
    tensors = stacked(tensors) if is_stacked(config) else tensors
    written = _outside(config, tensors, torch.full((32,), 7.0, dtype=dtype))
    return {name: value.clone() for name, value in written.items()}  # safetensors refuses what shares memory


def write_hybrid(
    family: str, path: Path, seed: int = 0, *, dtype: torch.dtype = torch.float32, shards: int = 1, **overrides: Any
) -> Path:
    """Write a checkpoint of `family` and return `path`. `overrides` replace keys of the text model's config."""
    config = hybrid_config(family, torch_dtype=str(dtype).removeprefix("torch."), **overrides)
    return write_checkpoint(path, config, hybrid_tensors(config, seed, dtype), shards=shards)


def _outside(config: Mapping[str, Any], text: Mapping[str, T], part: T) -> dict[str, T]:
    """The names of a wrapped model's text tensors, with two parts of the vision tower beside them."""
    if "text_config" not in config:
        return dict(text)
    inside = {
        f"model.language_model.{name.removeprefix('model.')}" if name.startswith("model.") else name: value
        for name, value in text.items()
    }
    return inside | {"model.visual.blocks.0.norm1.weight": part, "model.visual.merger.norm.bias": part}


def _listed_shapes(c: Mapping[str, Any]) -> Shapes:
    hidden, is_kimi, full = c["hidden_size"], c["model_type"] == "kimi_linear", full_layers(c)
    yield "model.embed_tokens.weight", (c["vocab_size"], hidden)
    for layer in range(c["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield from _norms(prefix, hidden)
        if layer in full:
            attention = f"{prefix}.self_attn"
            yield from _latent_shapes(attention, c) if is_kimi else _gated_shapes(attention, c)
        else:
            yield from _kda_shapes(f"{prefix}.self_attn", c) if is_kimi else _gdn_shapes(f"{prefix}.linear_attn", c)
        yield from _kimi_mlp(prefix, c, layer) if is_kimi else _qwen_mlp(prefix, c, layer)
    yield "model.norm.weight", (hidden,)
    if not c["tie_word_embeddings"]:
        yield "lm_head.weight", (c["vocab_size"], hidden)
    if not is_kimi and c.get("mtp_num_hidden_layers", 1):
        yield from _mtp_shapes(c)


def _mtp_shapes(c: Mapping[str, Any]) -> Shapes:
    hidden = c["hidden_size"]
    yield "mtp.fc.weight", (hidden, 2 * hidden)
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        yield f"mtp.{name}.weight", (hidden,)
    yield from _norms("mtp.layers.0", hidden)
    yield from _gated_shapes("mtp.layers.0.self_attn", c)
    yield from _qwen_mlp("mtp.layers.0", c, 0)


def _norms(prefix: str, hidden: int) -> Shapes:
    yield f"{prefix}.input_layernorm.weight", (hidden,)
    yield f"{prefix}.post_attention_layernorm.weight", (hidden,)


def _gated_shapes(prefix: str, c: Mapping[str, Any]) -> Shapes:
    hidden, dim = c["hidden_size"], c["head_dim"]
    queries, keys = c["num_attention_heads"] * dim, c["num_key_value_heads"] * dim
    gates = queries if c.get("attn_output_gate", True) else 0
    for name, shape in (("q", (queries + gates, hidden)), ("k", (keys, hidden)), ("v", (keys, hidden)),
                        ("o", (hidden, queries))):  # fmt: skip
        yield f"{prefix}.{name}_proj.weight", shape
        if c["attention_bias"]:
            yield f"{prefix}.{name}_proj.bias", shape[:1]
    yield f"{prefix}.q_norm.weight", (dim,)
    yield f"{prefix}.k_norm.weight", (dim,)


def _gdn_shapes(prefix: str, c: Mapping[str, Any]) -> Shapes:
    hidden, heads = c["hidden_size"], c["linear_num_value_heads"]
    keys, values = c["linear_num_key_heads"] * c["linear_key_head_dim"], heads * c["linear_value_head_dim"]
    if c["model_type"] == "qwen3_next":
        yield f"{prefix}.in_proj_qkvz.weight", (2 * keys + 2 * values, hidden)
        yield f"{prefix}.in_proj_ba.weight", (2 * heads, hidden)
    else:
        yield f"{prefix}.in_proj_qkv.weight", (2 * keys + values, hidden)
        yield f"{prefix}.in_proj_z.weight", (values, hidden)
        yield f"{prefix}.in_proj_b.weight", (heads, hidden)
        yield f"{prefix}.in_proj_a.weight", (heads, hidden)
    yield f"{prefix}.conv1d.weight", (2 * keys + values, 1, c["linear_conv_kernel_dim"])
    yield f"{prefix}.A_log", (heads,)
    yield f"{prefix}.dt_bias", (heads,)
    yield f"{prefix}.norm.weight", (c["linear_value_head_dim"],)
    yield f"{prefix}.out_proj.weight", (hidden, values)


def _kda_shapes(prefix: str, c: Mapping[str, Any]) -> Shapes:
    own, hidden = c["linear_attn_config"], c["hidden_size"]
    heads, dim = own["num_heads"], own["head_dim"]
    for name in ("q", "k", "v"):
        yield f"{prefix}.{name}_proj.weight", (heads * dim, hidden)
        yield f"{prefix}.{name}_conv1d.weight", (heads * dim, 1, own["short_conv_kernel_size"])
    for name in ("f", "g"):
        yield f"{prefix}.{name}_a_proj.weight", (dim, hidden)
        yield f"{prefix}.{name}_b_proj.weight", (heads * dim, dim)
    yield f"{prefix}.b_proj.weight", (heads, hidden)
    yield f"{prefix}.A_log", (1, 1, heads, 1)
    yield f"{prefix}.dt_bias", (heads * dim,)
    yield f"{prefix}.o_norm.weight", (dim,)
    yield f"{prefix}.o_proj.weight", (hidden, heads * dim)


def _latent_shapes(prefix: str, c: Mapping[str, Any]) -> Shapes:
    hidden, heads, latent = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"]
    yield f"{prefix}.q_proj.weight", (heads * (c["qk_nope_head_dim"] + c["qk_rope_head_dim"]), hidden)
    yield f"{prefix}.kv_a_proj_with_mqa.weight", (latent + c["qk_rope_head_dim"], hidden)
    yield f"{prefix}.kv_a_layernorm.weight", (latent,)
    yield f"{prefix}.kv_b_proj.weight", (heads * (c["qk_nope_head_dim"] + c["v_head_dim"]), latent)
    yield f"{prefix}.o_proj.weight", (hidden, heads * c["v_head_dim"])


def _qwen_mlp(prefix: str, c: Mapping[str, Any], layer: int) -> Shapes:
    hidden = c["hidden_size"]
    is_sparse = layer not in c.get("mlp_only_layers", ()) and (layer + 1) % c.get("decoder_sparse_step", 1) == 0
    if "num_experts" not in c or not is_sparse:
        yield from _mlp(f"{prefix}.mlp", hidden, c["intermediate_size"])
        return
    yield f"{prefix}.mlp.gate.weight", (c["num_experts"], hidden)
    for expert in range(c["num_experts"]):
        yield from _mlp(f"{prefix}.mlp.experts.{expert}", hidden, c["moe_intermediate_size"])
    yield from _mlp(f"{prefix}.mlp.shared_expert", hidden, c["shared_expert_intermediate_size"])
    yield f"{prefix}.mlp.shared_expert_gate.weight", (1, hidden)


def _kimi_mlp(prefix: str, c: Mapping[str, Any], layer: int) -> Shapes:
    hidden, width = c["hidden_size"], c["moe_intermediate_size"]
    if layer < c["first_k_dense_replace"]:
        yield from _mlp(f"{prefix}.mlp", hidden, c["intermediate_size"])
        return
    block = f"{prefix}.block_sparse_moe"
    yield f"{block}.gate.weight", (c["num_experts"], hidden)
    yield f"{block}.gate.e_score_correction_bias", (c["num_experts"],)
    for expert in range(c["num_experts"]):
        for name, shape in (("w1", (width, hidden)), ("w3", (width, hidden)), ("w2", (hidden, width))):
            yield f"{block}.experts.{expert}.{name}.weight", shape
    yield from _mlp(f"{block}.shared_experts", hidden, c["num_shared_experts"] * width)


def _mlp(prefix: str, hidden: int, width: int) -> Shapes:
    yield f"{prefix}.gate_proj.weight", (width, hidden)
    yield f"{prefix}.up_proj.weight", (width, hidden)
    yield f"{prefix}.down_proj.weight", (hidden, width)
