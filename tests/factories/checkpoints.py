"""Tiny random checkpoints in the hub's layout, with values that make a mistake visible (no zeros, no ones)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.factories.moe_checkpoints import is_moe_layer, moe_configs, moe_shapes, nextn_shapes, with_copies
from tests.factories.tokenizer import BOS, EOS, PAD, write_tokenizer

FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
Shapes = Iterator[tuple[str, tuple[int, ...]]]


def write_tiny(
    family: str, path: Path, seed: int = 0, *, dtype: torch.dtype = torch.float32, shards: int = 1, **overrides: Any
) -> Path:
    """Write a checkpoint of `family` and return `path`. `overrides` replace keys of config.json (None removes one)."""
    config = tiny_config(family, dtype=dtype, **overrides)
    return write_checkpoint(path, config, random_tensors(config, seed, dtype), shards=shards)


def write_near(family: str, path: Path, seed: int = 0, *, noise: float, **overrides: Any) -> Path:
    """The model of `seed` with some noise in every tensor: a draft that is right often, not always."""
    config = tiny_config(family, **overrides)
    other = random_tensors(config, seed + 1, torch.float32)
    tensors = random_tensors(config, seed, torch.float32)
    return write_checkpoint(path, config, {name: tensors[name] + noise * other[name] for name in tensors})


def write_checkpoint(
    path: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    *,
    shards: int = 1,
    texts: Mapping[int, bytes] | None = None,
    generation: Mapping[str, Any] | None = None,
) -> Path:
    """Write config, generation config, tokenizer and weights. `texts` chooses token texts (factories.tokenizer)."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(dict(config), indent=2), encoding="utf-8")
    defaults = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD, "do_sample": False}
    (path / "generation_config.json").write_text(json.dumps(defaults | dict(generation or {})), encoding="utf-8")
    write_tokenizer(path, texts=texts or {}, merges=texts is None)
    save_sharded(path, tensors, shards)
    return path


def save_sharded(path: Path, tensors: Mapping[str, torch.Tensor], shards: int) -> None:
    """One model.safetensors, or `shards` files with model.safetensors.index.json."""
    names = sorted(tensors)
    if shards == 1:
        save_file({name: tensors[name].contiguous() for name in names}, path / "model.safetensors", {"format": "pt"})
        return
    step = math.ceil(len(names) / shards)
    owners: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = names[shard * step : (shard + 1) * step]
        save_file({name: tensors[name].contiguous() for name in part}, path / file, {"format": "pt"})
        owners |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": owners}
    (path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def tiny_config(family: str, *, dtype: torch.dtype = torch.float32, **overrides: Any) -> dict[str, Any]:
    """config.json of the tiny model; KeyError for an unknown family."""
    own: dict[str, dict[str, Any]] = {
        "llama": {
            "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 3, "head_dim": 16, "rope_theta": 500000.0,
            "rms_norm_eps": 1e-5, "mlp_bias": False, "attention_bias": False,
            "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                             "original_max_position_embeddings": 64},
        },
        "qwen2": {
            "architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 2, "rope_theta": 1e6, "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True, "use_sliding_window": False,
        },
        "qwen3": {
            "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 3, "head_dim": 32, "rope_theta": 1e6,
            "rms_norm_eps": 1e-6, "attention_bias": False, "use_sliding_window": False,
        },
        "mistral": {
            "architectures": ["MistralForCausalLM"], "num_hidden_layers": 3, "head_dim": 32, "rope_theta": 1e6,
            "rms_norm_eps": 1e-5, "sliding_window": None,
        },
        **moe_configs(),
    }  # fmt: skip
    shared: dict[str, Any] = {
        "model_type": family, "vocab_size": 512, "hidden_size": 64, "hidden_act": "silu", "intermediate_size": 128,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
        "tie_word_embeddings": False, "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }  # fmt: skip
    config = shared | own[family]
    return {key: value for key, value in (config | overrides).items() if value is not None or key not in overrides}


def tensor_shapes(config: Mapping[str, Any]) -> Shapes:
    """Hub name and shape of every stored tensor of a checkpoint with this config."""
    hidden, drafts = config["hidden_size"], config.get("num_nextn_predict_layers", 0)
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"] + drafts):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield from _attention_shapes(f"{prefix}.self_attn", config)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        if is_moe_layer(config, layer):
            yield from moe_shapes(prefix, config)
        else:
            yield from _mlp_shapes(prefix, hidden, config["intermediate_size"], bool(config.get("mlp_bias")))
    if drafts:
        yield from nextn_shapes(config)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], hidden)


def _attention_shapes(prefix: str, config: Mapping[str, Any]) -> Shapes:
    family, hidden = config["model_type"], config["hidden_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim", hidden // heads)
    for name, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        yield f"{prefix}.{name}_proj.weight", (rows * head_dim, hidden)
        if family in ("qwen2", "qwen2_moe") or config.get("attention_bias"):
            yield f"{prefix}.{name}_proj.bias", (rows * head_dim,)
    if family in ("qwen3", "qwen3_moe") or config.get("use_qk_norm"):
        whole = family == "minimax_m2"
        yield f"{prefix}.q_norm.weight", (heads * head_dim if whole else head_dim,)
        yield f"{prefix}.k_norm.weight", (kv_heads * head_dim if whole else head_dim,)
    yield f"{prefix}.o_proj.weight", (hidden, heads * head_dim)
    if config.get("attention_bias") and family != "glm4_moe":
        yield f"{prefix}.o_proj.bias", (hidden,)


def _mlp_shapes(prefix: str, hidden: int, width: int, bias: bool) -> Shapes:
    for name, shape in (("gate", (width, hidden)), ("up", (width, hidden)), ("down", (hidden, width))):
        yield f"{prefix}.mlp.{name}_proj.weight", shape
        if bias:
            yield f"{prefix}.mlp.{name}_proj.bias", shape[:1]


def random_tensors(config: Mapping[str, Any], seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Norms near 1, biases near 0, matrices scaled by fan-in; the head three times that, for clear greedy margins."""
    generator = torch.Generator().manual_seed(seed)

    def value(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        noise = torch.randn(shape, generator=generator)
        if len(shape) == 1:
            return noise * 0.1 + (1.0 if "norm" in name else 0.0)
        if "embed" in name:
            return noise
        return noise * ((3.0 if "lm_head" in name else 1.0) / math.sqrt(shape[1]))

    tensors = {name: value(name, shape).to(dtype) for name, shape in tensor_shapes(config)}
    return with_copies(config, tensors)
