"""DeepSeek V3, V3.1 and R1, Kimi K2, Mistral Large 3: sigmoid experts chosen with a correction bias, and NextN."""

from __future__ import annotations

from proa.arch import common, deepseek, moe
from proa.arch.decoder import DecoderSpec
from proa.arch.family import Family
from proa.arch.mla import mla
from proa.checkpoint.hf_config import HFView


def parse(c: HFView) -> DecoderSpec:
    router = moe.grouped_router(c, score="sigmoid", method="noaux_tc")
    return deepseek.decoder(c, "deepseek_v3", mixers=deepseek.alike(c, mla(c)), router=router, dense=3)


FAMILY = Family(
    name="deepseek_v3",
    architectures=("DeepseekV3ForCausalLM", "MistralLarge3ForCausalLM"),
    parse=parse,
    weights=common.decoder_rules,
    drafts=deepseek.NEXTN,
)
