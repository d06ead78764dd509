"""The sizes and kinds of a model's blocks, as the facts that kernel conditions read. Decides nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from proa.arch.blocks import AttentionSpec, FFNSpec, MLASpec, MoESpec
from proa.arch.decoder import DecoderSpec, MixerSpec
from proa.arch.delta_blocks import Decay, DeltaSpec
from proa.kernels.delta_catalog import GDN, KDA

Sizes = dict[str, list[int]]
KINDS: Mapping[Decay, str] = MappingProxyType({Decay.HEAD: GDN, Decay.CHANNEL: KDA})


def widths(spec: DecoderSpec) -> Sizes:
    """The widths that kernels of linear maps and attention work along, each as the different values of the layers."""
    return _collected(_widths(spec))


def expert_sizes(spec: DecoderSpec) -> Sizes:
    """The widths that kernels of experts work along; empty without experts."""
    return _collected(
        size
        for layer in spec.layers
        if isinstance(layer.ffn, MoESpec)
        for size in (("hidden", spec.hidden), ("expert_width", layer.ffn.width))
    )


def latent_sizes(spec: DecoderSpec) -> Sizes:
    """What latent attention works along beside whole vectors; empty without it."""
    return _collected(
        size for layer in spec.layers if isinstance(layer.mixer, MLASpec) for size in _latent_sizes(layer.mixer)
    )


def _latent_sizes(mixer: MLASpec) -> Iterator[tuple[str, int]]:
    yield "rank", mixer.kv_rank
    yield "nope_dim", mixer.nope_dim
    if mixer.indexer is not None:
        yield "index_dim", mixer.indexer.head_dim


def delta_sizes(spec: DecoderSpec) -> Sizes:
    """What kernels of the delta rule work along; empty without linear attention."""
    return _collected(
        size
        for mixer in _deltas(spec)
        for size in (("key_dim", mixer.key_dim), ("value_dim", mixer.value_dim), ("taps", mixer.taps))
    )


def delta_kinds(spec: DecoderSpec) -> list[str]:
    """`gdn` where a head decays as a whole, `kda` where each of its channels does."""
    return sorted({KINDS[mixer.decay] for mixer in _deltas(spec)})


def _deltas(spec: DecoderSpec) -> Iterator[DeltaSpec]:
    return (layer.mixer for layer in spec.layers if isinstance(layer.mixer, DeltaSpec))


def router_groups(spec: DecoderSpec) -> int:
    """The most groups that a router of any layer has; 0 without experts."""
    return max((layer.ffn.router.num_groups for layer in spec.layers if isinstance(layer.ffn, MoESpec)), default=0)


def mixer_words(spec: DecoderSpec) -> list[str]:
    """What the attention of any layer needs: `gqa` or `mla`, and whatever is more than their plain form."""
    return sorted({word for layer in spec.layers for word in _mixer_words(layer.mixer)})


def _collected(sizes: Iterator[tuple[str, int]]) -> Sizes:
    found: dict[str, set[int]] = {}
    for name, size in sizes:
        found.setdefault(name, set()).add(size)
    return {name: sorted(values) for name, values in found.items()}


def _widths(spec: DecoderSpec) -> Iterator[tuple[str, int]]:
    yield "hidden", spec.hidden
    for layer in spec.layers:
        match layer.ffn:
            case FFNSpec() as ffn:
                yield "ffn_width", ffn.width
            case MoESpec() as moe:
                if moe.shared is not None:
                    yield "shared_width", moe.shared.count * moe.shared.width
        yield from _mixer_widths(layer.mixer)


def _mixer_widths(mixer: MixerSpec) -> Iterator[tuple[str, int]]:
    match mixer:
        case AttentionSpec():
            yield "head_dim", mixer.head_dim
            yield "query_width", mixer.num_heads * mixer.head_dim
        case MLASpec():
            yield from (("q_rank", mixer.q_rank),) if mixer.q_rank is not None else ()
            yield "latent_rank", mixer.kv_rank
            yield "value_width", mixer.num_heads * mixer.value_dim
        case DeltaSpec():
            yield "linear_width", mixer.values
            yield from (("linear_rank", mixer.rank),) if mixer.rank is not None else ()


def _mixer_words(mixer: MixerSpec) -> Iterator[str]:
    match mixer:
        case AttentionSpec():
            yield "gqa"
            if mixer.qk_norm is not None and mixer.qk_norm.is_whole:
                yield "whole q/k norm"
            if mixer.rope.is_interleaved:
                yield "interleaved rope"
        case MLASpec():
            yield "mla"
            if mixer.indexer is not None:
                yield "indexer"
            if mixer.rope is None:
                yield "no rope"
        case DeltaSpec():
            return
    if mixer.query_scale is not None:
        yield "query scale"
