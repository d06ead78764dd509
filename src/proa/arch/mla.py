"""Multi-head latent attention: config parsers and weight rules.

Imports values.py, rope.py and rules.py, never common.py, which dispatches to the rules here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from proa.arch.blocks import IndexerSpec, MLASpec, NormSpec, RopeKind
from proa.arch.rope import LLAMA4_KEYS, PARTIAL, query_scale, rope, yarn_mscale
from proa.arch.rules import cut_rule, layer_rule
from proa.arch.values import positive
from proa.arch.weights import WeightRule
from proa.checkpoint.hf_config import HFView
from proa.errors import ConfigError

_LATENT_EPS = 1e-6
"""Of the norms inside the low-rank maps, in every family; `rms_norm_eps` speaks of the layers' own norms only."""
SPLIT_KV = "split_kv_b"
"""A key of checkpoint/gguf_latent.py: no hub config has it."""
_INDEX_KEY_EPS = 1e-6
_SPARSE_KIND = "indexed_attention"
_FULL: Mapping[str, bool] = MappingProxyType({"F": True, "full": True, "S": False, "shared": False})


def mla(c: HFView) -> MLASpec:
    """Attention of one layer, without an indexer. The scale grows with the square of YaRN's `mscale_all_dim`."""
    heads = positive(c, "num_attention_heads")
    if c.int("num_key_value_heads", default=heads) != heads:
        raise ConfigError(
            "config/value",
            f"{c.where}: num_key_value_heads = {c.int('num_key_value_heads')} differs from num_attention_heads = "
            f"{heads}, but latent attention has no groups of heads",
        )
    nope, rotated = positive(c, "qk_nope_head_dim"), positive(c, "qk_rope_head_dim")
    if rotated % 2:
        raise ConfigError("config/value", f"{c.where}: qk_rope_head_dim = {rotated} must be even")
    _refuse_other_sizes(c, rotated, nope + rotated)
    turned = rope(c, rotated, read_elsewhere=(PARTIAL, *LLAMA4_KEYS))
    return MLASpec(
        num_heads=heads,
        q_rank=positive(c, "q_lora_rank") if c.int("q_lora_rank", default=None) is not None else None,
        kv_rank=positive(c, "kv_lora_rank"),
        nope_dim=nope,
        rope_dim=rotated,
        value_dim=positive(c, "v_head_dim"),
        rope=replace(turned, is_interleaved=c.flag("rope_interleave", default=True)),
        scale=(nope + rotated) ** -0.5 * _mscale(c, turned.kind, turned.factor) ** 2,
        norm=NormSpec(eps=_LATENT_EPS),
        query_scale=query_scale(c),
        has_split_kv=c.flag(SPLIT_KV, default=False),
    )


def _mscale(c: HFView, kind: RopeKind, factor: float) -> float:
    all_dim = c.rope().float("mscale_all_dim", default=0.0)
    return yarn_mscale(factor, all_dim) if kind is RopeKind.YARN and all_dim else 1.0


def _refuse_other_sizes(c: HFView, rotated: int, width: int) -> None:
    """`partial_rotary_factor` and `qk_head_dim` can only repeat the sizes; `head_dim` means one or the other."""
    c.get("head_dim", None)
    if c.int("qk_head_dim", default=width) != width:
        raise ConfigError("config/value", f"{c.where}: qk_head_dim = {c.int('qk_head_dim')} is not the sum {width}")
    for view in (c, c.rope()):
        part = view.float(PARTIAL, default=1.0)
        if part != 1.0 and round(part * width) != rotated:
            raise ConfigError(
                "config/value",
                f"{c.where}: {PARTIAL} = {part:g} contradicts qk_rope_head_dim = {rotated} of {width}",
            )


def sparse(c: HFView, mixer: MLASpec, *, interleaved: bool) -> tuple[MLASpec, ...]:
    """The attention of each layer, with its indexer. `interleaved`: the family's rope pairs of index queries and keys,
    where the config does not say; what is rotated are the first elements, as many as in the attention itself."""
    if mixer.q_rank is None or mixer.rope is None:
        raise ConfigError("config/value", f"{c.where}: q_lora_rank is null, but the indexer reads that row")
    dim = positive(c, "index_head_dim")
    if dim < mixer.rope_dim:
        raise ConfigError(
            "config/value", f"{c.where}: index_head_dim = {dim} is smaller than qk_rope_head_dim = {mixer.rope_dim}"
        )
    if set(c.list("layer_types", default=())) - {_SPARSE_KIND}:
        raise ConfigError("config/value", f"{c.where}: layer_types names other kinds than {_SPARSE_KIND}")
    flag = c.flag("indexer_rope_interleave", default=interleaved)
    indexer = IndexerSpec(
        num_heads=positive(c, "index_n_heads"),
        head_dim=dim,
        top_k=positive(c, "index_topk"),
        rope=replace(mixer.rope, is_interleaved=flag),
        norm_eps=_INDEX_KEY_EPS,
        is_full=True,
    )
    return tuple(replace(mixer, indexer=replace(indexer, is_full=full)) for full in _full_layers(c))


