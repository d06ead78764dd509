"""GLM-4.7-Flash: latent attention, sigmoid experts behind one dense layer, and NextN."""

from __future__ import annotations

from proa.arch import common, deepseek, moe
from proa.arch.decoder import DecoderSpec
from proa.arch.family import Family
from proa.arch.mla import mla
from proa.checkpoint.hf_config import HFView


def parse(c: HFView) -> DecoderSpec:
    router = moe.grouped_router(c, score="sigmoid", method="noaux_tc")
    return deepseek.decoder(c, "glm4_moe_lite", mixers=deepseek.alike(c, mla(c)), router=router, dense=1)


FAMILY = Family(
    name="glm4_moe_lite",
    architectures=("Glm4MoeLiteForCausalLM",),
    parse=parse,
    weights=common.decoder_rules,
    drafts=deepseek.NEXTN,
)
