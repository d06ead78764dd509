"""DeepSeek V2, V2-Lite and what is built like them: softmax experts chosen freely, or within the best groups."""

from __future__ import annotations

from proa.arch import common, deepseek, moe
from proa.arch.decoder import DecoderSpec
from proa.arch.family import Family
from proa.arch.mla import mla
from proa.checkpoint.hf_config import HFView
from proa.errors import ConfigError


def parse(c: HFView) -> DecoderSpec:
    router = moe.grouped_router(c, score="softmax", method="greedy")
    if router.renormalise and not router.has_bias:  # the published code renormalises instead of scaling
        raise ConfigError(
            "config/unimplemented",
            f"{c.where}: norm_topk_prob = true without a correction bias is not implemented by the deepseek_v2 family",
        )
    return deepseek.decoder(c, "deepseek_v2", mixers=deepseek.alike(c, mla(c)), router=router, dense=0)


FAMILY = Family(name="deepseek_v2", architectures=("DeepseekV2ForCausalLM",), parse=parse, weights=common.decoder_rules)
