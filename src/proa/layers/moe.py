"""Mixture of experts: router, experts by slot, shared experts. The layout is read while it is built, and not kept."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from proa.arch.blocks import MoESpec, RouterSpec
from proa.arch.layout import MoELayout, ScaleOn, SharedWeight
from proa.kernels.kernel_set import KernelSet
from proa.kernels.seam import Blocks, Codes, PackedExperts, PackedRouter
from proa.layers.base import BuildContext, Layer, Weight
from proa.layers.ffn import FFN
from proa.layers.linear import kept


class Router(Layer):
    """A weight [E, D], and a correction bias [E] float32 of the choice, or in its place a table of each token's experts
    [V, k] int64."""

    packed: PackedRouter

    def __init__(self, ctx: BuildContext) -> None:
        super().__init__()
        self.weight = ctx.parameter("weight")
        self.bias, self.table = ctx.optional("bias"), ctx.optional("table")

    def finish(self, kernels: KernelSet) -> None:
        self.packed = kernels.pack_router(self.weight, self.bias, self.table)
        self.weight = kept(self.weight, self.packed.weight)

    def held(self) -> Iterable[tuple[torch.Tensor, int]]:
        """As kernels/seam.py: Packed counts, without rows that fill the last panel."""
        experts = self.weight.shape[0]
        for packed in (self.packed.weight, self.packed.bias):
            if packed is not None:
                yield packed, packed.nbytes // len(packed) * experts
        if self.packed.table is not None:
            yield self.packed.table, self.packed.table.nbytes


class Experts(Layer):
    """`gate_up` [S, 2W, D] and `down` [S, D, W] of all slots."""

    packed: PackedExperts

    def __init__(self, ctx: BuildContext) -> None:
        super().__init__()
        self.gate_up, self.gate_up_scale = ctx.parameter("gate_up"), ctx.scales("gate_up")
        self.down, self.down_scale = ctx.parameter("down"), ctx.scales("down")
        self._columns, self._dtype = ctx.scale_columns("down"), ctx.dtype
        self._formats = ctx.blocks("gate_up"), ctx.blocks("down")

    def finish(self, kernels: KernelSet) -> None:
        self.packed = self._packed(kernels)
        self.gate_up, self.down = kept(self.gate_up, self.packed.gate_up), kept(self.down, self.packed.down)

    def _packed(self, kernels: KernelSet) -> PackedExperts:
        """The plan keeps both parameters in blocks, or both as codes, or neither."""
        upper, lower = self._formats
        if upper is not None and lower is not None:
            gate_up, down = Blocks(data=self.gate_up, format=upper), Blocks(data=self.down, format=lower)
            return kernels.pack_expert_blocks(gate_up, down, self._dtype)
        if self.gate_up_scale is None or self.down_scale is None:
            return kernels.pack_experts(self.gate_up, self.down)
        codes = Codes(codes=self.gate_up, scales=self.gate_up_scale, columns=self._columns)
        lower_codes = Codes(codes=self.down, scales=self.down_scale, columns=self._columns)
        return kernels.pack_expert_codes(codes, lower_codes, self._dtype)

    def held(self) -> Iterable[tuple[torch.Tensor, int]]:
        yield self.packed.gate_up, self.packed.nbytes  # of both


class MoE(Layer):
    """Normed rows [T, D], and their tokens [T] -> the weighted sum of each row's experts, shared ones included,
    [T, D]."""

    def __init__(self, ctx: BuildContext, spec: MoESpec, layout: MoELayout) -> None:
        super().__init__()
        self.router = Router(ctx.child("router"))
        self.experts = Experts(ctx.child("experts"))
        shared = spec.shared
        apart = None if layout.is_fused else shared
        self.shared = None if apart is None else FFN(ctx.child("shared"), apart.activation)
        self.shared_gate = Weight(ctx.child("shared_gate")) if shared is not None and shared.is_gated else None
        self.shared_slots = layout.shared_slots
        self._has_slot_gate = layout.is_fused and layout.shared_weight is SharedWeight.TOKEN_GATE
        self._slot_weight = _slot_weight(layout.shared_weight, spec.router)
        on_output = layout.scale_on is ScaleOn.OUTPUT
        self._choice = replace(spec.router, scale=1.0) if on_output else spec.router
        self._scale = spec.router.scale if on_output else 1.0
        self._top_k, self._activation = spec.top_k, spec.activation
        self._kernels, self._mesh = ctx.kernels, ctx.mesh

    def finish(self, kernels: KernelSet) -> None:
        """Its parts do that."""

    def forward(self, x: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        gate = None if self.shared_gate is None else self.shared_gate.weight
        slot_gate = gate if self._has_slot_gate else None
        routed = self._kernels.route(
            x,
            self.router.packed,
            self._choice,
            self._top_k,
            self.shared_slots,
            self._slot_weight,
            slot_gate,
            token_ids,
        )
        shared, shared_gate = (None, None) if self.shared is None else (self.shared.share(x), gate)
        out = self._kernels.experts(
            x,
            routed,
            self.experts.packed,
            scale=self._scale,
            shared=shared,
            gate=shared_gate,
            activation=self._activation,
        )
        return self._mesh.sum(out)


def _slot_weight(rule: SharedWeight, router: RouterSpec) -> float:
    """What a fused shared expert counts among a row's experts, where no gate says so."""
    match rule:
        case SharedWeight.INVERSE_SCALE:
            return 1 / router.scale
        case SharedWeight.ONE | SharedWeight.TOKEN_GATE:
            return 1.0
