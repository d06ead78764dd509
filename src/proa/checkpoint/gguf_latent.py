"""What GGUF's `deepseek2` says in the hub's words beyond its tables: sizes of latent heads, class of the model, YaRN.

One architecture there stands for several families here: files of DeepSeek V2 and V3, Kimi K2 and GLM-4.7-Flash differ
in their tensors and numbers only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from proa.checkpoint.types import TensorInfo, Transposed

_LOG_MULTIPLIER = "yarn_log_multiplier"


def latent_config(own: Mapping[str, Any], config: Mapping[str, Any], stored: Collection[str]) -> dict[str, Any]:
    """Keys to add to `config`. `own` are the metadata of the architecture's prefix.

    Sizes with `_mla` are those of a head; without it, in files that have both, those of the rows that all heads share.
    """
    width = own.get("attention.key_length_mla", own.get("attention.key_length"))
    rotated = own.get("rope.dimension_count")
    sizes = {
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": width - rotated if type(width) is int and type(rotated) is int else width,
        "v_head_dim": own.get("attention.value_length_mla", own.get("attention.value_length")),
        "num_key_value_heads": config.get("num_attention_heads"),
    }
    found = {key: value for key, value in sizes.items() if value is not None} | _routing(config, stored)
    return found | ({"split_kv_b": True} if any(name.endswith(".attn_k_b.weight") for name in stored) else {})


def _routing(config: Mapping[str, Any], stored: Collection[str]) -> dict[str, Any]:
    """A correction bias tells V3 and its like from V2, which chooses among all experts or those of the best groups."""
    if any(name.endswith(".exp_probs_b.bias") for name in stored):
        return {"architectures": ["DeepseekV3ForCausalLM"], "topk_method": "noaux_tc"}
    has_groups = config.get("n_group", 1) not in (0, 1)
    return {"topk_method": "group_limited_greedy" if has_groups else "greedy"}


def latent_tensor(info: TensorInfo) -> TensorInfo:
    """Keys' up-projection as the hub has its rows: each head's matrix is stored transposed, [heads, rank, size]."""
    if not info.name.endswith(".k_b_proj.weight") or len(info.shape) != 3:  # noqa: PLR2004  (heads, rank, size)
        return info
    heads, rank, size = info.shape
    return info._replace(shape=(heads, size, rank), row_order=Transposed(heads=heads))


def latent_scaling(scaling: Mapping[str, Any]) -> dict[str, Any]:
    """A rope object whose `yarn_log_multiplier` (0.1 `mscale_all_dim`, in float32) has the hub's two words for it.
    GGUF has one number, so both are meant, as they are equal in every published model."""
    found = {key: value for key, value in scaling.items() if key != _LOG_MULTIPLIER}
    if _LOG_MULTIPLIER not in scaling:
        return found
    mscale = scaling[_LOG_MULTIPLIER]
    mscale = round(10 * mscale, 6) if isinstance(mscale, float) else mscale
    return {**found, "mscale": mscale, "mscale_all_dim": mscale}
