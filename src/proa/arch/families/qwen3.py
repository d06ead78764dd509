"""Qwen3 dense models: q and k are normalised per head before rope; head_dim is stated on its own."""

from __future__ import annotations

from proa.arch import common
from proa.arch.decoder import DecoderSpec
from proa.arch.family import Family
from proa.checkpoint.hf_config import HFView


def parse(c: HFView) -> DecoderSpec:
    bias = c.flag("attention_bias", default=False)
    return common.decoder(
        c,
        "qwen3",
        mixer=common.attention(c, qkv_bias=bias, output_bias=bias, qk_norm=common.norm(c)),
        mlp=common.ffn(c, bias=False),
        layer_windows=common.qwen_windows(c),
    )


FAMILY = Family(name="qwen3", architectures=("Qwen3ForCausalLM",), parse=parse, weights=common.decoder_rules)
