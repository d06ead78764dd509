"""Ministral 3: Mistral's layers with YaRN, and queries that grow with their position."""

from __future__ import annotations

from proa.arch import common
from proa.arch.decoder import DecoderSpec
from proa.arch.family import Family
from proa.checkpoint.hf_config import HFView


def parse(c: HFView) -> DecoderSpec:
    window = common.positive(c, "sliding_window") if c.has("sliding_window") else None
    mixer = common.attention(c, qkv_bias=False, output_bias=False, qk_norm=None, is_scaled=True)
    mixers = common.windowed(mixer, common.windows(c, window=window, full_layers=0))
    return common.decoder(c, "ministral3", mixers=mixers, ffns=[common.ffn(c, bias=False)] * len(mixers))


FAMILY = Family(name="ministral3", architectures=("Ministral3ForCausalLM",), parse=parse, weights=common.decoder_rules)
