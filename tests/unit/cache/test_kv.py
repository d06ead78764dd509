"""What a layer's cache holds is what its mixer says: heads of keys and values, or latents and index keys."""

from __future__ import annotations

from dataclasses import replace

import torch

from proa.arch.blocks import AttentionSpec, IndexerSpec, MLASpec, NormSpec, RopeKind, RopeSpec
from proa.arch.decoder import MixerSpec
from proa.cache.kv import KVCache
from proa.kernels.latent_seam import LatentKV
from proa.kernels.seam import LayerKV

ROPE = RopeSpec(kind=RopeKind.DEFAULT, base=1e4, dim=4)
HEADS = AttentionSpec(
    num_heads=6, num_kv_heads=2, head_dim=8, rope=ROPE, scale=1.0, qkv_bias=False, output_bias=False, qk_norm=None,
    window=None,
)  # fmt: skip
LATENT = MLASpec(
    num_heads=3, q_rank=10, kv_rank=12, nope_dim=6, rope_dim=4, value_dim=5, rope=ROPE, scale=1.0,
    norm=NormSpec(eps=1e-6),
)  # fmt: skip
INDEXER = IndexerSpec(num_heads=4, head_dim=8, top_k=3, rope=ROPE, norm_eps=1e-6, is_full=True)


def cache(*mixers: MixerSpec) -> KVCache:
    return KVCache(mixers, num_pages=5, page_size=4, dtype=torch.bfloat16, device="cpu")


def test_heads_have_keys_and_values() -> None:
    (layer,) = cache(HEADS).layers
    assert isinstance(layer, LayerKV) and layer.page_size == 4
    assert layer.keys.shape == layer.values.shape == (20, 2, 8)


def test_latent_layers_have_one_row_for_all_heads() -> None:
    (layer,) = cache(LATENT).layers
    assert isinstance(layer, LatentKV) and layer.page_size == 4
    assert layer.latent.shape == (20, 16) and layer.latent.dtype is torch.bfloat16 and layer.index is None


def test_index_keys_are_cached_where_a_layer_selects_and_nowhere_else() -> None:
    full = replace(LATENT, indexer=INDEXER)
    first, second = cache(full, replace(LATENT, indexer=replace(INDEXER, is_full=False))).layers
    assert isinstance(first, LatentKV) and first.index is not None and first.index.shape == (20, 8)
    assert isinstance(second, LatentKV) and second.index is None


def test_bytes_are_those_that_the_specs_state() -> None:
    """Elements of a row by hand: 2 * 2 * 8, 12 + 4, 12 + 4 + 8."""
    mixers = (HEADS, LATENT, replace(LATENT, indexer=INDEXER))
    held = cache(*mixers)
    assert held.nbytes == 20 * 2 * (32 + 16 + 24) == sum(tensor.nbytes for tensor in held.tensors())
    assert [mixer.state.kv_width for mixer in mixers] == [32, 16, 24]
