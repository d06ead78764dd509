"""The parameter table of a decoder: every parameter's name and shape, from spec and layout, without torch.

layers/ creates its parameters from this table, `inspect` and the memory plan read it, NameMap.check proves the weight
rules against it.
"""

from __future__ import annotations

from collections.abc import Iterator

from proa.arch.blocks import AttentionSpec, FFNSpec, RopeKind
from proa.arch.decoder import DecoderSpec
from proa.arch.weights import ParameterInfo, WeightLayout
from proa.units import DType


def decoder_parameters(spec: DecoderSpec, layout: WeightLayout) -> dict[str, ParameterInfo]:
    """Name -> shape of every parameter of the built decoder, in building order."""
    table: dict[str, tuple[int, ...]] = {"embed.weight": (spec.vocab, spec.hidden)}
    for layer in spec.layers:
        prefix = f"layers.{layer.index}"
        table[f"{prefix}.attn_norm.weight"] = (spec.hidden,)
        table |= {f"{prefix}.attn.{name}": shape for name, shape in attention_parameters(layer.mixer, spec.hidden)}
        table[f"{prefix}.ffn_norm.weight"] = (spec.hidden,)
        table |= {f"{prefix}.ffn.{name}": shape for name, shape in ffn_parameters(layer.ffn, spec.hidden)}
    table["norm.weight"] = (spec.hidden,)
    if not layout.tied_head:
        table["head.weight"] = (spec.vocab, spec.hidden)
    blocks = dict(layout.blocks)
    parameters = {name: ParameterInfo(shape=shape, dtype=blocks.get(name)) for name, shape in table.items()}
    rope = spec.layers[0].mixer.rope
    if rope.kind is RopeKind.FACTORS:
        parameters["rope.factors"] = ParameterInfo(shape=(rope.dim // 2,), dtype=DType.F32)
    return parameters


def attention_parameters(spec: AttentionSpec, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """`qkv` rows are q heads, then k heads, then v heads."""
    query, heads = spec.num_heads * spec.head_dim, spec.num_heads + 2 * spec.num_kv_heads
    yield "qkv.weight", (heads * spec.head_dim, hidden)
    if spec.qkv_bias:
        yield "qkv.bias", (heads * spec.head_dim,)
    if spec.qk_norm is not None:
        yield "q_norm.weight", (spec.head_dim,)
        yield "k_norm.weight", (spec.head_dim,)
    yield "o.weight", (hidden, query)
    if spec.output_bias:
        yield "o.bias", (hidden,)


def ffn_parameters(spec: FFNSpec, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """`gate_up` rows are gate, then up."""
    yield "gate_up.weight", (2 * spec.width, hidden)
    if spec.bias:
        yield "gate_up.bias", (2 * spec.width,)
    yield "down.weight", (hidden, spec.width)
    if spec.bias:
        yield "down.bias", (hidden,)
