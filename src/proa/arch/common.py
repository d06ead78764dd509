"""Spec parsers and weight rules that families share. Owns no family: what differs is an argument here.

Config values are read through HFView, so that arch/config_keys.py knows which keys a family honours.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from proa.arch.blocks import AttentionSpec, FFNSpec, MLASpec, MoESpec, QKNormSpec, RopeKind
from proa.arch.decoder import DecoderSpec, LayerSpec, MixerSpec
from proa.arch.delta import DeltaRules, flat_rules
from proa.arch.delta_blocks import DeltaSpec
from proa.arch.layout import WeightLayout
from proa.arch.mla import mla_rules
from proa.arch.moe import HUB, MoENames, moe_rules
from proa.arch.parameters import main_ropes
from proa.arch.rope import LLAMA4_KEYS, query_scale, rope
from proa.arch.rules import PROJECTIONS, Rows, cut_rule, ffn_rules, grouped, layer_rule
from proa.arch.values import norm, positive
from proa.arch.weights import Action, Fill, WeightRule
from proa.checkpoint.hf_config import HFView
from proa.errors import ConfigError

FULL, SLIDING = "full_attention", "sliding_attention"
MAX_LAYERS = 4096  # a config is untrusted: a spec of 10^9 layers must not be built before the error
MAX_HEADS = 65536  # nor the rules of 10^9 heads


def head_dim(c: HFView) -> int:
    """`head_dim` where the config has one, else hidden / heads, which must divide. Even, for the rope pairs."""
    hidden, heads = positive(c, "hidden_size"), positive(c, "num_attention_heads")
    stated = c.int("head_dim", default=None)
    dim = hidden // heads if stated is None else stated
    if dim < 1 or dim % 2 or (stated is None and hidden % heads):
        raise ConfigError(
            "config/value",
            f"{c.where}: no even head size in head_dim = {stated}, hidden_size = {hidden}, "
            f"num_attention_heads = {heads}",
        )
    return dim


def attention(
    c: HFView,
    *,
    qkv_bias: bool,
    output_bias: bool,
    qk_norm: QKNormSpec | None,
    rope_dim: int | None = None,
    rope_keys: Collection[str] = (),
    is_scaled: bool = False,
    is_gated: bool = False,
) -> AttentionSpec:
    """Grouped-query attention over the whole context; `windowed` gives layers their windows.

    `rope_dim`: rotated elements of each head, where the family has a key for them (`partial_dim`); None = all.
    `rope_keys`: keys of the rope object that the family reads itself.
    `is_scaled`: queries may grow with their position (`query_scale`).
    """
    heads, dim = positive(c, "num_attention_heads", at_most=MAX_HEADS), head_dim(c)
    kv_heads = c.int("num_key_value_heads", default=heads)
    if kv_heads < 1 or heads % kv_heads:
        raise ConfigError(
            "config/value",
            f"{c.where}: num_attention_heads = {heads} is not a multiple of num_key_value_heads = {kv_heads}",
        )
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        rope=rope(
            c,
            dim if rope_dim is None else rope_dim,
            is_partial=rope_dim is not None,
            read_elsewhere=(*rope_keys, *(LLAMA4_KEYS if is_scaled else ())),
        ),
        scale=dim**-0.5,
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        qk_norm=qk_norm,
        window=None,
        query_scale=query_scale(c) if is_scaled else None,
        is_gated=is_gated,
    )


def qk_norm(c: HFView, *, is_whole: bool, offset: float = 0.0) -> QKNormSpec:
    return QKNormSpec(eps=norm(c).eps, is_whole=is_whole, offset=offset)


def ffn(c: HFView, *, bias: bool) -> FFNSpec:
    return FFNSpec(width=positive(c, "intermediate_size"), bias=bias)


def windows(c: HFView, *, window: int | None, full_layers: int) -> tuple[int | None, ...]:
    """Each layer's window: as `layer_types` says where there is one, else `window` from layer `full_layers` on."""
    count = num_layers(c)
    kinds = c.list("layer_types", default=None)
    if kinds is None:
        return tuple(None if index < full_layers else window for index in range(count))
    wrong = sorted({str(kind) for kind in kinds} - ({FULL} if window is None else {FULL, SLIDING}))
    if wrong or len(kinds) != count:
        said = f"names {', '.join(wrong)}" if wrong else f"has {len(kinds)} entries for {count} layers"
        raise ConfigError("config/value", f"{c.where}: layer_types {said}, with a sliding window of {window}")
    return tuple(window if kind == SLIDING else None for kind in kinds)


