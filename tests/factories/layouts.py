"""Weight layouts without a plan: what rules, parameter table and layers can be asked to follow."""

from __future__ import annotations

from collections.abc import Collection

from proa.arch.blocks import MoESpec
from proa.arch.decoder import DecoderSpec
from proa.arch.layout import ExpertFiles, MoELayout, ScaleOn, SharedWeight, WeightLayout


def moe_layout(moe: MoESpec, *, fused: bool, files: ExpertFiles) -> MoELayout:
    """One block's layout. Fused shared experts take one slot each, behind the routed ones."""
    count = moe.shared.count if moe.shared is not None and fused else 0
    gated = moe.shared is not None and moe.shared.is_gated
    return MoELayout(
        num_routed=moe.num_experts,
        shared_slots=tuple(range(moe.num_experts, moe.num_experts + count)),
        shared_weight=SharedWeight.TOKEN_GATE if gated else SharedWeight.ONE,
        scale_on=ScaleOn.WEIGHTS,
        files=files,
    )


def layout_of(
    spec: DecoderSpec, *, fused: Collection[int] | None, stacked: Collection[int] = (), tied_head: bool = False
) -> WeightLayout:
    """`fused` and `stacked` are layer indices; `fused` None is all layers."""
    layouts = tuple(
        (
            layer.index,
            moe_layout(
                layer.ffn,
                fused=fused is None or layer.index in fused,
                files=ExpertFiles.STACKED if layer.index in stacked else ExpertFiles.LISTED,
            ),
        )
        for layer in spec.layers
        if isinstance(layer.ffn, MoESpec)
    )
    return WeightLayout(tied_head=tied_head, moe=layouts)
