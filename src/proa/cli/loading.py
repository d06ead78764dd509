"""How the command line opens an LLM: with what was asked, notes and progress on stderr."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from proa.choice import Choice, Origin, OriginSource
from proa.cli.output import Output
from proa.config.intent import EngineConfig
from proa.env import read_environment
from proa.errors import ConfigError
from proa.units import Switch

if TYPE_CHECKING:
    from proa.llm import LLM


def open_llm(config: EngineConfig | None, out: Output, *, is_cold: bool = False) -> LLM:
    """`is_cold`: every prompt is computed whole, unless reuse was asked for; for figures and comparisons."""
    from proa.engine.assembly import Report
    from proa.llm import LLM
    from proa.loading.progress import progress_on

    if config is None:
        raise ConfigError("config/command-line", "MODEL is missing.")
    if is_cold and config.cache.prefix_cache.is_auto:
        off = Choice(value=Switch.OFF, origin=Origin(source=OriginSource.DEFAULT, where=""))
        config = replace(config, cache=replace(config.cache, prefix_cache=off))
    return LLM.from_config(config, read_environment(), Report(note=out.note, progress=progress_on(sys.stderr)))
