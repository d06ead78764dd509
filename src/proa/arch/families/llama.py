"""Llama 1 to 3.2 text models, and checkpoints that share their architecture name. Owns no tensors."""

from __future__ import annotations

from proa.arch import common
from proa.arch.decoder import DecoderSpec
from proa.arch.family import Family
from proa.checkpoint.hf_config import HFView


def parse(c: HFView) -> DecoderSpec:
    bias = c.flag("attention_bias", default=False)
    mixer = common.attention(c, qkv_bias=bias, output_bias=bias, qk_norm=None)
    mixers = common.windowed(mixer, common.windows(c, window=None, full_layers=0))
    mlp = common.ffn(c, bias=c.flag("mlp_bias", default=False))
    return common.decoder(c, "llama", mixers=mixers, ffns=[mlp] * len(mixers))


FAMILY = Family(name="llama", architectures=("LlamaForCausalLM",), parse=parse, weights=common.decoder_rules)
