"""The dense ops in plain torch: linear maps, RMS norm, rotary embedding, gated MLP. What other backends must match.

Norms and rotations are computed in float32, whatever the compute dtype. Legend: kernels/seam.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from proa.arch.blocks import SILU, ActivationSpec, QueryScale
from proa.kernels.memory import empty
from proa.kernels.reference.dequant import dequantize, values_of
from proa.kernels.seam import Codes, Packed, RopeRows
from proa.units import DType


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """X / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32."""
    return F.rms_norm(x.float(), x.shape[-1:], weight, eps)


def rotate(x: torch.Tensor, rope: RopeRows) -> torch.Tensor:
    """Rotate x [T, N, d] float32. Elements past the rotary size stay as they are; neighbours that are pairs come to lie
    in two halves (kernels/seam.py: RopeRows)."""
    size = rope.cos.shape[-1]
    if size < x.shape[-1]:
        return torch.cat((rotate(x[..., :size], rope), x[..., size:]), dim=-1)
    if rope.is_interleaved:
        x = torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)
    return torch.addcmul(x * rope.cos, x.roll(size // 2, dims=-1), rope.sin)


def activate(gate: torch.Tensor, up: torch.Tensor, activation: ActivationSpec) -> torch.Tensor:
    """What `activation` (arch/blocks.py) makes of the two projections of a gated MLP, in their dtype."""
    if activation.limit is not None:
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    return F.silu(gate) * up


class ReferenceDense:
    """DenseOps in stock torch. `pack` keeps the weight as it is."""

    name = "reference"

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Packed:
        return Packed(weight=weight, bias=bias, in_features=weight.shape[1], out_features=weight.shape[0])

    def unpacked(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return empty(shape, dtype)

    def pack_in_place(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Packed:
        return self.pack(weight, bias)

    def pack_blocks(self, blocks: torch.Tensor, bias: torch.Tensor | None, format: DType, dtype: torch.dtype) -> Packed:
        elements = blocks.numel() // format.storage.nbytes * format.storage.elements
        shape = (len(blocks), elements // len(blocks))
        return self.pack(dequantize(blocks.flatten(), format, shape).to(dtype), bias)

    def pack_codes(self, weight: Codes, bias: torch.Tensor | None, dtype: torch.dtype) -> Packed:
        return self.pack(values_of(weight).to(dtype), bias)

    def matmul(self, x: torch.Tensor, packed: Packed) -> torch.Tensor:
        return F.linear(x, packed.weight, packed.bias)

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype) -> torch.Tensor:
        return rms_norm(x, weight, eps).to(dtype)

    def add_norm(
        self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype
    ) -> torch.Tensor:
        return self.norm(x.add_(delta), weight, eps, dtype)

    def logits(self, x: torch.Tensor, packed: Packed) -> torch.Tensor:
        return self.matmul(x, packed).float()

    def select(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return x.index_select(0, rows)

    def lookup(self, packed: Packed, token_ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(token_ids, packed.weight).float()

    def table(self, weight: torch.Tensor) -> Packed:
        return self.pack(weight, None)

    def ffn(self, x: torch.Tensor, gate_up: Packed, down: Packed, activation: ActivationSpec = SILU) -> torch.Tensor:
        gate, up = self.matmul(x, gate_up).chunk(2, dim=-1)
        return self.matmul(activate(gate, up, activation), down)

    def gate(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return (x.float() * gate.float().sigmoid()).to(x.dtype)

    def scale_queries(self, queries: torch.Tensor, positions: torch.Tensor, spec: QueryScale) -> torch.Tensor:
        factors = 1 + spec.beta * torch.log1p((positions // spec.original).float())
        return (queries * factors.view(-1, 1, 1)).to(queries.dtype)

    def rotation(
        self, positions: torch.Tensor, frequencies: torch.Tensor, signs: torch.Tensor, magnitude: float
    ) -> RopeRows:
        angles = positions.float().view(-1, 1, 1) * frequencies
        return RopeRows(cos=angles.cos().mul_(magnitude), sin=angles.sin().mul_(signs * magnitude))
