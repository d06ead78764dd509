"""Self-tests of experts, latent attention and its indexer: both backends' results on small values, for probe.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from ctypes import CDLL
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from proa.arch.blocks import (
    SILU,
    ActivationSpec,
    GroupScore,
    IndexerSpec,
    RopeKind,
    RopeSpec,
    RouterSpec,
    Score,
)
from proa.kernels.catalog import BLOCK_FORMATS
from proa.kernels.latent_seam import IndexNorm, LatentKV, LatentShape
from proa.kernels.native.abi import Form, load_library
from proa.kernels.native.latent import NativeLatent
from proa.kernels.native.moe import NativeMoE
from proa.kernels.native.ops import NativeDense
from proa.kernels.native.sink import Direct
from proa.kernels.reference.latent import ReferenceLatent
from proa.kernels.reference.moe import ReferenceMoE
from proa.kernels.seam import Blocks, RopeRows, Routed, Segment, View
from proa.units import Phase

Results = Iterator[tuple[str, torch.Tensor, torch.Tensor]]


def _values(seed: int) -> Callable[..., torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=random)


def moe_results(library: Path, dtype: torch.dtype) -> Results:
    """(op, native, reference): each way to score, with and without groups and by a table, and experts beside shared
    ones, without a limit and with one."""
    values, loaded = _values(0), load_library(library)
    native, reference = NativeMoE(loaded, Direct(loaded)), ReferenceMoE()
    weight, bias, gate = (values(24, 48) / 4).to(dtype), values(24) / 8, (values(1, 48) / 7).to(dtype)
    x, shared = values(13, 48).to(dtype), values(13, 48).to(dtype)
    for spec in _routers():
        used = bias if spec.has_bias else None
        chosen = [
            ops.route(x, ops.pack_router(weight, used), spec, 3, (24, 25), 0.5, gate) for ops in (native, reference)
        ]
        yield f"choice by {spec.score.value}", chosen[0].slots, chosen[1].slots
        yield f"weights by {spec.score.value}", chosen[0].weights, chosen[1].weights
    listed, tokens = (torch.arange(21) * 5 % 24).view(7, 3), torch.arange(13) * 3 % 7
    by_table = replace(spec, has_bias=False, table=len(listed))
    chosen = [
        ops.route(x, ops.pack_router(weight, None, listed), by_table, 3, (24, 25), 0.5, gate, tokens)
        for ops in (native, reference)
    ]
    yield "experts by a table", chosen[0].slots, chosen[1].slots
    yield "weights by a table", chosen[0].weights, chosen[1].weights
    gate_up, down = (values(26, 64, 48) / 7).to(dtype), (values(26, 48, 32) / 6).to(dtype)
    for rows, activation in ((1, SILU), (13, SILU), (13, ActivationSpec(limit=0.5))):
        made = [
            ops.experts(
                x[:rows],
                ops.route(x[:rows], ops.pack_router(weight, None), spec, 3, (24, 25), 0.5, None),
                ops.pack_experts(gate_up.clone(), down.clone()),
                scale=1.5,
                shared=shared[:rows],
                gate=gate,
                activation=activation,
            )
            for ops in (native, reference)
        ]
        yield f"experts of {rows} rows{activation.note}", made[0], made[1]
    if loaded.proa_row_bytes(Form.Q8_0, 32):  # 0 where this processor's library has no quantised products
        yield from _block_results(loaded, dtype)


def _block_results(loaded: CDLL, dtype: torch.dtype) -> Results:
    """Experts on random blocks, against the gated MLP of each row's one expert: the same products, which probe.py holds
    against the reference. The reference itself rounds no activations."""
    random, sink = torch.Generator().manual_seed(0), Direct(loaded)
    dense, native, x = NativeDense(loaded, sink), NativeMoE(loaded, sink), _values(1)(7, 256).to(dtype)
    slots = torch.tensor([0, 2, 1, 2, 2, 0, 2]).int()
    for format in BLOCK_FORMATS:
        gate_up, down = (
            torch.randint(0, 256, (3, out, format.nbytes(256)), generator=random, dtype=torch.uint8) & 0x37
            for out in (512, 256)
        )  # whichever bytes are float16 factors are finite and below one half
        packed = native.pack_expert_blocks(Blocks(data=gate_up, format=format), Blocks(data=down, format=format), dtype)
        routed = Routed(slots=slots[:, None], weights=torch.ones(7, 1))
        packs = [[dense.pack_blocks(one[slot], None, format, dtype) for one in (gate_up, down)] for slot in range(3)]
        expected = torch.cat([dense.ffn(row[None], *packs[slot]) for row, slot in zip(x, slots.tolist(), strict=True)])
        ours = native.experts(x, routed, packed, scale=1.0, shared=None, gate=None)
        yield f"experts on {format.value} blocks", ours, expected


def _routers() -> tuple[RouterSpec, ...]:
    plain = {"renormalise": True, "scale": 2.5}
    return (
        RouterSpec(
            score=Score.SOFTMAX, has_bias=False, num_groups=4, top_groups=2, group_score=GroupScore.MAX, **plain
        ),
        RouterSpec(
            score=Score.SIGMOID, has_bias=True, num_groups=4, top_groups=2, group_score=GroupScore.TOP2_SUM, **plain
        ),
        RouterSpec(
            score=Score.SQRT_SOFTPLUS, has_bias=True, num_groups=1, top_groups=1, group_score=GroupScore.NONE, **plain
        ),
    )


def latent_results(library: Path, dtype: torch.dtype) -> Results:
    """(op, native, reference): one prompt of 70 rows in three pages out of order, with neighbours as pairs."""
    values, loaded, rows, page_size = _values(0), load_library(library), 70, 32
    shape, pages = LatentShape(heads=3, nope=16, rope=8, value=20, rank=48), np.array([[3, 0, 2]], dtype=np.int32)
    merged, norm = values(rows, 3 * 24 + 56).to(dtype), 1 + values(48) / 8
    up = (values(3 * 36, 48) / 7).to(dtype)
    angles = torch.arange(rows)[:, None, None] * torch.logspace(0, -2, 4).repeat(2)
    signs = torch.tensor([-1.0, 1.0]).repeat_interleave(4)
    rope = RopeRows(cos=angles.cos(), sin=angles.sin() * signs, is_interleaved=True)
    places = torch.arange(rows)
    slots = torch.from_numpy(pages[0].astype(np.int64))[places // page_size] * page_size + places % page_size
    segment, made = one_prompt(rows, pages, slots), []
    for ops in (NativeLatent(loaded, Direct(loaded)), ReferenceLatent()):
        kv = LatentKV(latent=torch.zeros(4 * page_size, 56, dtype=dtype), index=None, page_size=page_size)
        queries = ops.latent_write(merged[:, :72], merged[:, 72:], norm, 1e-6, shape, rope, kv, slots)
        out = ops.latent_attention(queries, ops.absorb(up, shape), kv, segment, scale=0.2, visible=None)
        made.append((ops.query_norm(merged[:, :48], norm, 1e-6), queries, kv.latent, out))
    yield from zip(("query norm", "latent queries", "latent rows", "latent attention"), *made, strict=True)
    yield from _sparse_results(values, loaded, dtype, rope, segment, slots)


def _sparse_results(
    values: Callable[..., torch.Tensor],
    loaded: CDLL,
    dtype: torch.dtype,
    rope: RopeRows,
    segment: Segment,
    slots: torch.Tensor,
) -> Results:
    """Index keys, and attention over the five best rows of each, which are best by far, whatever is rounded: keys mix
    two directions in steps of 1/72, and their norm leaves them alone; queries point along the first."""
    shape, rows, made = LatentShape(heads=3, nope=16, rope=8, value=20, rank=48), segment.num_rows, []
    turn = RopeSpec(kind=RopeKind.DEFAULT, base=1.0, dim=8, is_interleaved=True)
    spec = IndexerSpec(num_heads=4, head_dim=24, top_k=5, rope=turn, norm_eps=1e-6, is_full=True)
    along, across = torch.tensor([1.0, -1.0]).repeat(12), torch.tensor([1.0, 1.0, -1.0, -1.0]).repeat(6)
    shares = ((torch.arange(rows) * 37 % 70 + 1) / 72)[:, None]
    keys = (shares * along + (1 - shares.square()).sqrt() * across).to(dtype)
    queries, weights = along.repeat(rows, 4).to(dtype), torch.ones(rows, 4, dtype=dtype)
    still = RopeRows(cos=torch.ones_like(rope.cos), sin=torch.zeros_like(rope.sin), is_interleaved=True)
    attending, up, latent = values(rows, 3, 24).to(dtype), (values(108, 48) / 7).to(dtype), values(128, 56).to(dtype)
    for ops in (NativeLatent(loaded, Direct(loaded)), ReferenceLatent()):
        norm = IndexNorm(weight=torch.ones(24), bias=torch.zeros(24))
        turned, kv = (LatentKV(latent=latent, index=torch.zeros(128, 24, dtype=dtype), page_size=32) for _ in "tk")
        ops.index(queries, keys, weights, norm, spec, rope, turned, (segment,), slots)
        (visible,) = ops.index(queries, keys, weights, norm, spec, still, kv, (segment,), slots).visible
        out = ops.latent_attention(attending, ops.absorb(up, shape), kv, segment, scale=0.2, visible=visible)
        made.append((turned.index, out))
    yield from zip(("index keys", "sparse attention"), *made, strict=True)


def one_prompt(rows: int, pages: np.ndarray, slots: torch.Tensor) -> Segment:
    """A prompt of `rows` rows in `pages`, whole and through a window of 20; its cache rows are `slots`."""
    at = torch.arange(rows)
    causal = at[None] <= at[:, None]
    near = causal & (at[None] > at[:, None] - 20)
    return Segment(
        phase=Phase.PREFILL,
        first=0,
        num_rows=rows,
        requests=1,
        queries=rows,
        rows=np.array([[0, rows, 0]]),
        tables=pages,
        pad=None,
        unpad=None,
        views={None: View(slots=slots, visible=causal[None]), 20: View(slots=slots, visible=near[None])},
    )
