"""The Qwen3-Next-like benchmark model: its shape, its random weights, and what GGUF makes of its tensors.

models.py asks for these where a config has linear attention. In GGUF: -exp(A) for A_log, 1 + w for the norms that are
stored without 1, the convolution without its middle dimension, and the grouped projection of q, k, v and z cut in two.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

# 0.61 billion parameters, of which a token reads two fifths. As Qwen3-Next: three layers of linear attention to one of
# gated full attention, two value heads to a key head, one gated shared expert beside small ones.
SHAPE: Mapping[str, Any] = MappingProxyType(
    {
        "model_type": "qwen3_next",
        "architectures": ["Qwen3NextForCausalLM"],
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000.0,
        "full_attention_interval": 4,
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
)
LINEAR, MERGED = "linear_attn", "linear_attn.in_proj_qkvz"
LINEAR_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "in_proj_ba": "ssm_ba",
        "conv1d": "ssm_conv1d",
        "norm": "ssm_norm",
        "out_proj": "ssm_out",
    }
)
PARTS = ("attn_qkv", "attn_gate")
"""What GGUF has in the place of MERGED."""
SHARED_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
        "mlp.shared_expert.up_proj": "ffn_up_shexp",
        "mlp.shared_expert.down_proj": "ffn_down_shexp",
        "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    }
)
BARE_NAMES: Mapping[str, str] = MappingProxyType({f"{LINEAR}.A_log": "ssm_a", f"{LINEAR}.dt_bias": "ssm_dt.bias"})
"""Tensors whose hub name has no `.weight` behind it."""
SLOWEST, FASTEST = 1e-3, 1e-1
"""Steps softplus(dt_bias) of random weights lie between these: some heads remember thousands of rows, some a few."""


def is_hybrid(config: Mapping[str, Any]) -> bool:
    return "linear_num_value_heads" in config


def is_full(config: Mapping[str, Any], layer: int) -> bool:
    return (layer + 1) % config["full_attention_interval"] == 0


def layer_names(config: Mapping[str, Any], layer: int, common: Mapping[str, str]) -> list[tuple[str, str]]:
    """(hub name, GGUF name) of one layer without `.weight`; `common`: those of Qwen3 with experts."""
    names = {**common, **SHARED_NAMES, "post_attention_layernorm": "post_attention_norm"}
    if is_full(config, layer):
        return list(names.items())
    kept = [(hub, name) for hub, name in names.items() if not hub.startswith("self_attn.")]
    return [
        *kept,
        *((MERGED, part) for part in PARTS),
        *((f"{LINEAR}.{hub}", name) for hub, name in LINEAR_NAMES.items()),
    ]


def bare_names(config: Mapping[str, Any], layer: int) -> list[tuple[str, str]]:
    return [] if is_full(config, layer) else list(BARE_NAMES.items())


def shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """By module name, where they differ from those of grouped attention."""
    hidden, dim = config["hidden_size"], config["head_dim"]
    keys, values = _widths(config)
    heads = config["linear_num_value_heads"]
    return {
        "q_proj": (2 * config["num_attention_heads"] * dim, hidden),
        "in_proj_qkvz": (2 * keys + 2 * values, hidden), "in_proj_ba": (2 * heads, hidden),
        "out_proj": (hidden, values), "conv1d": (2 * keys + values, 1, config["linear_conv_kernel_dim"]),
        "shared_expert_gate": (1, hidden),
    }  # fmt: skip


def special_weight(hub: str, config: Mapping[str, Any], source: Any) -> Any:
    """Random values of what is no matrix, or None: norms about their neutral value, decays over all time scales."""
    import torch

    heads = config["linear_num_value_heads"]
    if hub.endswith("A_log"):
        return torch.empty(heads).uniform_(1, 16, generator=source).log().bfloat16()
    if hub.endswith("dt_bias"):
        low, high = torch.tensor(SLOWEST).log(), torch.tensor(FASTEST).log()
        step = (low + (high - low) * torch.rand(heads, generator=source)).exp()
        return step.expm1().log().bfloat16()
    if hub.endswith("conv1d.weight"):
        return torch.randn(shapes(config)["conv1d"], generator=source).mul_(0.5).bfloat16()
    if hub.endswith("norm.weight"):
        size = _norm_size(hub, config)
        return (torch.randn(size, generator=source).mul_(0.1) + float(_is_whole_norm(hub))).bfloat16()
    return None


def stored(hub: str, name: str, tensor: Any, config: Mapping[str, Any]) -> Any:
    """The GGUF tensor `name` of a hub tensor."""
    if hub.endswith("A_log"):
        return -tensor.float().exp()
    if hub.endswith(("conv1d.weight", "shared_expert_gate.weight")):
        return tensor.squeeze()
    if hub.endswith("norm.weight") and not _is_whole_norm(hub):
        return tensor.float() + 1
    if MERGED in hub:
        return _part(tensor, config, is_gate=PARTS[1] in name)
    return tensor


def _part(tensor: Any, config: Mapping[str, Any], *, is_gate: bool) -> Any:
    """q, k and v, or z, of rows that are grouped by key head: its query, its key, its value heads, their gates."""
    import torch

    groups, size = config["linear_num_key_heads"], config["linear_key_head_dim"]
    wide = _widths(config)[1] // groups
    q, k, v, z = tensor.view(groups, -1, tensor.shape[1]).split((size, size, wide, wide), dim=1)
    return z.flatten(0, 1) if is_gate else torch.cat([part.flatten(0, 1) for part in (q, k, v)])


def _widths(config: Mapping[str, Any]) -> tuple[int, int]:
    """Elements of a row's keys and of its values."""
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    return keys, config["linear_num_value_heads"] * config["linear_value_head_dim"]


def _is_whole_norm(hub: str) -> bool:
    """The norm of a linear head's result is stored as it is; all others lack 1."""
    return f"{LINEAR}.norm" in hub


def _norm_size(hub: str, config: Mapping[str, Any]) -> int:
    if _is_whole_norm(hub):
        return config["linear_value_head_dim"]
    return config["head_dim"] if hub.endswith(("q_norm.weight", "k_norm.weight")) else config["hidden_size"]


def add_keys(writer: Any, config: Mapping[str, Any]) -> None:
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(_widths(config)[1])
    writer.add_full_attention_interval(config["full_attention_interval"])
    writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
