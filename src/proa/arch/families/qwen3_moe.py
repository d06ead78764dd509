"""Qwen3-MoE (30B-A3B, 235B-A22B): Qwen3 attention, softmax experts, none of them shared."""

from __future__ import annotations

from proa.arch import common, moe
from proa.arch.blocks import MoESpec, Score
from proa.arch.decoder import DecoderSpec
from proa.arch.family import Family
from proa.checkpoint.hf_config import HFView


def parse(c: HFView) -> DecoderSpec:
    bias = c.flag("attention_bias", default=False)
    mixer = common.attention(c, qkv_bias=bias, output_bias=bias, qk_norm=common.qk_norm(c, is_whole=False))
    mixers = common.windowed(mixer, common.no_windows(c))
    ffns = moe.interleaved(c, len(mixers), experts(c), common.ffn(c, bias=False))
    return common.decoder(c, "qwen3_moe", mixers=mixers, ffns=ffns)


def experts(c: HFView) -> MoESpec:
    renormalise = c.flag("norm_topk_prob", default=False)
    return moe.moe(
        c,
        experts="num_experts",
        top_k="num_experts_per_tok",
        width="moe_intermediate_size",
        router=moe.plain_router(score=Score.SOFTMAX, has_bias=False, renormalise=renormalise),
        shared=None,
    )


FAMILY = Family(name="qwen3_moe", architectures=("Qwen3MoeForCausalLM",), parse=parse, weights=common.decoder_rules)
