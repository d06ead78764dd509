"""Mistral Small 4: latent attention whose queries grow with their position, softmax experts in grouped choice."""

from __future__ import annotations

from dataclasses import replace

from proa.arch import common, deepseek, moe
from proa.arch.decoder import DecoderSpec
from proa.arch.family import Family
from proa.arch.mla import mla
from proa.checkpoint.hf_config import HFView


def parse(c: HFView) -> DecoderSpec:
    """Groups count by the sum of their best two scores, as where there is a correction bias; but there is none."""
    router = replace(moe.grouped_router(c, score="softmax", method="noaux_tc"), has_bias=False)
    return deepseek.decoder(c, "mistral4", mixers=deepseek.alike(c, mla(c)), router=router, dense=0)


FAMILY = Family(name="mistral4", architectures=("Mistral4ForCausalLM",), parse=parse, weights=common.decoder_rules)
