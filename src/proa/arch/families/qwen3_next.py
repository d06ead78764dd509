"""Qwen3-Next (80B-A3B): linear and gated full attention, experts in every layer, projections grouped by key head."""

from __future__ import annotations

from collections.abc import Iterator

from proa.arch import common, moe, qwen_hybrid
from proa.arch.decoder import DecoderSpec
from proa.arch.delta import grouped_rules
from proa.arch.delta_blocks import Decay
from proa.arch.family import Family
from proa.arch.layout import WeightLayout
from proa.arch.weights import WeightRule
from proa.checkpoint.hf_config import HFView


def parse(c: HFView) -> DecoderSpec:
    experts, dense = qwen_hybrid.experts(c), common.ffn(c, bias=False)
    return qwen_hybrid.decoder(c, "qwen3_next", moe.interleaved(c, common.num_layers(c), experts, dense))


def weights(spec: DecoderSpec, layout: WeightLayout) -> Iterator[WeightRule]:
    return common.decoder_rules(spec, layout, moe.QWEN, grouped_rules)


FAMILY = Family(
    name="qwen3_next",
    architectures=("Qwen3NextForCausalLM",),
    parse=parse,
    weights=weights,
    drafts=qwen_hybrid.MTP,
    linear=Decay.HEAD,
)
