"""The table of families, by architecture name. Adding a family is one file and one line here."""

from __future__ import annotations

import difflib

from proa.arch.config_keys import ConfigReport, review
from proa.arch.decoder import DecoderSpec
from proa.arch.families import llama, mistral, qwen2, qwen3
from proa.arch.family import Family
from proa.checkpoint.hf_config import HFView
from proa.errors import ConfigError

FAMILIES: tuple[Family, ...] = (llama.FAMILY, qwen2.FAMILY, qwen3.FAMILY, mistral.FAMILY)


def family_of(config: HFView) -> Family:
    """The family of a config, by `architectures`. Raises ConfigError `arch/unknown` with the nearest known names."""
    names = config.list("architectures", default=())
    for family in FAMILIES:
        if any(name in family.architectures for name in names):
            return family
    known = [name for family in FAMILIES for name in family.architectures]
    asked = str(names[0]) if names else config.str("model_type", default="(none)")
    near = difflib.get_close_matches(asked, known, n=3, cutoff=0.5) or known
    raise ConfigError(
        "arch/unknown",
        f"{config.where}: architecture {asked} is not one that Proa knows",
        facts=(f"nearest known: {', '.join(near)}",),
        hint="`proa explain --families` lists every family",
    )


def read_config(config: HFView) -> tuple[Family, DecoderSpec, ConfigReport]:
    """What the model is, and which of its config keys nobody read. Raises ConfigError, naming file, key and value."""
    body = config.unwrap()
    family = family_of(body)
    spec = family.parse(body)
    return family, spec, review(body, family.name)
