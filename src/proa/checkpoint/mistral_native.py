"""Mistral's native layout (params.json, consolidated*.safetensors) in the hub's words, for models of latent attention.

Owns the translation only. A key or a tensor that has no translation keeps its name, so that it is listed or refused
further on, never dropped.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any, cast

from proa.checkpoint.types import TensorInfo
from proa.errors import CheckpointError, ConfigError

PARAMS = "params.json"
_KEYS = MappingProxyType(
    {
        "dim": "hidden_size",
        "hidden_dim": "intermediate_size",
        "n_heads": "num_attention_heads",
        "n_kv_heads": "num_key_value_heads",
        "n_layers": "num_hidden_layers",
        "norm_eps": "rms_norm_eps",
        "tied_embeddings": "tie_word_embeddings",
        "activation": "hidden_act",
    }
)
_MOE_KEYS = MappingProxyType(
    {
        "expert_hidden_dim": "moe_intermediate_size",
        "num_expert_groups": "n_group",
        "num_expert_groups_per_tok": "topk_group",
        "num_experts": "n_routed_experts",
        "num_shared_experts": "n_shared_experts",
        "routed_scale": "routed_scaling_factor",
        "route_every_n": "moe_layer_freq",
    }
)
_YARN_KEYS = MappingProxyType({"alpha": "beta_slow", "beta": "beta_fast"})
_TRAINING = frozenset(("expert_parallel", "expert_model_parallel"))
_VISION_KEYS = ("vision_encoder", "multimodal")
_ORIGINAL = "original_max_position_embeddings"

_NAMES = MappingProxyType({"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"})
_PARTS = MappingProxyType({"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"})
_LAYER_NAMES = MappingProxyType(
    {
        "attention_norm": "input_layernorm",
        "attention.wq": "self_attn.q_proj",
        "attention.wq_a": "self_attn.q_a_proj",
        "attention.q_a_norm": "self_attn.q_a_layernorm",
        "attention.wq_b": "self_attn.q_b_proj",
        "attention.wkv_a_with_mqa": "self_attn.kv_a_proj_with_mqa",
        "attention.kv_a_norm": "self_attn.kv_a_layernorm",
        "attention.wkv_b": "self_attn.kv_b_proj",
        "attention.wo": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "gate": "mlp.gate",
    }
)
_ROUTER_BIAS = "router_biases"
_VISION_NAMES = MappingProxyType(
    {
        "vision_encoder.": "vision_tower.",
        "vision_language_adapter.": "multi_modal_projector.",
        "patch_merger.": "multi_modal_projector.patch_merger.",
        "pre_mm_projector_norm.": "multi_modal_projector.norm.",
    }
)
_INSIDE = "language_model."


def hub_config(params: Mapping[str, Any], names: Iterable[str], where: str) -> dict[str, Any]:
    """What config.json would say of these parameters beside tensors of these stored names."""
    if "kv_lora_rank" not in params or not isinstance(params.get("moe"), Mapping):
        raise CheckpointError(
            "checkpoint/wrong-form",
            f"{where}: of Mistral's native layout only models of latent attention with experts are read",
            hint="use the checkpoint in the hub's layout (config.json, model*.safetensors)",
        )
    if params.get("quantization"):
        raise ConfigError(
            "config/unimplemented",
            f"{where}: quantization = {dict(params['quantization'])!r} of the native layout is not implemented",
            hint="use the checkpoint in bfloat16",
        )
    moved = ("moe", "yarn", "llama_4_scaling", *_VISION_KEYS)
    text = {_KEYS.get(key, key): value for key, value in params.items() if key not in moved}
    text |= {"architectures": ["MistralLarge3ForCausalLM"], "model_type": "deepseek_v3"}
    text |= _experts(params["moe"], has_bias=any(name.endswith(f".{_ROUTER_BIAS}") for name in names), where=where)
    text |= _rope(params, where)
    if not has_vision(params):
        return text
    vision = next(params[key] for key in _VISION_KEYS if params.get(key))
    return {
        "architectures": ["PixtralForConditionalGeneration"],
        "model_type": "pixtral",
        "text_config": text,
        "vision_config": vision,
    }


def has_vision(params: Mapping[str, Any]) -> bool:
    return any(params.get(key) for key in _VISION_KEYS)


def _experts(moe: Mapping[str, Any], *, has_bias: bool, where: str) -> dict[str, Any]:
    """Scores are a softmax renormalised over the choice, or, beside router biases, what DeepSeek V3 does with them."""
    groups = moe.get("num_expert_groups", 1)
    if not has_bias and groups != 1:
        raise ConfigError(
            "config/unimplemented", f"{where}: moe.num_expert_groups = {groups!r} without router biases is not known"
        )
    said = {_MOE_KEYS.get(key, key): value for key, value in moe.items() if key not in _TRAINING}
    method, score = ("noaux_tc", "sigmoid") if has_bias else ("greedy", "softmax")
    return (
        {"routed_scaling_factor": 1.0}
        | said
        | {
            "norm_topk_prob": True,
            "scoring_func": score,
            "topk_method": method,
        }
    )


def _rope(params: Mapping[str, Any], where: str) -> dict[str, Any]:
    """`yarn` and `llama_4_scaling` as one rope object. `apply_scale` false: neither rotation nor scores are scaled."""
    yarn, llama = _mapping(params.get("yarn"), where, "yarn"), _mapping(params.get("llama_4_scaling"), where, "llama")
    scaling: dict[str, Any] = {}
    if yarn:
        scaling = {_YARN_KEYS.get(key, key): value for key, value in yarn.items() if key != "apply_scale"}
        scaling["rope_type"] = "yarn"
        scaling |= (
            {"mscale": 1.0, "mscale_all_dim": 1.0} if yarn.get("apply_scale", True) else {"attention_factor": 1.0}
        )
    if llama:
        original = llama.get(_ORIGINAL)
        if scaling.get(_ORIGINAL, original) != original:
            raise ConfigError(
                "config/rope-contradiction",
                f"{where}: yarn and llama_4_scaling name different {_ORIGINAL}: {scaling[_ORIGINAL]!r}, {original!r}",
            )
        scaling |= {"llama_4_scaling_beta": llama.get("beta"), _ORIGINAL: original}
    return {"rope_scaling": {"rope_type": "default"} | scaling} if scaling else {}


def _mapping(value: Any, where: str, key: str) -> Mapping[str, Any]:
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError("config/wrong-type", f"{where}: {key} must be an object, but is {value!r}")
    return cast("Mapping[str, Any]", value or {})


def hub_tensors(tensors: Collection[TensorInfo], *, vision: bool) -> dict[str, TensorInfo]:
    """Tensors by hub name; the text model's names have the wrapper's prefix where there is a vision tower."""
    found: dict[str, TensorInfo] = {}
    for tensor in tensors:
        name = hub_name(tensor.stored_name)
        if vision and name.startswith(("model.", "lm_head.")):
            name = _INSIDE + name
        if name in found:
            both = f"{found[name].stored_name} and {tensor.stored_name}"
            raise CheckpointError("checkpoint/duplicate-tensor", f"{tensor.file.name}: {both} both stand for {name}")
        found[name] = tensor._replace(name=name)
    return found


def hub_name(stored: str) -> str:
    """`layers.3.experts.7.w1.weight` -> `model.layers.3.mlp.experts.7.gate_proj.weight`; an unknown name stays."""
    for native, hub in _VISION_NAMES.items():
        if stored.startswith(native):
            return hub + stored.removeprefix(native)
    body, _, kind = stored.rpartition(".")
    if kind == "weight" and body in _NAMES:
        return f"{_NAMES[body]}.{kind}"
    parts = stored.split(".")
    if len(parts) < 3 or parts[0] != "layers" or not parts[1].isdecimal():
        return stored
    layer, inner = f"model.layers.{parts[1]}.", ".".join(parts[2:-1])
    if parts[2:] == [_ROUTER_BIAS]:
        return f"{layer}mlp.gate.e_score_correction_bias"
    named = _LAYER_NAMES.get(inner) or _mlp_name(parts[2:-1])
    return f"{layer}{named}.{kind}" if named is not None and kind == "weight" else stored


def _mlp_name(inner: list[str]) -> str | None:
    """`feed_forward.w1`, `shared_experts.w1` or `experts.7.w1`."""
    match inner:
        case ["feed_forward", part] if part in _PARTS:
            return f"mlp.{_PARTS[part]}"
        case ["shared_experts", part] if part in _PARTS:
            return f"mlp.shared_experts.{_PARTS[part]}"
        case ["experts", index, part] if part in _PARTS and index.isdecimal():
            return f"mlp.experts.{index}.{_PARTS[part]}"
        case _:
            return None