def qwen_windows(c: HFView) -> tuple[int | None, ...]:
    """Qwen2 and Qwen3 slide only when `use_sliding_window` says so, and only from layer `max_window_layers` on."""
    if not c.flag("use_sliding_window", default=False):
        c.int("sliding_window", default=None)  # off: read, and without meaning
        return windows(c, window=None, full_layers=0)
    return windows(c, window=positive(c, "sliding_window"), full_layers=c.int("max_window_layers", default=28))


def no_windows(c: HFView) -> tuple[int | None, ...]:
    """The whole context in every layer. `use_sliding_window` is not read, so that its use is refused by name."""
    c.int("sliding_window", default=None)
    return windows(c, window=None, full_layers=0)


def windowed(mixer: AttentionSpec, layer_windows: Sequence[int | None]) -> tuple[AttentionSpec, ...]:
    """The same mixer for every layer, but for its window."""
    return tuple(replace(mixer, window=window) for window in layer_windows)


def num_layers(c: HFView) -> int:
    return positive(c, "num_hidden_layers", at_most=MAX_LAYERS)


def decoder(
    c: HFView,
    family: str,
    *,
    mixers: Sequence[MixerSpec],
    ffns: Sequence[FFNSpec | MoESpec],
    norm_offset: float = 0.0,
    positions: str = "max_position_embeddings",
) -> DecoderSpec:
    """A decoder with one mixer and one MLP per layer. `positions`: the key of the trained context length."""
    pairs, each_norm = zip(mixers, ffns, strict=True), norm(c, offset=norm_offset)
    return DecoderSpec(
        family=family,
        vocab=positive(c, "vocab_size"),
        hidden=positive(c, "hidden_size"),
        layers=tuple(
            LayerSpec(index=index, mixer=mixer, ffn=ffn, norm=each_norm) for index, (mixer, ffn) in enumerate(pairs)
        ),
        final_norm=each_norm,
        tied_head=c.flag("tie_word_embeddings", default=False),
        max_positions=positive(c, positions),
    )


