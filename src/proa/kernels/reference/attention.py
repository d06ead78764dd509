"""Softmax attention over the paged cache in plain torch, for every phase. The definition other backends match.

Heads that share keys and values are handled as more queries of one head, so nothing is repeated. Scores and softmax are
float32 inside torch's attention op, whatever the compute dtype. Legend: kernels/seam.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from proa.kernels.reference.misc import rms_norm, rotate
from proa.kernels.seam import HeadNorm, Heads, LayerKV, RopeRows, Segment, View


class ReferenceAttention:
    """AttentionOps: gather each request's visible rows, then attend over all requests of the segment at once."""

    name = "reference"

    def write(
        self,
        projected: torch.Tensor,
        heads: Heads,
        norm: HeadNorm | None,
        rope: RopeRows,
        kv: LayerKV,
        write_slots: torch.Tensor,
    ) -> torch.Tensor:
        rows = projected[:, : heads.width].unflatten(1, (heads.query + 2 * heads.key_value, heads.size))
        rotated, values = rows.split((heads.query + heads.key_value, heads.key_value), dim=1)
        rotated = rotated.float()
        if norm is not None:
            rotated = _normed(rotated, heads, norm)
        queries, keys = rotate(rotated, rope).to(projected.dtype).split((heads.query, heads.key_value), dim=1)
        kv.keys.index_copy_(0, write_slots, keys.to(kv.keys.dtype))
        kv.values.index_copy_(0, write_slots, values.to(kv.values.dtype))
        return queries

    def attention(
        self, queries: torch.Tensor, kv: LayerKV, segment: Segment, *, window: int | None, scale: float
    ) -> torch.Tensor:
        view = segment.views[window]
        if segment.pad is not None:
            queries = queries.index_select(0, segment.pad)
        _, num_heads, size = queries.shape
        kv_heads = kv.keys.shape[1]
        group = num_heads // kv_heads
        # [B, Q, K, G, d] -> [B, K, Q * G, d]
        grouped = queries.view(segment.requests, segment.queries, kv_heads, group, size).transpose(1, 2)
        out = F.scaled_dot_product_attention(
            grouped.reshape(segment.requests, kv_heads, segment.queries * group, size),
            _gather(kv.keys, view, segment.requests, queries.dtype),
            _gather(kv.values, view, segment.requests, queries.dtype),
            attn_mask=mask(view, group, queries.dtype),
            scale=scale,
        )
        out = out.view(segment.requests, kv_heads, segment.queries, group, size).transpose(1, 2)
        out = out.reshape(segment.requests * segment.queries, num_heads * size)
        return out if segment.unpad is None else out.index_select(0, segment.unpad)


def _normed(rows: torch.Tensor, heads: Heads, norm: HeadNorm) -> torch.Tensor:
    """Query and key heads of `rows` [T, H + K, d] float32, each normed by itself or all of a kind as one vector."""
    if norm.is_whole:
        parts = rows.split((heads.query, heads.key_value), dim=1)
        whole = [rms_norm(part.flatten(1), None, norm.eps).view(part.shape) for part in parts]
        return torch.cat(whole, dim=1) * norm.weight
    return rms_norm(rows, None, norm.eps) * norm.weight


def _gather(rows: torch.Tensor, view: View, requests: int, dtype: torch.dtype) -> torch.Tensor:
    """[S, K, d] -> [B, K, L, d]: a strided view of the gathered rows."""
    gathered = rows.index_select(0, view.slots).to(dtype)
    return gathered.view(requests, -1, *rows.shape[1:]).transpose(1, 2)


def mask(view: View, group: int, dtype: torch.dtype) -> torch.Tensor | None:
    """0 where visible, else -inf, [B, 1, Q * G, L]; None when all is visible."""
    if view.visible is None:
        return None
    if (group, dtype) not in view.memo:
        hidden = view.visible.logical_not().repeat_interleave(group, dim=1).unsqueeze(1)
        view.memo[group, dtype] = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(
            hidden, float("-inf")
        )
    return view.memo[group, dtype]
