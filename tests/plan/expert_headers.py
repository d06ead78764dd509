"""Headers of MoE checkpoints, plain or with block-FP8 weights: all that a plan of experts and drafts needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.factories.checkpoints import tensor_shapes, tiny_config
from tests.factories.headers import write_headers
from tests.factories.mla_checkpoints import MLA_FAMILIES, mla_config, mla_shapes
from tests.factories.moe_checkpoints import MOE_FAMILIES, stacked_shapes

BLOCK = 32
SHARED_FAMILIES = ("qwen2_moe", "glm4_moe", *(name for name in MLA_FAMILIES if name != "kimi_k2"))
NEXTN_FAMILIES = ("glm4_moe", "glm4_moe_lite", "deepseek_v3", "deepseek_v32", "glm_moe_dsa")
PLAIN_WORDS = ("gate.", "norm", "embed_tokens", "head", "eh_proj", "weights_proj", "bias")


def config_of(family: str, **overrides: Any) -> dict[str, Any]:
    """Qwen2-MoE gets a shared width of two slots here: its tiny default of 48 has no whole number of them."""
    if family == "qwen2_moe":
        overrides = {"shared_expert_intermediate_size": 64, **overrides}
    return tiny_config(family, **overrides) if family in MOE_FAMILIES else mla_config(family, **overrides)


def shapes_of(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return dict(tensor_shapes(config)) if config["model_type"] in MOE_FAMILIES else mla_shapes(config)


def is_linear(name: str) -> bool:
    return name.endswith(".weight") and not any(word in name for word in PLAIN_WORDS)


def write_experts(
    path: Path,
    family: str,
    *,
    fp8: Callable[[str], bool] | None = None,
    dtypes: dict[str, str] | None = None,
    drop: Callable[[str], bool] = lambda name: False,
    add: dict[str, Sequence[int]] | None = None,
    is_stacked: bool = False,
    dtype: str = "BF16",
    **overrides: Any,
) -> Path:
    """`fp8` says which linear maps are stored in 8 bits, with a scale per block of 32 x 32; `drop` what is missing."""
    config = config_of(family, **overrides)
    shapes = shapes_of(config)
    shapes = stacked_shapes(shapes) if is_stacked else shapes
    kinds, scales = dict(dtypes or {}), dict[str, Sequence[int]]()
    if fp8 is not None:
        config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
        for name, (rows, columns) in ((n, s) for n, s in shapes.items() if is_linear(n) and fp8(n)):
            kinds[name] = "F8_E4M3"
            scale = f"{name.removesuffix('weight')}weight_scale_inv"
            scales[scale], kinds[scale] = (-(-rows // BLOCK), -(-columns // BLOCK)), "F32"
    every = {**shapes, **scales, **(add or {})}
    kept = {name: shape for name, shape in every.items() if not drop(name)}
    return write_headers(path, config, dtype=dtype, dtypes=kinds, shapes=kept)
