"""What GGUF's words mean in each architecture that Proa reads from it: tables of names, keys and unsaid facts.

Source of the facts: gguf.constants, and llama.cpp's converter and graphs. Owns no logic: gguf_hub.py translates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

KEYS: Mapping[str, str] = MappingProxyType(
    {
        "block_count": "num_hidden_layers",
        "context_length": "max_position_embeddings",
        "embedding_length": "hidden_size",
        "feed_forward_length": "intermediate_size",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
        "attention.key_length": "head_dim",
        "attention.layer_norm_rms_epsilon": "rms_norm_eps",
        "attention.sliding_window": "sliding_window",
        "rope.freq_base": "rope_theta",
    }
)
"""Metadata key behind the architecture's prefix -> config key, in every architecture."""

NAMES: Mapping[str, str] = MappingProxyType(
    {
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "output": "lm_head",
        "rope_freqs": "rope_freqs",
    }
)
_ATTENTION: Mapping[str, str] = MappingProxyType(
    {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "ffn_norm": "post_attention_layernorm",
    }
)
_LATENT: Mapping[str, str] = MappingProxyType(
    {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_kv_b": "self_attn.kv_b_proj",
        "attn_k_b": "self_attn.k_b_proj",
        "attn_v_b": "self_attn.v_b_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
    }
)
_MLP: Mapping[str, str] = MappingProxyType(
    {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
)
_EXPERTS: Mapping[str, str] = MappingProxyType(
    {
        "ffn_gate_inp": "mlp.gate",
        "ffn_gate_exps": "mlp.experts.gate_proj",
        "ffn_up_exps": "mlp.experts.up_proj",
        "ffn_down_exps": "mlp.experts.down_proj",
    }
)
_CORRECTION: Mapping[str, str] = MappingProxyType({"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"})
_NEXTN: Mapping[str, str] = MappingProxyType(
    {
        "nextn.eh_proj": "eh_proj",
        "nextn.embed_tokens": "embed_tokens",
        "nextn.enorm": "enorm",
        "nextn.hnorm": "hnorm",
        "nextn.shared_head_head": "shared_head.head",
        "nextn.shared_head_norm": "shared_head.norm",
    }
)
_EXPERT_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_weights_norm": "norm_topk_prob",
    }
)


_GROUPED_KEYS: Mapping[str, str] = MappingProxyType(
    {
        **_EXPERT_KEYS,
        "expert_count": "n_routed_experts",
        "expert_shared_count": "n_shared_experts",
        "expert_weights_scale": "routed_scaling_factor",
        "expert_group_count": "n_group",
        "expert_group_used_count": "topk_group",
        "leading_dense_block_count": "first_k_dense_replace",
        "nextn_predict_layers": "num_nextn_predict_layers",
    }
)


def _shared(module: str) -> dict[str, str]:
    parts = ("gate", "up", "down")
    return {f"ffn_{part}_shexp": f"mlp.{module}.{part}_proj" for part in parts}


@dataclass(frozen=True, slots=True, kw_only=True)
class Arch:
    """One architecture. `layer`: names within a block -> within the hub's layer, both without `.weight` and `.bias` or
    both with it. `keys`: further ones, as KEYS.

    `unsaid`: config keys that the architecture implies and files need not have. `gating`: the scores of its routers,
    where the hub's config has no key for them. `permuted`: rows of q and k have their rotation's halves interleaved.
    `has_biases`: q, k and v have some, and no key says so; `has_qk_norm_key`: one says whether q and k are normed;
    `is_latent`: gguf_latent.py has more to say.
    """

    hub: str
    layer: Mapping[str, str]
    keys: Mapping[str, str] = field(default_factory=dict[str, str])
    unsaid: Mapping[str, Any] = field(default_factory=dict[str, Any])
    gating: str | None = None
    has_biases: bool = False
    has_qk_norm_key: bool = False
    is_latent: bool = False
    permuted: bool = False


GATING: Mapping[int, str] = MappingProxyType({1: "softmax", 2: "sigmoid"})
"""Values of `expert_gating_func`."""

ARCHES: Mapping[str, Arch] = MappingProxyType(
    {
        "llama": Arch(hub="LlamaForCausalLM", layer=_ATTENTION | _MLP, permuted=True),
        "qwen2": Arch(hub="Qwen2ForCausalLM", layer=_ATTENTION | _MLP, has_biases=True),
        "qwen3": Arch(hub="Qwen3ForCausalLM", layer=_ATTENTION | _MLP),
        "qwen2moe": Arch(
            hub="Qwen2MoeForCausalLM",
            layer=_ATTENTION | _EXPERTS | _shared("shared_expert") | {"ffn_gate_inp_shexp": "mlp.shared_expert_gate"},
            keys={
                **_EXPERT_KEYS,
                "expert_count": "num_experts",
                "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
            },
            unsaid={"norm_topk_prob": False},
            gating="softmax",
            has_biases=True,
        ),
        "qwen3moe": Arch(
            hub="Qwen3MoeForCausalLM",
            layer=_ATTENTION | _EXPERTS,
            keys={**_EXPERT_KEYS, "expert_count": "num_experts"},
            unsaid={"norm_topk_prob": True},
            gating="softmax",
        ),
        "glm4moe": Arch(
            hub="Glm4MoeForCausalLM",
            layer={
                **{name: hub for name, hub in _ATTENTION.items() if name != "ffn_norm"},
                "post_attention_norm": "post_attention_layernorm",
                **_MLP,
                **_EXPERTS,
                **_shared("shared_experts"),
                **_CORRECTION,
                **_NEXTN,
            },
            keys=_GROUPED_KEYS,
            unsaid={"partial_rotary_factor": 1.0},
            has_qk_norm_key=True,
        ),
        "deepseek2": Arch(
            hub="DeepseekV2ForCausalLM",
            layer=_LATENT | _MLP | _EXPERTS | _shared("shared_experts") | _CORRECTION,
            keys={
                **_GROUPED_KEYS,
                "attention.q_lora_rank": "q_lora_rank",
                "attention.kv_lora_rank": "kv_lora_rank",
            },
            unsaid={"norm_topk_prob": False, "routed_scaling_factor": 1.0},
            is_latent=True,
        ),
    }
)
