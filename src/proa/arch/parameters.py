"""The parameter table of a decoder: every parameter's name and shape, from spec and layout, without torch.

layers/ creates its parameters from this table, `inspect` and the memory plan read it, NameMap.check proves the weight
rules against it.
"""

from __future__ import annotations

from collections.abc import Iterator

from proa.arch.blocks import AttentionSpec, FFNSpec, IndexerSpec, MLASpec, MoESpec, RopeKind, RopeSpec
from proa.arch.decoder import Borrow, DecoderSpec, LayerSpec
from proa.arch.delta_blocks import DeltaSpec, delta_parameters
from proa.arch.layout import MoELayout, ParameterInfo, WeightLayout
from proa.units import DType

Entry = tuple[str, ParameterInfo]


def decoder_parameters(spec: DecoderSpec, layout: WeightLayout) -> dict[str, ParameterInfo]:
    """Name -> shape of every parameter of the built decoder, in building order."""
    kept = dict(layout.blocks)
    table = dict(_outer_parameters(spec, layout))
    return table | {
        name: ParameterInfo(
            shape=info.shape, dtype=kept[name], scale_columns=None if kept[name].is_block else layout.scale_columns
        )
        for name, info in table.items()
        if name in kept
    }


def _outer_parameters(spec: DecoderSpec, layout: WeightLayout) -> Iterator[Entry]:
    if Borrow.EMBED not in spec.borrows:
        yield "embed.weight", _plain(spec.vocab, spec.hidden)
    if spec.entry is not None:
        yield "entry.embed_norm.weight", _plain(spec.hidden)
        yield "entry.hidden_norm.weight", _plain(spec.hidden)
        yield "entry.proj.weight", _plain(spec.hidden, 2 * spec.hidden)
    for layer in spec.layers:
        yield from _layer_parameters(layer, spec.hidden, layout)
    yield "norm.weight", _plain(spec.hidden)
    if not layout.tied_head and Borrow.HEAD not in spec.borrows:
        yield "head.weight", _plain(spec.vocab, spec.hidden)
    for rope in main_ropes(spec):
        if rope.kind is RopeKind.FACTORS:
            yield "rope.factors", ParameterInfo(shape=(rope.dim // 2,), dtype=DType.F32)


def main_ropes(spec: DecoderSpec) -> tuple[RopeSpec, ...]:
    """The different ropes of the layers, indexers included, in the order of their first layer."""
    ropes = [layer.mixer.rope for layer in spec.layers if not isinstance(layer.mixer, DeltaSpec)]
    ropes += [
        layer.mixer.indexer.rope
        for layer in spec.layers
        if isinstance(layer.mixer, MLASpec) and layer.mixer.indexer is not None
    ]
    return tuple(dict.fromkeys(rope for rope in ropes if rope is not None))


def _layer_parameters(layer: LayerSpec, hidden: int, layout: WeightLayout) -> Iterator[Entry]:
    prefix = f"layers.{layer.index}"
    yield f"{prefix}.attn_norm.weight", _plain(hidden)
    match layer.mixer:
        case AttentionSpec() as mixer:
            parts = attention_parameters(mixer, hidden)
        case MLASpec() as mixer:
            parts = mla_parameters(mixer, hidden)
        case DeltaSpec() as mixer:
            parts = delta_parameters(mixer, hidden)
    yield from ((f"{prefix}.attn.{name}", info) for name, info in parts)
    yield f"{prefix}.ffn_norm.weight", _plain(hidden)
    match layer.ffn:
        case FFNSpec() as ffn:
            parts = ffn_parameters(ffn, hidden)
        case MoESpec() as moe:
            parts = moe_parameters(moe, layout.moe_of(layer.index), hidden)
    yield from ((f"{prefix}.ffn.{name}", info) for name, info in parts)


def attention_parameters(spec: AttentionSpec, hidden: int) -> Iterator[Entry]:
    """`qkv` rows are q heads, then k heads, then v heads, then, if gated, the gates of the q heads."""
    query, key = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    rows = (2 if spec.is_gated else 1) * query + 2 * key
    yield "qkv.weight", _plain(rows, hidden)
    if spec.qkv_bias:
        yield "qkv.bias", _plain(rows)
    if spec.qk_norm is not None:
        yield "q_norm.weight", _plain(query if spec.qk_norm.is_whole else spec.head_dim)
        yield "k_norm.weight", _plain(key if spec.qk_norm.is_whole else spec.head_dim)
    yield "o.weight", _plain(hidden, query)
    if spec.output_bias:
        yield "o.bias", _plain(hidden)


def mla_parameters(spec: MLASpec, hidden: int) -> Iterator[Entry]:
    """`qkv_a` rows are the query's low-rank part (or the queries themselves, head by head), then the latent, then the
    shared rotated key. `kv_b` rows are, head by head, the plain part of the key, then the value."""
    queries = spec.num_heads * spec.query_dim
    yield "qkv_a.weight", _plain((spec.q_rank or queries) + spec.kv_rank + spec.rope_dim, hidden)
    if spec.q_rank is not None:
        yield "q_norm.weight", _plain(spec.q_rank)
        yield "q_b.weight", _plain(queries, spec.q_rank)
    yield "kv_norm.weight", _plain(spec.kv_rank)
    yield "kv_b.weight", _plain(spec.num_heads * (spec.nope_dim + spec.value_dim), spec.kv_rank)
    yield "o.weight", _plain(hidden, spec.num_heads * spec.value_dim)
    if spec.indexer is not None and spec.indexer.is_full:
        yield from ((f"indexer.{name}", info) for name, info in _indexer_parameters(spec.indexer, spec, hidden))


def _indexer_parameters(spec: IndexerSpec, mixer: MLASpec, hidden: int) -> Iterator[Entry]:
    yield "q.weight", _plain(spec.num_heads * spec.head_dim, mixer.q_rank or hidden)
    yield "k.weight", _plain(spec.head_dim, hidden)
    yield "k_norm.weight", _plain(spec.head_dim)
    yield "k_norm.bias", _plain(spec.head_dim)
    yield "weights.weight", _plain(spec.num_heads, hidden)


def ffn_parameters(spec: FFNSpec, hidden: int) -> Iterator[Entry]:
    """`gate_up` rows are gate, then up."""
    yield "gate_up.weight", _plain(2 * spec.width, hidden)
    if spec.bias:
        yield "gate_up.bias", _plain(2 * spec.width)
    yield "down.weight", _plain(hidden, spec.width)
    if spec.bias:
        yield "down.bias", _plain(hidden)


def moe_parameters(spec: MoESpec, layout: MoELayout, hidden: int) -> Iterator[Entry]:
    """Experts by slot: `gate_up` [slots, 2 width, hidden] as in the MLP, `down` [slots, hidden, width]."""
    yield "router.weight", _plain(spec.num_experts, hidden)
    if spec.router.has_bias:
        yield "router.bias", ParameterInfo(shape=(spec.num_experts,), dtype=DType.F32)
    if spec.router.table is not None:
        listed = (spec.router.table, spec.top_k)
        yield "router.table", ParameterInfo(shape=listed, dtype=DType.I64, below=spec.num_experts)
    yield "experts.gate_up", _plain(layout.num_slots, 2 * spec.width, hidden)
    yield "experts.down", _plain(layout.num_slots, hidden, spec.width)
    if spec.shared is None:
        return
    if not layout.is_fused:
        shared = FFNSpec(width=spec.shared.count * spec.shared.width, bias=False)
        yield from ((f"shared.{name}", info) for name, info in ffn_parameters(shared, hidden))
    if spec.shared.is_gated:
        yield "shared_gate.weight", _plain(1, hidden)


def _plain(*shape: int) -> ParameterInfo:
    return ParameterInfo(shape=shape)
