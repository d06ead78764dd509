"""Text models inside the wrappers that releases put around them: nested config, prefixed names, a piece of a tower.

Written from the released configs and tensor names, not from the lenses under test. The wrapper's own keys contradict
the text model's wherever both say something.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]
LIES = {"n_shared_experts": 7, "n_routed_experts": 2, "hidden_size": 3, "num_hidden_layers": 9, "vocab_size": 9}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapping:
    """`key` holds the text model's config; its tensors beginning with `moved[0]` begin with `moved[1]` instead. `rest`
    are names of the tower and of what joins it to the text model."""

    architecture: str
    key: str
    moved: tuple[str, str]
    rest: tuple[str, ...]


_INSIDE = ("model.", "model.language_model.")
_LANGUAGE_MODEL = ("", "language_model.")
WRAPPINGS = {
    one.architecture: one
    for one in (
        Wrapping(
            architecture="KimiK25ForConditionalGeneration", key="text_config", moved=_LANGUAGE_MODEL,
            rest=("vision_tower.encoder.blocks.0.wqkv.weight", "mm_projector.proj.0.weight"),
        ),
        Wrapping(
            architecture="KimiVLForConditionalGeneration", key="text_config", moved=_LANGUAGE_MODEL,
            rest=("vision_tower.patch_embed.proj.weight", "multi_modal_projector.linear_1.weight"),
        ),
        Wrapping(
            architecture="DotsVLMForCausalLM", key="language_config", moved=("", ""),
            rest=("vision_tower.blocks.0.attn.qkv.weight",),
        ),
        Wrapping(
            architecture="DeepseekVL2ForCausalLM", key="language_config", moved=("", "language."),
            rest=("vision.blocks.0.norm1.weight", "projector.layers.0.weight", "image_newline", "view_seperator"),
        ),
        Wrapping(
            architecture="DeepseekOCRForCausalLM", key="language_config", moved=("", ""),
            rest=(
                "model.sam_model.pos_embed", "model.vision_model.embeddings.class_embedding",
                "model.projector.layers.weight", "model.image_newline",
            ),
        ),
        Wrapping(
            architecture="PixtralForConditionalGeneration", key="text_config", moved=_LANGUAGE_MODEL,
            rest=("vision_tower.patch_conv.weight", "multi_modal_projector.norm.weight"),
        ),
        Wrapping(
            architecture="Mistral3ForConditionalGeneration", key="text_config", moved=_LANGUAGE_MODEL,
            rest=("vision_tower.patch_conv.weight", "multi_modal_projector.norm.weight"),
        ),
        Wrapping(
            architecture="Qwen3_5ForConditionalGeneration", key="text_config", moved=_INSIDE,
            rest=("model.visual.blocks.0.norm1.weight",),
        ),
        Wrapping(
            architecture="Qwen3_5MoeForConditionalGeneration", key="text_config", moved=_INSIDE,
            rest=("model.visual.blocks.0.norm1.weight",),
        ),
        Wrapping(
            architecture="MiniCPMV4_6ForConditionalGeneration", key="text_config", moved=_INSIDE,
            rest=("model.vision_tower.encoder.layers.0.layer_norm1.weight", "model.merger.mlp.0.linear_1.weight"),
        ),
    )
}  # fmt: skip


def wrap(
    architecture: str, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], **outer: Any
) -> tuple[dict[str, Any], Tensors]:
    """Config and tensors of a wrapper around a text model; `outer` are more keys of the wrapper's own."""
    one = WRAPPINGS[architecture]
    text = {key: value for key, value in config.items() if key != "architectures"}
    whole = {"architectures": [architecture], **LIES, "vision_config": {"hidden_size": 8}, one.key: text, **outer}
    old, new = one.moved
    named = {new + name.removeprefix(old) if name.startswith(old) else name: tensor for name, tensor in tensors.items()}
    return whole, named | {name: torch.full((8,), 7.0) for name in one.rest}
