"""A whole MLA layer against the formula in float64, with explicit keys and values; selections between layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from proa.arch.blocks import IndexerSpec, MLASpec, NormSpec, QueryScale, RopeKind, RopeSpec
from proa.arch.parameters import mla_parameters
from proa.cache.kv import KVCache
from proa.kernels.latent_seam import LatentKV
from proa.layers.base import BuildContext
from proa.layers.mla import MLA
from proa.layers.rope import Ropes
from proa.runner.batch import RowSpan, make_batch
from proa.units import DType, Phase
from tests.factories.layers import finish, layer_context

HIDDEN, ROWS = 24, 9
ROPE = RopeSpec(kind=RopeKind.DEFAULT, base=100.0, dim=4, is_interleaved=True)
SPEC = MLASpec(
    num_heads=3, q_rank=10, kv_rank=12, nope_dim=6, rope_dim=4, value_dim=5, rope=ROPE, scale=0.4,
    norm=NormSpec(eps=1e-6),
)  # fmt: skip
INDEXER = IndexerSpec(
    num_heads=4, head_dim=8, top_k=3, rope=replace(ROPE, is_interleaved=False), norm_eps=1e-6, is_full=True
)


def built(spec: MLASpec) -> tuple[MLA, BuildContext, dict[str, np.ndarray]]:
    """The layer with random parameters, and these in float64."""
    context = layer_context(mla_parameters(spec, HIDDEN), dtype=DType.F32, is_latent=True)
    layer, generator = MLA(context, spec), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    values = {name: parameter.double().numpy() for name, parameter in layer.named_parameters()}
    finish(layer, context)
    return layer, context, values


class Run:
    """One request, fed in parts; its rows lie in pages 2, 0, 1."""

    def __init__(self, spec: MLASpec, context: BuildContext) -> None:
        specs = {spec.rope, None if spec.indexer is None else spec.indexer.rope} - {None}
        self.ropes = Ropes(
            layer_context((), dtype=DType.F32, is_latent=True), [one for one in specs if one is not None]
        )
        self.ropes.finish(context.kernels)
        cache = KVCache([spec], num_pages=3, page_size=4, dtype=torch.float32, device="cpu")
        (self.kv,) = cache.layers
        assert isinstance(self.kv, LatentKV)

    def forward(self, layer: MLA, x: torch.Tensor, start: int, chosen: object = None) -> tuple[torch.Tensor, object]:
        span = RowSpan(phase=Phase.VERIFY, tokens=[0] * len(x), start=start, pages=[2, 0, 1], logits=())
        batch = make_batch([span], page_size=4, windows=(None,), device="cpu")
        return layer(x, batch, self.ropes(batch.positions), self.kv, chosen)


def normed(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6) * weight


def turned(x: np.ndarray, position: int) -> np.ndarray:
    """Neighbours turn by position / 100^(pair / 2)."""
    angles = position * 100.0 ** (-np.arange(2) / 2)
    pairs = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angles)
    return np.stack((pairs.real, pairs.imag), axis=-1).reshape(x.shape)


def formula(spec: MLASpec, values: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    """DeepSeek V2, section 2.1: explicit keys and values for every row."""
    merged = x @ values["qkv_a.weight"].T
    first, rank, key = np.split(
        merged, [merged.shape[1] - spec.kv_rank - spec.rope_dim, merged.shape[1] - spec.rope_dim], 1
    )
    if spec.q_rank is not None:
        first = normed(first, values["q_norm.weight"]) @ values["q_b.weight"].T
    queries = first.reshape(len(x), spec.num_heads, -1)
    up = (normed(rank, values["kv_norm.weight"]) @ values["kv_b.weight"].T).reshape(len(x), spec.num_heads, -1)
    out = np.zeros((len(x), spec.num_heads, spec.value_dim))
    for row in range(len(x)):
        factor = 1.0
        if spec.query_scale is not None:
            factor = 1 + spec.query_scale.beta * np.log(1 + row // spec.query_scale.original)
        for head in range(spec.num_heads):
            plain, rotated = np.split(queries[row, head], [spec.nope_dim])
            scores = np.array(
                [
                    factor * spec.scale * (plain @ up[at, head, : spec.nope_dim] + (
                        turned(rotated, row) @ turned(key[at], at) if spec.rope is not None else rotated @ key[at]
                    ))
                    for at in range(row + 1)
                ]
            )  # fmt: skip
            weights = np.exp(scores - scores.max())
            out[row, head] = weights / weights.sum() @ up[: row + 1, head, spec.nope_dim :]
    return out.reshape(len(x), -1) @ values["o.weight"].T


@pytest.mark.parametrize(
    "change",
    [{}, {"q_rank": None}, {"rope": None}, {"query_scale": QueryScale(beta=0.7, original=2)}],
    ids=["low-rank", "direct", "no-rope", "scaled"],
)
def test_the_layer_is_the_formula_however_rows_are_cut(change: dict[str, Any]) -> None:
    spec = replace(SPEC, **change)
    layer, context, values = built(spec)
    x = torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(1))
    run = Run(spec, context)
    parts = [run.forward(layer, x[start:stop], start)[0] for start, stop in ((0, 4), (4, 5), (5, 9))]
    np.testing.assert_allclose(torch.cat(parts).detach().numpy(), formula(spec, values, x.double().numpy()), atol=2e-5)


def test_a_selection_thins_attention_out_and_reaches_the_layers_that_share_it() -> None:
    full = replace(SPEC, indexer=INDEXER)
    layer, context, _ = built(full)
    x = torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(1))
    out, chosen = Run(full, context).forward(layer, x, 0)
    assert chosen is not None
    every, _ = Run(full, context).forward(built(replace(full, indexer=replace(INDEXER, top_k=ROWS)))[0], x, 0)
    torch.testing.assert_close(out[: INDEXER.top_k], every[: INDEXER.top_k])  # these rows see all that there is
    assert ((out - every).abs().amax(dim=1)[INDEXER.top_k :] > 1e-3).all()

    follower = replace(SPEC, indexer=replace(INDEXER, is_full=False))
    shared, context, _ = built(follower)
    thin, handed_on = Run(follower, context).forward(shared, x, 0, chosen)
    whole, none = Run(SPEC, context).forward(built(SPEC)[0], x, 0, None)
    assert handed_on is chosen and none is None
    assert ((thin - whole).abs().amax(dim=1)[INDEXER.top_k :] > 1e-3).all()


def test_a_layer_without_an_indexer_sees_all_and_hands_the_selection_on() -> None:
    layer, context, _ = built(SPEC)
    x = torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(1))
    full = replace(SPEC, indexer=INDEXER)
    selecting, other, _ = built(full)
    _, chosen = Run(full, other).forward(selecting, x, 0)
    out, handed_on = Run(SPEC, context).forward(layer, x, 0, chosen)
    plain, _ = Run(SPEC, context).forward(layer, x, 0)
    assert handed_on is chosen and torch.equal(out, plain)
