"""Parsers that Qwen's hybrids share: three layers of linear attention, then one of gated full attention; norms whose
stored weight lacks 1, but for those of the linear attention; softmax experts beside one with a gate per token."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

from proa.arch import common, moe
from proa.arch.blocks import AttentionSpec, FFNSpec, MoESpec, Score, SharedSpec
from proa.arch.decoder import DecoderSpec, MixerSpec
from proa.arch.delta import gdn
from proa.arch.family import BundledDraft
from proa.arch.qwen_mtp import derive, mtp_rules
from proa.arch.rope import partial_dim
from proa.arch.values import norm, positive
from proa.checkpoint.hf_config import HFView
from proa.errors import ConfigError
from proa.units import Algorithm

MTP = MappingProxyType({Algorithm.NEXTN: BundledDraft(derive=derive, weights=mtp_rules)})
LINEAR = "linear_attention"
_NORM_OFFSET = 1.0
_PARTIAL = 0.25
_SECTION, _INTERLEAVED = "mrope_section", "mrope_interleaved"


def decoder(c: HFView, family: str, ffns: Sequence[FFNSpec | MoESpec]) -> DecoderSpec:
    return common.decoder(c, family, mixers=_mixers(c), ffns=ffns, norm_offset=_NORM_OFFSET)


def experts(c: HFView) -> MoESpec:
    width = c.int("shared_expert_intermediate_size", default=0)
    if width < 0:
        raise ConfigError("config/value", f"{c.where}: shared_expert_intermediate_size = {width} must not be negative")
    renormalise = c.flag("norm_topk_prob", default=True)
    return moe.moe(
        c,
        experts="num_experts",
        top_k="num_experts_per_tok",
        width="moe_intermediate_size",
        router=moe.plain_router(score=Score.SOFTMAX, has_bias=False, renormalise=renormalise),
        shared=SharedSpec(count=1, width=width, is_gated=True) if width else None,
    )


def _mixers(c: HFView) -> tuple[MixerSpec, ...]:
    full, linear = _attention(c), gdn(c, norm(c))
    return tuple(full if is_full else linear for is_full in _full_layers(c))


def _full_layers(c: HFView) -> tuple[bool, ...]:
    """As `layer_types` says where there is one, else every `full_attention_interval`-th layer."""
    count, every = common.num_layers(c), _interval(c)
    kinds = c.list("layer_types", default=None)
    if kinds is None:
        return tuple((index + 1) % every == 0 for index in range(count))
    if len(kinds) != count or not all(kind in (common.FULL, LINEAR) for kind in kinds):
        raise ConfigError(
            "config/value", f"{c.where}: layer_types must say {LINEAR} or {common.FULL} for each of {count} layers"
        )
    return tuple(kind == common.FULL for kind in kinds)


def _interval(c: HFView) -> int:
    return positive(c, "full_attention_interval") if c.has("full_attention_interval") else 4


def _attention(c: HFView) -> AttentionSpec:
    bias, dim = c.flag("attention_bias", default=False), partial_dim(c, common.head_dim(c), default=_PARTIAL)
    _judge_sections(c, dim)
    return common.attention(
        c,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=common.qk_norm(c, is_whole=False, offset=_NORM_OFFSET),
        rope_dim=dim,
        rope_keys=(_SECTION, _INTERLEAVED),
        is_gated=c.flag("attn_output_gate", default=True),
    )


def _judge_sections(c: HFView, dim: int) -> None:
    """Rope over three axes (time, height, width), each with a share of the pairs. Text has one position on all three,
    so that neither the shares nor their order change anything; but they must be shares of `dim` elements."""
    given = c.rope()
    given.flag(_INTERLEAVED, default=False)
    shares = given.list(_SECTION, default=None)
    if shares is None:
        return
    if any(type(share) is not int or share < 0 for share in shares) or sum(shares) != dim // 2:
        raise ConfigError(
            "config/value", f"{c.where}: {_SECTION} = {list(shares)} does not share out the {dim // 2} rotated pairs"
        )
