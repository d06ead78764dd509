"""MiniMax M2 and M2.1: q and k normalised over all heads at once, a partly rotated head, sigmoid experts, none shared.

The config announces draft modules (`use_mtp`, `num_mtp_modules`); the releases hold no tensors of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

from proa.arch import common, moe
from proa.arch.blocks import MoESpec, QKNormSpec
from proa.arch.decoder import DecoderSpec
from proa.arch.family import Family
from proa.arch.layout import WeightLayout
from proa.arch.rope import PARTIAL, partial_dim
from proa.arch.values import named
from proa.arch.weights import WeightRule
from proa.checkpoint.hf_config import HFView
from proa.errors import ConfigError

NAMES = replace(moe.HUB, module="block_sparse_moe", experts=("w1", "w3", "w2"), bias="e_score_correction_bias")
UNUSED = ("use_mtp", "num_mtp_modules", "mtp_transformer_layers", "mlp_intermediate_size", "shared_moe_mode")
"""Keys about draft modules and shared experts, which no release has (`shared_intermediate_size` is 0, or refused)."""

NORM_KINDS: Mapping[str, bool] = MappingProxyType({"per_layer": True})
"""`qk_norm_type` -> whether all heads are one vector."""


def parse(c: HFView) -> DecoderSpec:
    for key in UNUSED:
        c.get(key, None)
    mixer = common.attention(
        c,
        qkv_bias=False,
        output_bias=False,
        qk_norm=_qk_norm(c),
        rope_dim=_rotary_dim(c, common.head_dim(c)),
    )
    _refuse_linear(c)
    mixers = common.windowed(mixer, common.windows(c, window=None, full_layers=0))
    return common.decoder(c, "minimax_m2", mixers=mixers, ffns=[experts(c)] * len(mixers))


def experts(c: HFView) -> MoESpec:
    router = moe.plain_router(
        score=named(c, "scoring_func", moe.SCORES, default="sigmoid"),
        has_bias=c.flag("use_routing_bias", default=True),
        renormalise=c.flag("norm_topk_prob", default=True),
    )
    return moe.moe(
        c,
        experts="num_local_experts",
        top_k="num_experts_per_tok",
        width="intermediate_size",
        router=router,
        shared=None,
    )


def _qk_norm(c: HFView) -> QKNormSpec | None:
    is_whole = named(c, "qk_norm_type", NORM_KINDS, default="per_layer")
    return common.qk_norm(c, is_whole=is_whole) if c.flag("use_qk_norm", default=True) else None


def _rotary_dim(c: HFView, head_dim: int) -> int:
    """`rotary_dim`, which a `partial_rotary_factor` beside it may only repeat."""
    stated = c.int("rotary_dim", default=None)
    if stated is None:
        return partial_dim(c, head_dim, default=1.0)
    repeated = partial_dim(c, head_dim, default=1.0) if c.has(PARTIAL) or c.rope().has(PARTIAL) else stated
    if not 0 < stated <= head_dim or stated % 2 or repeated != stated:
        said = f", and {PARTIAL} means {repeated}" if repeated != stated else ""
        raise ConfigError(
            "config/value", f"{c.where}: rotary_dim = {stated} must be an even part of head_dim = {head_dim}{said}"
        )
    return stated


def _refuse_linear(c: HFView) -> None:
    """`attn_type_list` has 1 for every layer of full attention."""
    other = [kind for kind in c.list("attn_type_list", default=()) if kind != 1]
    if other:
        raise ConfigError(
            "config/unimplemented", f"{c.where}: attn_type_list: {other[0]!r} (not full attention) is not implemented"
        )


def weights(spec: DecoderSpec, layout: WeightLayout) -> Iterator[WeightRule]:
    return common.decoder_rules(spec, layout, NAMES)


FAMILY = Family(name="minimax_m2", architectures=("MiniMaxM2ForCausalLM",), parse=parse, weights=weights)
