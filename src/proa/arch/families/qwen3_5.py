"""Qwen3.5 and 3.6 dense text models, alone or inside their wrapper (arch/wrappers.py)."""

from __future__ import annotations

from proa.arch import common, qwen_hybrid
from proa.arch.decoder import DecoderSpec
from proa.arch.delta_blocks import Decay
from proa.arch.family import Family
from proa.checkpoint.hf_config import HFView


def parse(c: HFView) -> DecoderSpec:
    return qwen_hybrid.decoder(c, "qwen3_5", [common.ffn(c, bias=False)] * common.num_layers(c))


FAMILY = Family(
    name="qwen3_5",
    architectures=("Qwen3_5ForCausalLM",),
    parse=parse,
    weights=common.decoder_rules,
    drafts=qwen_hybrid.MTP,
    linear=Decay.HEAD,
)
