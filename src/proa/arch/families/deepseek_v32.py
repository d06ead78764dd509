"""DeepSeek V3.2: V3 whose layers attend to the rows that an indexer selects. Index heads are rotated in halves."""

from __future__ import annotations

from proa.arch import common, deepseek, moe
from proa.arch.decoder import DecoderSpec
from proa.arch.family import Family
from proa.arch.mla import mla, sparse
from proa.checkpoint.hf_config import HFView


def parse(c: HFView) -> DecoderSpec:
    mixers = sparse(c, mla(c), interleaved=False)
    router = moe.grouped_router(c, score="sigmoid", method="noaux_tc")
    return deepseek.decoder(c, "deepseek_v32", mixers=mixers, router=router, dense=3)


FAMILY = Family(
    name="deepseek_v32",
    architectures=("DeepseekV32ForCausalLM",),
    parse=parse,
    weights=common.decoder_rules,
    drafts=deepseek.NEXTN,
)
