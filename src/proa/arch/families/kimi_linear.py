"""Kimi Linear (48B-A3B): Kimi Delta Attention and latent attention, neither with positions; sigmoid experts behind one
dense layer. Its lists of layers count from 1."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from proa.arch import common, moe
from proa.arch.blocks import GroupScore, MLASpec, MoESpec, RouterSpec
from proa.arch.config_keys import refuse_leftovers
from proa.arch.decoder import DecoderSpec, MixerSpec
from proa.arch.delta import kda, kda_rules
from proa.arch.delta_blocks import Decay
from proa.arch.family import Family
from proa.arch.layout import WeightLayout
from proa.arch.mla import mla
from proa.arch.values import above, named, norm
from proa.arch.weights import WeightRule
from proa.checkpoint.hf_config import HFView
from proa.errors import ConfigError

NAMES = replace(moe.HUB, module="block_sparse_moe", experts=("w1", "w3", "w2"))
LINEAR, FULL = "kda_layers", "full_attn_layers"


def parse(c: HFView) -> DecoderSpec:
    c.get("head_dim", None)  # of neither kind of attention
    mixers = _mixers(c)
    ffns = moe.behind_dense(c, len(mixers), experts(c), common.ffn(c, bias=False))
    return common.decoder(c, "kimi_linear", mixers=mixers, ffns=ffns, positions="model_max_length")


def _mixers(c: HFView) -> tuple[MixerSpec, ...]:
    config = c.sub("linear_attn_config")
    linear, full = kda(config, norm(c)), _latent(c)
    is_full = _full_layers(c, config)
    refuse_leftovers(config, "linear_attn_config of the kimi_linear family")
    return tuple(full if kind else linear for kind in is_full)


def _full_layers(c: HFView, config: HFView) -> tuple[bool, ...]:
    count = common.num_layers(c)
    lists = {key: config.list(key) for key in (LINEAR, FULL)}
    numbers = [number for listed in lists.values() for number in listed]
    for number in numbers:
        if type(number) is not int or not 1 <= number <= count or numbers.count(number) != 1:
            raise ConfigError(
                "config/value",
                f"{c.where}: {LINEAR} and {FULL} must have each of the layers 1..{count} once, but have {number!r}",
            )
    if len(numbers) != count:
        missing = min(set(range(1, count + 1)) - set(numbers))
        raise ConfigError("config/value", f"{c.where}: layer {missing} of {count} is in neither {LINEAR} nor {FULL}")
    return tuple(index + 1 in lists[FULL] for index in range(count))


def _latent(c: HFView) -> MLASpec:
    if not c.flag("mla_use_nope", default=True):
        raise ConfigError(
            "config/unimplemented", f"{c.where}: mla_use_nope = false is not implemented by the kimi_linear family"
        )
    return replace(mla(c), rope=None)


def experts(c: HFView) -> MoESpec:
    return moe.moe(
        c,
        experts="num_experts",
        top_k="num_experts_per_token",
        width="moe_intermediate_size",
        router=_router(c),
        shared=moe.shared(c, "num_shared_experts", "moe_intermediate_size"),
    )


def _router(c: HFView) -> RouterSpec:
    groups, top = moe.expert_groups(c, "num_expert_group", "topk_group")
    if not c.flag("use_grouped_topk", default=True) or groups == 1:
        groups, top = 1, 1
    return RouterSpec(
        score=named(c, "moe_router_activation_func", moe.SCORES, default="sigmoid"),
        has_bias=True,
        num_groups=groups,
        top_groups=top,
        group_score=GroupScore.TOP2_SUM if groups > 1 else GroupScore.NONE,
        renormalise=c.flag("moe_renormalize", default=True),
        scale=above(c, "routed_scaling_factor", 0.0),
    )


def weights(spec: DecoderSpec, layout: WeightLayout) -> Iterator[WeightRule]:
    return common.decoder_rules(spec, layout, NAMES, kda_rules)


FAMILY = Family(
    name="kimi_linear",
    architectures=("KimiLinearForCausalLM",),
    parse=parse,
    weights=weights,
    linear=Decay.CHANNEL,
)
