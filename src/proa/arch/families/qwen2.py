"""Qwen2 and Qwen2.5 dense models: biased q, k and v; an optional sliding window in the upper layers."""

from __future__ import annotations

from proa.arch import common
from proa.arch.decoder import DecoderSpec
from proa.arch.family import Family
from proa.checkpoint.hf_config import HFView


def parse(c: HFView) -> DecoderSpec:
    mixer = common.attention(c, qkv_bias=True, output_bias=False, qk_norm=None)
    mixers = common.windowed(mixer, common.qwen_windows(c))
    return common.decoder(c, "qwen2", mixers=mixers, ffns=[common.ffn(c, bias=False)] * len(mixers))


FAMILY = Family(name="qwen2", architectures=("Qwen2ForCausalLM",), parse=parse, weights=common.decoder_rules)
