"""Spec parsers and weight rules that dense families share. Owns no family: what differs is an argument here.

Config values are read through HFView, so that arch/config_keys.py knows which keys a family honours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from proa.arch.blocks import AttentionSpec, FFNSpec, NormSpec, RopeKind, RopeSpec
from proa.arch.config_keys import refuse_rope_leftovers
from proa.arch.decoder import DecoderSpec, LayerSpec
from proa.arch.weights import Action, WeightLayout, WeightRule
from proa.checkpoint.hf_config import HFView
from proa.errors import ConfigError

FULL, SLIDING = "full_attention", "sliding_attention"
MAX_LAYERS = 4096  # a config is untrusted: a spec of 10^9 layers must not be built before the error


def positive(c: HFView, key: str, *, at_most: int = 2**31) -> int:
    """The integer under `key`, which must lie in 1..at_most."""
    value = c.int(key)
    if not 1 <= value <= at_most:
        raise ConfigError("config/value", f"{c.where}: {key} = {value} is out of range (1..{at_most})")
    return value


def norm(c: HFView) -> NormSpec:
    return NormSpec(eps=_above(c, "rms_norm_eps", 0.0))


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


def rope(c: HFView, dim: int) -> RopeSpec:
    """The rotary embedding, in the old or the new spelling. A kind or a parameter without code here is an error."""
    given = c.rope()
    spec = RopeSpec(kind=_rope_kind(given), base=_above(given, "rope_theta", 0.0), dim=dim)
    match spec.kind:
        case RopeKind.LINEAR:
            spec = replace(spec, factor=_above(given, "factor", 0.0))
        case RopeKind.LLAMA3:
            low = _above(given, "low_freq_factor", 0.0)
            spec = replace(
                spec,
                factor=_above(given, "factor", 0.0),
                low_freq_factor=low,
                high_freq_factor=_above(given, "high_freq_factor", low),
                original_max_position=positive(given, "original_max_position_embeddings"),
            )
        case RopeKind.DEFAULT | RopeKind.FACTORS:
            pass
    refuse_rope_leftovers(given)
    return spec


def _above(c: HFView, key: str, bound: float) -> float:
    """The number under `key`, which must be greater than `bound`."""
    value = c.float(key)
    if value <= bound:
        raise ConfigError("config/value", f"{c.where}: {key} = {value:g} must be greater than {bound:g}")
    return value


def _rope_kind(given: HFView) -> RopeKind:
    name = given.str("rope_type")
    try:
        return RopeKind(name)
    except ValueError:
        raise ConfigError(
            "config/unimplemented",
            f"{given.where}: rope_scaling: rope_type = {name!r} is not implemented",
            facts=("implemented: default, linear, llama3",),
        ) from None


def attention(c: HFView, *, qkv_bias: bool, output_bias: bool, qk_norm: NormSpec | None) -> AttentionSpec:
    """Grouped-query attention over the whole context; `decoder` sets each layer's window."""
    heads, dim = positive(c, "num_attention_heads"), head_dim(c)
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
        rope=rope(c, dim),
        scale=dim**-0.5,
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        qk_norm=qk_norm,
        window=None,
    )


def ffn(c: HFView, *, bias: bool) -> FFNSpec:
    return FFNSpec(width=positive(c, "intermediate_size"), bias=bias)


def windows(c: HFView, *, window: int | None, full_layers: int) -> tuple[int | None, ...]:
    """Each layer's window: as `layer_types` says where there is one, else `window` from layer `full_layers` on."""
    count = positive(c, "num_hidden_layers", at_most=MAX_LAYERS)
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


def decoder(
    c: HFView, family: str, *, mixer: AttentionSpec, mlp: FFNSpec, layer_windows: Sequence[int | None]
) -> DecoderSpec:
    """A decoder whose layers differ in their window only."""
    layers = tuple(
        LayerSpec(index=index, mixer=replace(mixer, window=window), ffn=mlp, norm=norm(c))
        for index, window in enumerate(layer_windows)
    )
    return DecoderSpec(
        family=family,
        vocab=positive(c, "vocab_size"),
        hidden=positive(c, "hidden_size"),
        layers=layers,
        final_norm=norm(c),
        tied_head=c.flag("tie_word_embeddings", default=False),
        max_positions=positive(c, "max_position_embeddings"),
    )


