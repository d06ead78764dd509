"""Qwen2-MoE (Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B): softmax experts beside one shared expert with a gate per token."""

from __future__ import annotations

from collections.abc import Iterator

from proa.arch import common, moe
from proa.arch.blocks import MoESpec, Score, SharedSpec
from proa.arch.decoder import DecoderSpec
from proa.arch.family import Family
from proa.arch.layout import WeightLayout
from proa.arch.weights import WeightRule
from proa.checkpoint.hf_config import HFView


def parse(c: HFView) -> DecoderSpec:
    bias = c.flag("qkv_bias", default=True)
    mixer = common.attention(c, qkv_bias=bias, output_bias=False, qk_norm=None)
    mixers = common.windowed(mixer, common.no_windows(c))
    ffns = moe.interleaved(c, len(mixers), experts(c), common.ffn(c, bias=False))
    return common.decoder(c, "qwen2_moe", mixers=mixers, ffns=ffns)


def experts(c: HFView) -> MoESpec:
    renormalise = c.flag("norm_topk_prob", default=False)
    return moe.moe(
        c,
        experts="num_experts",
        top_k="num_experts_per_tok",
        width="moe_intermediate_size",
        router=moe.plain_router(score=Score.SOFTMAX, has_bias=False, renormalise=renormalise),
        shared=SharedSpec(count=1, width=common.positive(c, "shared_expert_intermediate_size"), is_gated=True),
    )


def weights(spec: DecoderSpec, layout: WeightLayout) -> Iterator[WeightRule]:
    return common.decoder_rules(spec, layout, moe.QWEN)


FAMILY = Family(name="qwen2_moe", architectures=("Qwen2MoeForCausalLM",), parse=parse, weights=weights)
