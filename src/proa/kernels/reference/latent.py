"""Latent attention and its indexer over the paged cache in plain torch. The definition other backends match.

All heads read the same cached rows, so they are more queries of one head: nothing is repeated. Legend:
kernels/latent_seam.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import torch
import torch.nn.functional as F

from proa.arch.blocks import IndexerSpec
from proa.kernels.latent_seam import Absorbed, Chosen, IndexNorm, LatentKV, LatentShape
from proa.kernels.reference.attention import mask
from proa.kernels.reference.misc import rms_norm, rotate
from proa.kernels.seam import RopeRows, Segment


class ReferenceLatent:
    """LatentOps: gather each request's rows, then attend over all requests of the segment at once."""

    name = "reference"

    def absorb(self, weight: torch.Tensor, shape: LatentShape) -> Absorbed:
        heads = weight.detach().view(shape.heads, shape.nope + shape.value, shape.rank)
        return Absorbed(key=heads[:, : shape.nope], value=heads[:, shape.nope :])

    def query_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return rms_norm(x, weight, eps).to(x.dtype)

    def latent_write(
        self,
        queries: torch.Tensor,
        latent: torch.Tensor,
        norm: torch.Tensor,
        eps: float,
        shape: LatentShape,
        rope: RopeRows | None,
        kv: LatentKV,
        write_slots: torch.Tensor,
    ) -> torch.Tensor:
        plain, turned = queries.unflatten(1, (shape.heads, -1)).split((shape.nope, shape.rope), dim=-1)
        rank, key = latent.split((shape.rank, shape.rope), dim=-1)
        if rope is not None:
            turned = rotate(turned.float(), rope).to(queries.dtype)
            key = rotate(key.float().unsqueeze(1), rope).squeeze(1)
        row = torch.cat((rms_norm(rank, norm, eps), key), dim=-1).to(latent.dtype)
        kv.latent.index_copy_(0, write_slots, row.to(kv.latent.dtype))
        return torch.cat((plain, turned), dim=-1)

    def latent_attention(
        self,
        queries: torch.Tensor,
        absorbed: Absorbed,
        kv: LatentKV,
        segment: Segment,
        *,
        scale: float,
        visible: torch.Tensor | None,
    ) -> torch.Tensor:
        _, nope, rank = absorbed.key.shape
        if segment.pad is not None:
            queries = queries.index_select(0, segment.pad)
        heads, dtype, view = queries.shape[1], queries.dtype, segment.views[None]
        # [B Q, H, R + r] -> [B, 1, Q H, R + r]
        plain = torch.einsum("thn,hnr->thr", queries[..., :nope], absorbed.key)
        absorbing = torch.cat((plain, queries[..., nope:]), dim=-1)
        rows = kv.latent.index_select(0, view.slots).to(dtype).view(segment.requests, 1, -1, kv.latent.shape[1])
        out = F.scaled_dot_product_attention(
            absorbing.view(segment.requests, 1, segment.queries * heads, -1),
            rows,
            rows[..., :rank],
            attn_mask=mask(view, heads, dtype) if visible is None else _of_heads(visible, heads),
            scale=scale,
        )
        out = torch.einsum("thr,hvr->thv", out.reshape(-1, heads, rank), absorbed.value).flatten(1)
        return out if segment.unpad is None else out.index_select(0, segment.unpad)

    def index(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        weights: torch.Tensor,
        norm: IndexNorm,
        spec: IndexerSpec,
        rope: RopeRows,
        kv: LatentKV,
        segments: Sequence[Segment],
        write_slots: torch.Tensor,
    ) -> Chosen:
        if kv.index is None:
            raise ValueError("a layer with an indexer has no cache of index keys")
        key = F.layer_norm(keys.float(), (spec.head_dim,), norm.weight, norm.bias, spec.norm_eps)
        key = rotate(key.unsqueeze(1), rope).squeeze(1).to(keys.dtype)
        kv.index.index_copy_(0, write_slots, key.to(kv.index.dtype))
        query = rotate(queries.unflatten(1, (spec.num_heads, -1)).float(), rope).to(queries.dtype).float()
        scaled = weights.float() / sqrt(spec.num_heads * spec.head_dim)
        return Chosen(visible=tuple(_chosen(query, scaled, kv.index, part, spec.top_k) for part in segments))


def _of_heads(visible: torch.Tensor, heads: int) -> torch.Tensor:
    """[B, Q, L] -> [B, 1, Q * H, L]."""
    return visible.repeat_interleave(heads, dim=1).unsqueeze(1)


def _chosen(
    queries: torch.Tensor, weights: torch.Tensor, index: torch.Tensor, segment: Segment, top_k: int
) -> torch.Tensor:
    """`queries` [T, h, i] and `weights` [T, h] of the whole batch -> visible [B, Q, L] of the segment."""
    view = segment.views[None]
    own = slice(segment.first, segment.first + segment.num_rows)
    queries, weights = queries[own], weights[own]
    if segment.pad is not None:
        queries, weights = queries.index_select(0, segment.pad), weights.index_select(0, segment.pad)
    keys = index.index_select(0, view.slots).float().view(segment.requests, -1, index.shape[1])
    shape = (segment.requests, segment.queries, keys.shape[1])
    visible = view.visible if view.visible is not None else torch.ones(shape, dtype=torch.bool, device=keys.device)
    if shape[2] <= top_k:
        return visible
    scores = torch.zeros(shape, device=keys.device)
    for head in range(queries.shape[1]):  # one at a time: all scores of all heads would be h times the memory
        of_head = queries[:, head].view(*shape[:2], -1) @ keys.transpose(1, 2)
        scores += weights[:, head].view(*shape[:2], 1) * of_head.relu()
    best = scores.masked_fill(~visible, float("-inf")).sort(dim=-1, descending=True, stable=True).indices[..., :top_k]
    return torch.zeros_like(visible).scatter_(-1, best, True) & visible
