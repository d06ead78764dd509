"""What tiny MoE checkpoints add to the dense ones of factories.checkpoints: configs, tensor names, a bundled draft."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

MOE_FAMILIES = ("qwen2_moe", "qwen3_moe", "glm4_moe", "minimax_m2")
Shapes = Iterator[tuple[str, tuple[int, ...]]]

_QWEN = {
    "num_hidden_layers": 3, "rope_theta": 1e6, "rms_norm_eps": 1e-6, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2, "use_sliding_window": False,
}  # fmt: skip


def moe_configs() -> dict[str, dict[str, Any]]:
    """Each family's own keys of config.json, as the releases spell them."""
    return {
        "qwen2_moe": {
            "architectures": ["Qwen2MoeForCausalLM"], **_QWEN, "norm_topk_prob": False,
            "shared_expert_intermediate_size": 48,
        },
        "qwen3_moe": {
            "architectures": ["Qwen3MoeForCausalLM"], **_QWEN, "norm_topk_prob": True, "head_dim": 32,
            "attention_bias": False,
        },
        "glm4_moe": {
            "architectures": ["Glm4MoeForCausalLM"], "num_hidden_layers": 3, "head_dim": 32, "rope_theta": 1e6,
            "rms_norm_eps": 1e-5, "attention_bias": True, "use_qk_norm": True, "partial_rotary_factor": 0.5,
            "moe_intermediate_size": 32, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2,
            "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "n_group": 1,
            "topk_group": 1, "num_nextn_predict_layers": 1,
        },
        "minimax_m2": {
            "architectures": ["MiniMaxM2ForCausalLM"], "num_hidden_layers": 3, "head_dim": 32, "rope_theta": 5e6,
            "rms_norm_eps": 1e-6, "rotary_dim": 16, "intermediate_size": 32, "num_local_experts": 8,
            "num_experts_per_tok": 2, "scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True,
            "qk_norm_type": "per_layer", "shared_intermediate_size": 0, "use_mtp": True, "num_mtp_modules": 3,
            "mtp_transformer_layers": 1, "attn_type_list": [1, 1, 1],
        },
    }  # fmt: skip


def is_moe_layer(config: Mapping[str, Any], layer: int) -> bool:
    match config["model_type"]:
        case "qwen2_moe" | "qwen3_moe":
            sparse = (layer + 1) % config["decoder_sparse_step"] == 0
            return sparse and layer not in config["mlp_only_layers"]
        case "glm4_moe":
            return layer >= config["first_k_dense_replace"]
        case other:
            return other == "minimax_m2"


def moe_shapes(prefix: str, config: Mapping[str, Any]) -> Shapes:
    """The tensors of one MoE block of the layer `prefix`."""
    hidden, family = config["hidden_size"], config["model_type"]
    width = config["intermediate_size" if family == "minimax_m2" else "moe_intermediate_size"]
    keys = {"glm4_moe": "n_routed_experts", "minimax_m2": "num_local_experts"}
    experts = config[keys.get(family, "num_experts")]
    block = f"{prefix}.{'block_sparse_moe' if family == 'minimax_m2' else 'mlp'}"
    gate, up, down = ("w1", "w3", "w2") if family == "minimax_m2" else ("gate_proj", "up_proj", "down_proj")
    yield f"{block}.gate.weight", (experts, hidden)
    if family == "minimax_m2" and config["use_routing_bias"]:
        yield f"{block}.e_score_correction_bias", (experts,)
    if family == "glm4_moe":
        yield f"{block}.gate.e_score_correction_bias", (experts,)
    for expert in range(experts):
        yield f"{block}.experts.{expert}.{gate}.weight", (width, hidden)
        yield f"{block}.experts.{expert}.{up}.weight", (width, hidden)
        yield f"{block}.experts.{expert}.{down}.weight", (hidden, width)
    if family == "glm4_moe" and config["n_shared_experts"]:
        yield from _mlp(f"{block}.shared_experts", hidden, config["n_shared_experts"] * width)
    if family == "qwen2_moe":
        yield from _mlp(f"{block}.shared_expert", hidden, config["shared_expert_intermediate_size"])
        yield f"{block}.shared_expert_gate.weight", (1, hidden)


def _mlp(prefix: str, hidden: int, width: int) -> Shapes:
    yield f"{prefix}.gate_proj.weight", (width, hidden)
    yield f"{prefix}.up_proj.weight", (width, hidden)
    yield f"{prefix}.down_proj.weight", (hidden, width)


def nextn_shapes(config: Mapping[str, Any]) -> Shapes:
    """What a NextN layer has beside a decoder layer: norms, projection, and copies of embedding and head."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    prefix = f"model.layers.{config['num_hidden_layers']}"
    yield f"{prefix}.enorm.weight", (hidden,)
    yield f"{prefix}.hnorm.weight", (hidden,)
    yield f"{prefix}.eh_proj.weight", (hidden, 2 * hidden)
    yield f"{prefix}.shared_head.norm.weight", (hidden,)
    yield f"{prefix}.embed_tokens.weight", (vocab, hidden)
    yield f"{prefix}.shared_head.head.weight", (vocab, hidden)


def with_copies(config: Mapping[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The draft's embedding and head made equal to the target's, as in the releases."""
    prefix = f"model.layers.{config['num_hidden_layers']}"
    head = "model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"
    sources = {f"{prefix}.embed_tokens.weight": "model.embed_tokens.weight", f"{prefix}.shared_head.head.weight": head}
    return tensors | {copy: tensors[source].clone() for copy, source in sources.items() if copy in tensors}


def stacked_shapes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The same checkpoint with all routed experts of a layer in two tensors, [experts, rows, columns]."""
    kept: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        block, _, expert = name.partition(".experts.")
        if not expert:
            kept[name] = shape
            continue
        count = len([other for other in shapes if other.startswith(f"{block}.experts.")]) // 3
        if expert.split(".")[1] in ("gate_proj", "w1"):
            kept[f"{block}.experts.gate_up_proj"] = (count, 2 * shape[0], shape[1])
        if expert.split(".")[1] in ("down_proj", "w2"):
            kept[f"{block}.experts.down_proj"] = (count, *shape)
    return kept


def stacked(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same weights in the form of `stacked_shapes`."""
    kept: dict[str, torch.Tensor] = {}
    for name in stacked_shapes({name: tuple(tensor.shape) for name, tensor in tensors.items()}):
        if name in tensors:
            kept[name] = tensors[name]
            continue
        block, _, part = name.rpartition(".")
        count = 1 + max(
            int(other[len(block) + 1 :].split(".")[0]) for other in tensors if other.startswith(f"{block}.")
        )
        names = ("w1", "w3", "w2") if f"{block}.0.w1.weight" in tensors else ("gate_proj", "up_proj", "down_proj")
        used = names[:2] if part == "gate_up_proj" else names[2:]
        each = [torch.cat([tensors[f"{block}.{expert}.{which}.weight"] for which in used]) for expert in range(count)]
        kept[name] = torch.stack(each)
    return kept
