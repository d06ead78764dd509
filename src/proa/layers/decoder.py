"""The one decoder, built from any DecoderSpec. It may branch on the type of a spec only, never on a family."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from proa.arch.decoder import DecoderSpec, LayerSpec
from proa.kernels.bind import KernelSet
from proa.kernels.seam import LayerKV, RopeRows
from proa.layers.attention import Attention
from proa.layers.base import BuildContext, ForwardBatch, Layer
from proa.layers.embedding import Embedding, Head, TiedHead
from proa.layers.ffn import FFN
from proa.layers.linear import Linear
from proa.layers.norm import RMSNorm
from proa.layers.rope import Rope


class DecoderLayer(nn.Module):
    """x += attn(norm(x)); x += ffn(norm(x)). The second sum is left to the next norm, which adds and norms at once."""

    def __init__(self, ctx: BuildContext, spec: LayerSpec) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(ctx.child("attn_norm"), spec.norm)
        self.attn = Attention(ctx.child("attn"), spec.mixer)
        self.ffn_norm = RMSNorm(ctx.child("ffn_norm"), spec.norm)
        self.ffn = FFN(ctx.child("ffn"))

    def forward(
        self, residual: torch.Tensor, delta: torch.Tensor | None, batch: ForwardBatch, rope: RopeRows, kv: LayerKV
    ) -> torch.Tensor:
        """Advance `residual` in place past the attention; return the MLP's output, still to be added."""
        attended = self.attn(self.attn_norm(residual, delta), batch, rope, kv)
        return self.ffn(self.ffn_norm(residual, attended))


class Decoder(nn.Module):
    """Token rows -> logits."""

    def __init__(self, ctx: BuildContext, spec: DecoderSpec) -> None:
        super().__init__()
        ropes = {layer.mixer.rope for layer in spec.layers}
        if len(ropes) != 1:
            raise ValueError(f"{spec.family}: layers with {len(ropes)} different ropes cannot be built")
        self.embed = Embedding(ctx.child("embed"))
        self.rope = Rope(ctx.child("rope"), ropes.pop())
        self.layers = nn.ModuleList(DecoderLayer(ctx.child(f"layers.{layer.index}"), layer) for layer in spec.layers)
        self.norm = RMSNorm(ctx.child("norm"), spec.final_norm)
        tied = ctx.plan.layout.tied_head
        self.head = TiedHead(ctx, self.embed) if tied else Head(ctx.child("head"))
        self.kernels: KernelSet = ctx.kernels

    def finish(self) -> None:
        """Make a loaded model ready to run: one weight at a time is packed."""
        for module in self.modules():
            if isinstance(module, Layer):
                module.finish(self.kernels)

    def weights_bytes(self) -> int:
        """Bytes of all weights in memory: parameters and packed copies, what is shared counted once."""
        packed = {id(m.packed.weight): m.packed for m in self.modules() if isinstance(m, (Linear, TiedHead))}
        plain = [p for p in self.parameters() if id(p) not in packed and p.device == self.norm.weight.device]
        return sum(one.nbytes for one in packed.values()) + sum(parameter.nbytes for parameter in plain)

    def forward(self, batch: ForwardBatch, kv: Sequence[LayerKV]) -> torch.Tensor:
        """Logits [R, V] float32 of the rows that `batch` wants; `kv` has one entry per layer and is written to."""
        residual, rope, delta = self.embed(batch.token_ids), self.rope(batch.positions), None
        for layer, layer_kv in zip(self.layers, kv, strict=True):
            delta = layer(residual, delta, batch, rope, layer_kv)
        if batch.logits_rows is not None and delta is not None:
            rows = batch.logits_rows
            residual, delta = self.kernels.select(residual, rows), self.kernels.select(delta, rows)
        return self.head(self.norm(residual, delta))
