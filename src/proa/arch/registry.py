"""The table of families, by architecture name. Adding a family is one file and one line here."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from proa.arch import wrappers
from proa.arch.config_keys import ConfigReport, review
from proa.arch.decoder import DecoderSpec, DraftSpec
from proa.arch.families import (
    deepseek_v2,
    deepseek_v3,
    deepseek_v32,
    glm4_moe,
    glm4_moe_lite,
    glm_moe_dsa,
    kimi_linear,
    llama,
    minimax_m2,
    ministral3,
    mistral,
    mistral4,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_5,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_next,
)
from proa.arch.family import Family, Weights
from proa.checkpoint.hf_config import HFView
from proa.checkpoint.quant import QuantSpec, quant_spec
from proa.errors import ConfigError
from proa.units import Algorithm

FAMILIES: tuple[Family, ...] = (
    llama.FAMILY,
    qwen2.FAMILY,
    qwen3.FAMILY,
    mistral.FAMILY,
    ministral3.FAMILY,
    qwen2_moe.FAMILY,
    qwen3_moe.FAMILY,
    glm4_moe.FAMILY,
    minimax_m2.FAMILY,
    deepseek_v2.FAMILY,
    deepseek_v3.FAMILY,
    deepseek_v32.FAMILY,
    glm4_moe_lite.FAMILY,
    glm_moe_dsa.FAMILY,
    mistral4.FAMILY,
    qwen3_next.FAMILY,
    qwen3_5.FAMILY,
    qwen3_5_moe.FAMILY,
    kimi_linear.FAMILY,
)


def family_of(config: HFView) -> Family:
    """The family of a config, by `architectures`. Raises ConfigError `arch/unknown` with the nearest known names, or
    `arch/not-built` for those of which parts are missing."""
    wrappers.refuse_not_built(config)
    names = config.list("architectures", default=())
    for family in FAMILIES:
        if any(name in family.architectures for name in names):
            return family
    known = [name for entry in (*FAMILIES, *wrappers.WRAPPERS) for name in entry.architectures]
    asked = str(names[0]) if names else config.str("model_type", default="(none)")
    near = difflib.get_close_matches(asked, known, n=3, cutoff=0.5) or known
    raise ConfigError(
        "arch/unknown",
        f"{config.where}: architecture {asked} is not one that Proa knows",
        facts=(f"nearest known: {', '.join(near)}",),
        hint="`proa explain --families` lists every family",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a checkpoint's config says.

    `body` is the model's own config: the file's, or the nested one that a wrapper hands on, and `quant` is what that
    says about quantised weights. `family` is the body's, its rules renamed as the wrapper stores them (those of its
    drafts too); `weights` are its own. `drafts` are those that the config announces. `prefixes` are parts of the
    wrapper that no rule describes, with the reason why they are left out.
    """

    family: Family
    spec: DecoderSpec
    body: HFView
    quant: QuantSpec | None
    weights: Weights
    drafts: Mapping[Algorithm, DraftSpec]
    prefixes: Mapping[str, str]
    report: ConfigReport


def read_config(config: HFView) -> Reading:
    """What the model is, and which of its config keys nobody read. Raises ConfigError, naming file, key and value."""
    wrapper = wrappers.wrapper_of(config)
    body = config if wrapper is None else wrapper.unwrap(config)
    family = family_of(body)
    spec = family.parse(body)
    derived = {algorithm: draft.derive(body, spec) for algorithm, draft in family.drafts.items()}
    report = review(body, family.name)
    if wrapper is not None:
        family = wrapper.around(family)
        report = replace(report, notes=(*report.notes, wrapper.note(config, body)))
    return Reading(
        family=family,
        spec=spec,
        body=body,
        quant=quant_spec(body),
        weights=family.weights,
        drafts=MappingProxyType({algorithm: draft for algorithm, draft in derived.items() if draft is not None}),
        prefixes=MappingProxyType({}) if wrapper is None else wrapper.left_out,
        report=report,
    )