def decoder_rules(spec: DecoderSpec, layout: WeightLayout) -> Iterator[WeightRule]:
    """Weight rules of a dense decoder with the hub's usual tensor names. All layers have the same shapes."""
    load, first, layers = Action.LOAD, spec.layers[0], range(len(spec.layers))
    yield WeightRule(
        source="model.embed_tokens.weight", action=load, shape=(spec.vocab, spec.hidden), parameter="embed.weight"
    )
    for name, parameter in (("input_layernorm", "attn_norm"), ("post_attention_layernorm", "ffn_norm")):
        yield _layer_rule(f"{name}.weight", f"{parameter}.weight", (spec.hidden,), layers)
    yield from _attention_rules(first.mixer, spec.hidden, layers)
    yield from _ffn_rules(first.ffn, spec.hidden, layers)
    yield WeightRule(source="model.norm.weight", action=load, shape=(spec.hidden,), parameter="norm.weight")
    yield _head_rule(spec, layout)
    yield from _rope_rules(first.mixer.rope, layers)


def _layer_rule(
    source: str, parameter: str, shape: tuple[int, ...], layers: range, rows: tuple[int, int] | None = None
) -> WeightRule:
    return WeightRule(
        source=f"model.layers.#.{source}",
        action=Action.LOAD,
        shape=shape,
        parameter=f"layers.#.{parameter}",
        rows=rows,
        layers=layers,
    )


def _attention_rules(mixer: AttentionSpec, hidden: int, layers: range) -> Iterator[WeightRule]:
    query, key = mixer.num_heads * mixer.head_dim, mixer.num_kv_heads * mixer.head_dim
    for name, start, rows in (("q_proj", 0, query), ("k_proj", query, key), ("v_proj", query + key, key)):
        span = (start, start + rows)
        yield _layer_rule(f"self_attn.{name}.weight", "attn.qkv.weight", (rows, hidden), layers, span)
        if mixer.qkv_bias:
            yield _layer_rule(f"self_attn.{name}.bias", "attn.qkv.bias", (rows,), layers, span)
    yield _layer_rule("self_attn.o_proj.weight", "attn.o.weight", (hidden, query), layers)
    if mixer.output_bias:
        yield _layer_rule("self_attn.o_proj.bias", "attn.o.bias", (hidden,), layers)
    if mixer.qk_norm is not None:
        for name in ("q_norm", "k_norm"):
            yield _layer_rule(f"self_attn.{name}.weight", f"attn.{name}.weight", (mixer.head_dim,), layers)


def _ffn_rules(mlp: FFNSpec, hidden: int, layers: range) -> Iterator[WeightRule]:
    for name, span in (("gate_proj", (0, mlp.width)), ("up_proj", (mlp.width, 2 * mlp.width))):
        yield _layer_rule(f"mlp.{name}.weight", "ffn.gate_up.weight", (mlp.width, hidden), layers, span)
        if mlp.bias:
            yield _layer_rule(f"mlp.{name}.bias", "ffn.gate_up.bias", (mlp.width,), layers, span)
    yield _layer_rule("mlp.down_proj.weight", "ffn.down.weight", (hidden, mlp.width), layers)
    if mlp.bias:
        yield _layer_rule("mlp.down_proj.bias", "ffn.down.bias", (hidden,), layers)


def _head_rule(spec: DecoderSpec, layout: WeightLayout) -> WeightRule:
    """A tied layout compares a stored head with the embedding; an untied one loads it."""
    action, parameter = (Action.TIE, "embed.weight") if layout.tied_head else (Action.LOAD, "head.weight")
    return WeightRule(source="lm_head.weight", action=action, shape=(spec.vocab, spec.hidden), parameter=parameter)


def _rope_rules(spec: RopeSpec, layers: range) -> Iterator[WeightRule]:
    stale = "the rope frequencies are computed from the config"
    yield WeightRule(source="model.rotary_emb.inv_freq", action=Action.LEFT_OUT, reason=stale)
    yield WeightRule(
        source="model.layers.#.self_attn.rotary_emb.inv_freq", action=Action.LEFT_OUT, layers=layers, reason=stale
    )
    if spec.kind is RopeKind.FACTORS:
        yield WeightRule(
            source="rope_freqs.weight", action=Action.LOAD, shape=(spec.dim // 2,), parameter="rope.factors"
        )