def decoder_rules(
    spec: DecoderSpec, layout: WeightLayout, names: MoENames = HUB, delta: DeltaRules = flat_rules
) -> Iterator[WeightRule]:
    """Weight rules of a decoder with the hub's usual tensor names; `names` are those of its MoE blocks, `delta` makes
    the rules of its layers of linear attention."""
    yield WeightRule(
        source="model.embed_tokens.weight",
        action=Action.LOAD,
        shape=(spec.vocab, spec.hidden),
        fills=(Fill(parameter="embed.weight"),),
    )
    yield from layer_rules(spec, layout, names, delta)
    yield WeightRule(
        source="model.norm.weight", action=Action.LOAD, shape=(spec.hidden,), fills=(Fill(parameter="norm.weight"),)
    )
    yield _head_rule(spec, layout)
    yield WeightRule(source="model.rotary_emb.inv_freq", action=Action.LEFT_OUT, reason=STALE_ROPE)
    for factors in (each for each in main_ropes(spec) if each.kind is RopeKind.FACTORS):
        yield WeightRule(
            source="rope_freqs.weight",
            action=Action.LOAD,
            shape=(factors.dim // 2,),
            fills=(Fill(parameter="rope.factors"),),
        )


STALE_ROPE = "the rope frequencies are computed from the config"


def layer_rules(
    spec: DecoderSpec, layout: WeightLayout, names: MoENames, delta: DeltaRules = flat_rules
) -> Iterator[WeightRule]:
    """The rules of `model.layers.#.*`, per group of layers with equal blocks: what a target and its draft share."""
    hidden, layers = spec.hidden, tuple(layer.index for layer in spec.layers)
    for name, parameter in (("input_layernorm", "attn_norm"), ("post_attention_layernorm", "ffn_norm")):
        yield layer_rule(f"{name}.weight", f"{parameter}.weight", (hidden,), layers)
    for mixer, group in grouped((layer.index, layer.mixer) for layer in spec.layers).items():
        match mixer:
            case AttentionSpec():
                yield from _attention_rules(mixer, hidden, group)
            case MLASpec():
                yield from mla_rules(mixer, hidden, group)
            case DeltaSpec():
                yield from delta(mixer, hidden, group)
    yield from _mlp_rules(spec, layout, names)
    yield WeightRule(
        source="model.layers.#.self_attn.rotary_emb.inv_freq",
        action=Action.LEFT_OUT,
        indices=(layers,),
        reason=STALE_ROPE,
    )


def _mlp_rules(spec: DecoderSpec, layout: WeightLayout, names: MoENames) -> Iterator[WeightRule]:
    dense = ((layer.index, layer.ffn) for layer in spec.layers if isinstance(layer.ffn, FFNSpec))
    for ffn, group in grouped(dense).items():
        yield from ffn_rules("mlp", PROJECTIONS, "ffn", ffn, spec.hidden, group)
    layouts = dict(layout.moe)
    experts = (
        (layer.index, (layer.ffn, layouts[layer.index])) for layer in spec.layers if isinstance(layer.ffn, MoESpec)
    )
    for (moe, arrangement), group in grouped(experts).items():
        yield from moe_rules(moe, arrangement, names, spec.hidden, group)


def _attention_rules(mixer: AttentionSpec, hidden: int, layers: Collection[int]) -> Iterator[WeightRule]:
    query, key = mixer.num_heads * mixer.head_dim, mixer.num_kv_heads * mixer.head_dim
    merged = [("k_proj", query, key), ("v_proj", query + key, key)]
    if mixer.is_gated:
        yield from _gated_query_rules(mixer, hidden, layers)
    else:
        merged.insert(0, ("q_proj", 0, query))
    for name, start, rows in merged:
        span = (start, start + rows)
        yield layer_rule(f"self_attn.{name}.weight", "attn.qkv.weight", (rows, hidden), layers, span, is_linear=True)
        if mixer.qkv_bias:
            yield layer_rule(f"self_attn.{name}.bias", "attn.qkv.bias", (rows,), layers, span)
    yield layer_rule("self_attn.o_proj.weight", "attn.o.weight", (hidden, query), layers, is_linear=True)
    if mixer.output_bias:
        yield layer_rule("self_attn.o_proj.bias", "attn.o.bias", (hidden,), layers)
    if mixer.qk_norm is not None:
        whole = mixer.qk_norm.is_whole
        for name, width in (("q_norm", query), ("k_norm", key)):
            shape = (width if whole else mixer.head_dim,)
            yield layer_rule(f"self_attn.{name}.weight", f"attn.{name}.weight", shape, layers)


def _gated_query_rules(mixer: AttentionSpec, hidden: int, layers: Collection[int]) -> Iterator[WeightRule]:
    """`q_proj` has, head by head, the rows of the query and those of its gate."""
    heads, dim = mixer.num_heads, mixer.head_dim
    rows, gates = 2 * heads * dim, (heads + 2 * mixer.num_kv_heads) * dim
    cuts: list[tuple[Rows, Rows]] = []
    for head in range(heads):
        at, stored = head * dim, 2 * head * dim
        cuts.append(((at, at + dim), (stored, stored + dim)))
        cuts.append(((gates + at, gates + at + dim), (stored + dim, stored + 2 * dim)))
    yield cut_rule("self_attn.q_proj.weight", "attn.qkv.weight", (rows, hidden), layers, cuts, is_linear=True)
    if mixer.qkv_bias:
        yield cut_rule("self_attn.q_proj.bias", "attn.qkv.bias", (rows,), layers, cuts)


def _head_rule(spec: DecoderSpec, layout: WeightLayout) -> WeightRule:
    """A tied layout compares a stored head with the embedding; an untied one loads it."""
    tied = layout.tied_head
    return WeightRule(
        source="lm_head.weight",
        action=Action.TIE if tied else Action.LOAD,
        shape=(spec.vocab, spec.hidden),
        fills=(Fill(parameter="embed.weight" if tied else "head.weight"),),
        is_linear=not tied,
    )
