"""GLM-5: attention to selected rows, which some layers take over from the layer before. Index heads are rotated in
neighbouring pairs."""

from __future__ import annotations

from proa.arch import common, deepseek, moe
from proa.arch.decoder import DecoderSpec
from proa.arch.family import Family
from proa.arch.mla import mla, sparse
from proa.checkpoint.hf_config import HFView


def parse(c: HFView) -> DecoderSpec:
    mixers = sparse(c, mla(c), interleaved=True)
    router = moe.grouped_router(c, score="sigmoid", method="noaux_tc")
    return deepseek.decoder(c, "glm_moe_dsa", mixers=mixers, router=router, dense=3)


FAMILY = Family(
    name="glm_moe_dsa",
    architectures=("GlmMoeDsaForCausalLM",),
    parse=parse,
    weights=common.decoder_rules,
    drafts=deepseek.NEXTN,
)
