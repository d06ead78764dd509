"""The one decoder, built from any DecoderSpec. It may branch on the type of a spec only, never on a family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import nn

from proa.arch.blocks import AttentionSpec, FFNSpec, MLASpec, MoESpec, RopeSpec
from proa.arch.decoder import Borrow, DecoderSpec, LayerSpec
from proa.arch.delta_blocks import DeltaSpec
from proa.arch.layout import WeightLayout
from proa.arch.parameters import main_ropes
from proa.cache.kv import LayerCache
from proa.kernels.delta import DeltaState, StateSlots
from proa.kernels.latent_seam import Chosen
from proa.kernels.seam import RopeRows
from proa.layers.attention import Attention
from proa.layers.base import BuildContext, ForwardBatch, Layer, own_parameters
from proa.layers.delta import Delta
from proa.layers.embedding import Embedding, Head, TiedHead
from proa.layers.entry import Entry
from proa.layers.ffn import FFN
from proa.layers.finishing import Finishing
from proa.layers.mla import MLA
from proa.layers.moe import MoE
from proa.layers.norm import RMSNorm
from proa.layers.rope import Ropes


class DecoderLayer(nn.Module):
    """x += attn(norm(x)); x += ffn(norm(x)). The second sum is left to the next norm, which adds and norms at once."""

    def __init__(self, ctx: BuildContext, spec: LayerSpec, layout: WeightLayout) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(ctx.child("attn_norm"), spec.norm)
        match spec.mixer:
            case AttentionSpec():
                self.attn = Attention(ctx.child("attn"), spec.mixer)
            case MLASpec():
                self.attn = MLA(ctx.child("attn"), spec.mixer)
            case DeltaSpec():
                self.attn = Delta(ctx.child("attn"), spec.mixer)
        self.ffn_norm = RMSNorm(ctx.child("ffn_norm"), spec.norm)
        match spec.ffn:
            case FFNSpec():
                self.ffn = FFN(ctx.child("ffn"), spec.ffn.activation)
            case MoESpec():
                self.ffn = MoE(ctx.child("ffn"), spec.ffn, layout.moe_of(spec.index))

    def forward(
        self,
        residual: torch.Tensor,
        delta: torch.Tensor | None,
        batch: ForwardBatch,
        ropes: Mapping[RopeSpec, RopeRows],
        kv: LayerCache,
        chosen: Chosen | None,
    ) -> tuple[torch.Tensor, Chosen | None]:
        """Advance `residual` in place past the attention; return the MLP's output, still to be added, and the selection
        of earlier rows for the layers that follow."""
        attended, chosen = self.attn(self.attn_norm(residual, delta), batch, ropes, kv, chosen)
        return self.ffn(self.ffn_norm(residual, attended), batch.token_ids), chosen


class Decoder(nn.Module):
    """Token rows -> logits."""

    def __init__(self, ctx: BuildContext, spec: DecoderSpec) -> None:
        super().__init__()
        _require_choices(spec)
        layout, lends = ctx.plan.layout, spec.borrows
        embedding = _lender(ctx).embedding if Borrow.EMBED in lends else Embedding(ctx.child("embed"))
        self.entry = None if spec.entry is None else Entry(ctx.child("entry"), spec.entry)
        self.rope = Ropes(ctx.child("rope"), main_ropes(spec))
        self.layers = nn.ModuleDict(
            {str(layer.index): DecoderLayer(ctx.child(f"layers.{layer.index}"), layer, layout) for layer in spec.layers}
        )
        self.norm = RMSNorm(ctx.child("norm"), spec.final_norm)
        if Borrow.HEAD in lends:
            head, self._head_dtype = _lender(ctx).output_head, _lender(ctx).dtype
        else:
            head, self._head_dtype = _own_head(ctx, embedding), ctx.dtype
        self._ends = (embedding, head)  # in a tuple: what is borrowed is no module of this model
        if Borrow.EMBED not in lends:
            self.embed = embedding
        if Borrow.HEAD not in lends:
            self.head = head
        self.dtype, self.kernels = ctx.dtype, ctx.kernels

    @property
    def embedding(self) -> Embedding:
        """Own or borrowed."""
        return self._ends[0]

    @property
    def output_head(self) -> Head | TiedHead:
        """Own or borrowed."""
        return self._ends[1]

    def finish(self) -> None:
        """Make a model ready whose parameters were filled by hand. Loading makes each layer ready as it goes."""
        Finishing(self, self.kernels, ()).rest()

    def weights_bytes(self) -> int:
        """Bytes of all weights in memory: parameters and packed copies, what is shared counted once."""
        device, sizes = self.norm.weight.device, dict[int, int]()
        for module in self.modules():
            held = module.held() if isinstance(module, Layer) else own_parameters(module)
            sizes.update({id(tensor): nbytes for tensor, nbytes in held if tensor.device == device})
        return sum(sizes.values())

    def forward(self, batch: ForwardBatch, kv: Sequence[LayerCache]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits [R, V] float32 of the rows that `batch` wants, and all rows [T, D] after the final norm if it wants
        those; `kv` has one entry per layer and is written to."""
        residual, ropes = self._begin(batch), self.rope(batch.positions)
        delta, chosen = None, None
        for layer, layer_kv in zip(self.layers.values(), kv, strict=True):
            delta, chosen = layer(residual, delta, batch, ropes, layer_kv, chosen)
        rows = batch.logits_rows
        if batch.wants_hidden:
            normed = self.norm(residual, delta)
            return self._logits(normed if rows is None else self.kernels.select(normed, rows)), normed
        if rows is not None and delta is not None:
            residual, delta = self.kernels.select(residual, rows), self.kernels.select(delta, rows)
        return self._logits(self.norm(residual, delta)), None

    def replay(self, kv: Sequence[LayerCache], counts: np.ndarray, slots: StateSlots) -> None:
        """Apply kept inputs again in every delta layer (kernels/delta.py: DeltaOps.replay)."""
        for layer, state in zip(self.layers.values(), kv, strict=True):
            if isinstance(layer, DecoderLayer) and isinstance(layer.attn, Delta) and isinstance(state, DeltaState):
                layer.attn.replay(state, counts, slots)

    def _begin(self, batch: ForwardBatch) -> torch.Tensor:
        embedded = self.embedding(batch.token_ids)
        if self.entry is None:
            return embedded
        if batch.hidden is None:
            raise ValueError("rows of this draft begin with hidden rows, but the batch has none")
        return self.entry(embedded, batch.hidden)

    def _logits(self, normed: torch.Tensor) -> torch.Tensor:
        return self.output_head(normed.to(self._head_dtype))


def _own_head(ctx: BuildContext, embedding: Embedding) -> Head | TiedHead:
    return TiedHead(ctx, embedding) if ctx.plan.layout.tied_head else Head(ctx.child("head"))


def _lender(ctx: BuildContext) -> Decoder:
    if ctx.lender is None:
        raise ValueError("a draft that borrows modules is built without its target")
    return ctx.lender


def _require_choices(spec: DecoderSpec) -> None:
    """A layer that takes the selection of a layer before it must have one."""
    has_choice = False
    for layer in spec.layers:
        indexer = layer.mixer.indexer if isinstance(layer.mixer, MLASpec) else None
        has_choice = has_choice or (indexer is not None and indexer.is_full)
        if indexer is not None and not has_choice:
            raise ValueError(f"layer {layer.index} takes the selection of an earlier layer, and no earlier one selects")