def _full_layers(c: HFView) -> tuple[bool, ...]:
    """Which layers select rows themselves: as listed, by a pattern of F and S, or every `index_topk_freq`-th one."""
    count = positive(c, "num_hidden_layers", at_most=4096)
    every, offset = c.int("index_topk_freq", default=1), c.int("index_skip_topk_offset", default=2)
    pattern, kinds = c.get("index_topk_pattern", None), c.list("indexer_types", default=None)
    named = kinds if kinds is not None else pattern
    full = [max(i - offset + 1, 0) % max(every, 1) == 0 for i in range(count)] if named is None else _named(c, named)
    if len(full) != count or not full[0]:
        raise ConfigError(
            "config/value",
            f"{c.where}: the {len(full)} layers' index kinds for {count} layers must begin with a full one",
        )
    return tuple(full)


def _named(c: HFView, named: Sequence[Any]) -> list[bool]:
    if not isinstance(named, str | tuple) or not all(isinstance(kind, str) and kind in _FULL for kind in named):
        raise ConfigError(
            "config/value", f"{c.where}: indexer_types or index_topk_pattern names other kinds than full and shared"
        )
    return [_FULL[kind] for kind in named]


def mla_rules(mixer: MLASpec, hidden: int, layers: Collection[int]) -> Iterator[WeightRule]:
    """The rules of `model.layers.#.self_attn.*` for layers with this mixer."""
    queries, latent = mixer.num_heads * mixer.query_dim, mixer.kv_rank + mixer.rope_dim
    if mixer.q_rank is None:
        start = queries
        yield _linear("q_proj", "qkv_a", (start, hidden), layers, (0, start))
    else:
        start = mixer.q_rank
        yield _linear("q_a_proj", "qkv_a", (start, hidden), layers, (0, start))
        yield _vector("q_a_layernorm.weight", "q_norm.weight", start, layers)
        yield _linear("q_b_proj", "q_b", (queries, start), layers, None)
    yield _linear("kv_a_proj_with_mqa", "qkv_a", (latent, hidden), layers, (start, start + latent))
    yield _vector("kv_a_layernorm.weight", "kv_norm.weight", mixer.kv_rank, layers)
    if mixer.has_split_kv:
        yield from _split_rules(mixer, layers)
    else:
        expanded = mixer.num_heads * (mixer.nope_dim + mixer.value_dim)
        yield _linear("kv_b_proj", "kv_b", (expanded, mixer.kv_rank), layers, None)
    yield _linear("o_proj", "o", (hidden, mixer.num_heads * mixer.value_dim), layers, None)
    if mixer.indexer is not None and mixer.indexer.is_full:
        yield from _indexer_rules(mixer.indexer, mixer.q_rank or hidden, hidden, layers)


def _split_rules(mixer: MLASpec, layers: Collection[int]) -> Iterator[WeightRule]:
    """Rows of all heads' keys, and rows of all heads' values: in `kv_b` each head has both."""
    both = mixer.nope_dim + mixer.value_dim
    for name, start, count in (("k_b_proj", 0, mixer.nope_dim), ("v_b_proj", mixer.nope_dim, mixer.value_dim)):
        heads = range(mixer.num_heads)
        cuts = [((h * both + start, h * both + start + count), (h * count, (h + 1) * count)) for h in heads]
        shape = (mixer.num_heads, count, mixer.kv_rank)
        yield cut_rule(f"self_attn.{name}.weight", "attn.kv_b.weight", shape, layers, cuts, is_linear=True)


def _indexer_rules(spec: IndexerSpec, q_width: int, hidden: int, layers: Collection[int]) -> Iterator[WeightRule]:
    yield _linear("indexer.wq_b", "indexer.q", (spec.num_heads * spec.head_dim, q_width), layers, None)
    yield _linear("indexer.wk", "indexer.k", (spec.head_dim, hidden), layers, None)
    for part in ("weight", "bias"):
        yield _vector(f"indexer.k_norm.{part}", f"indexer.k_norm.{part}", spec.head_dim, layers)
    yield _linear("indexer.weights_proj", "indexer.weights", (spec.num_heads, hidden), layers, None)


def _linear(
    name: str, parameter: str, shape: tuple[int, int], layers: Collection[int], rows: tuple[int, int] | None
) -> WeightRule:
    source, target = f"self_attn.{name}.weight", f"attn.{parameter}.weight"
    return layer_rule(source, target, shape, layers, rows, is_linear=True)


def _vector(name: str, parameter: str, width: int, layers: Collection[int]) -> WeightRule:
    return layer_rule(f"self_attn.{name}", f"attn.{parameter}", (width,), layers)
