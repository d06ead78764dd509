"""Proa: LLM inference in which target and draft are two runners with two frozen, explained plans.

The public names. They load on first use, so that `import proa` brings in neither torch nor a tokenizer.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from proa.config.intent import EngineConfig
    from proa.engine.preparation import explain, inspect
    from proa.engine.results import CompletionOutput, Logprob, RequestMetrics, RequestOutput
    from proa.errors import (
        CacheExhausted,
        CheckFailed,
        CheckpointError,
        ConfigError,
        KernelUnavailable,
        PlanError,
        ProaError,
        RequestError,
        WeightError,
    )
    from proa.llm import LLM
    from proa.sampling.params import SamplingParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CacheExhausted",
    "CheckFailed",
    "CheckpointError",
    "CompletionOutput",
    "ConfigError",
    "EngineConfig",
    "KernelUnavailable",
    "Logprob",
    "PlanError",
    "ProaError",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "WeightError",
    "explain",
    "inspect",
]

_HOMES = (
    ("proa.llm", ("LLM",)),
    ("proa.sampling.params", ("SamplingParams",)),
    ("proa.engine.preparation", ("explain", "inspect")),
    ("proa.config.intent", ("EngineConfig",)),
    ("proa.engine.results", ("CompletionOutput", "Logprob", "RequestMetrics", "RequestOutput")),
)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'proa' has no attribute {name!r}")
    homes = [module for module, names in _HOMES if name in names]
    return getattr(import_module(homes[0] if homes else "proa.errors"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
