"""GLM-4.5, 4.6 and 4.7: partly rotated attention with q, k and v biases, sigmoid experts behind dense layers, NextN."""

from __future__ import annotations

from types import MappingProxyType

from proa.arch import common, moe, nextn
from proa.arch.blocks import MoESpec
from proa.arch.decoder import DecoderSpec
from proa.arch.family import BundledDraft, Family
from proa.arch.rope import partial_dim
from proa.checkpoint.hf_config import HFView
from proa.units import Algorithm


def parse(c: HFView) -> DecoderSpec:
    mixer = common.attention(
        c,
        qkv_bias=c.flag("attention_bias", default=False),
        output_bias=False,
        qk_norm=common.qk_norm(c, is_whole=False) if c.flag("use_qk_norm", default=False) else None,
        rope_dim=partial_dim(c, common.head_dim(c), default=0.5),
    )
    mixers = common.windowed(mixer, common.windows(c, window=None, full_layers=0))
    ffns = moe.behind_dense(c, len(mixers), experts(c), common.ffn(c, bias=False))
    return common.decoder(c, "glm4_moe", mixers=mixers, ffns=ffns)


def experts(c: HFView) -> MoESpec:
    return moe.moe(
        c,
        experts="n_routed_experts",
        top_k="num_experts_per_tok",
        width="moe_intermediate_size",
        router=moe.grouped_router(c, score="sigmoid", method="noaux_tc"),
        shared=moe.shared(c, "n_shared_experts", "moe_intermediate_size"),
    )


FAMILY = Family(
    name="glm4_moe",
    architectures=("Glm4MoeForCausalLM",),
    parse=parse,
    weights=common.decoder_rules,
    drafts=MappingProxyType({Algorithm.NEXTN: BundledDraft(derive=nextn.derive, weights=nextn.nextn_rules)}),
)
