"""How the command line opens an LLM: with what was asked, notes and progress on stderr."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from proa.cli.output import Output
from proa.config.intent import EngineConfig
from proa.env import read_environment
from proa.errors import ConfigError

if TYPE_CHECKING:
    from proa.llm import LLM


def open_llm(config: EngineConfig | None, out: Output) -> LLM:
    from proa.engine.assembly import Report
    from proa.llm import LLM
    from proa.loading.progress import progress_on

    if config is None:
        raise ConfigError("config/command-line", "MODEL is missing.")
    return LLM.from_config(config, read_environment(), Report(note=out.note, progress=progress_on(sys.stderr)))
