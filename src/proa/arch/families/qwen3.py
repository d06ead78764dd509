"""Qwen3 dense models: q and k are normalised per head before rope; head_dim is stated on its own."""

from __future__ import annotations

from proa.arch import common
from proa.arch.decoder import DecoderSpec
from proa.arch.family import Family
from proa.checkpoint.hf_config import HFView


def parse(c: HFView) -> DecoderSpec:
    bias = c.flag("attention_bias", default=False)
    mixer = common.attention(c, qkv_bias=bias, output_bias=bias, qk_norm=common.qk_norm(c, is_whole=False))
    mixers = common.windowed(mixer, common.qwen_windows(c))
    return common.decoder(c, "qwen3", mixers=mixers, ffns=[common.ffn(c, bias=False)] * len(mixers))


FAMILY = Family(name="qwen3", architectures=("Qwen3ForCausalLM",), parse=parse, weights=common.decoder_rules)
