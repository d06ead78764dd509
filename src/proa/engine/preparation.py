"""`proa.explain` and `proa.inspect`: what a caller can know of a model from headers and config, without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from proa.config.intent import EngineConfig
from proa.config.load import load_config
from proa.env import read_environment
from proa.kernels.caps import DeviceCaps
from proa.loading.dry_run import inspect as dry_ledger
from proa.plan.costs import known_costs
from proa.plan.explain import explain_json
from proa.plan.planned import Resolved
from proa.plan.prepare import boundless, host_caps, prepare


def explain(model: str | Path, **settings: Any) -> dict[str, Any]:
    """The plans with reasons, as `proa explain --json`. `settings` as in LLM."""
    plans = _prepared(model, settings, None).plans
    return explain_json(plans, known_costs(plans, read_environment().cache_dir, note=lambda text: None))


def inspect(model: str | Path, **settings: Any) -> dict[str, Any]:
    """Where every tensor would go, as `proa inspect --json`. `settings` as in LLM."""
    caps = boundless(host_caps(merged(model, settings), read_environment().cache_dir))
    return dry_ledger(_prepared(model, settings, caps))


def merged(model: str | Path, settings: dict[str, Any]) -> EngineConfig:
    """Arguments of Python over the environment. `draft` may be a Path."""
    draft = settings.get("draft")
    given = {**settings, "draft": str(draft) if isinstance(draft, Path) else draft}
    return load_config(str(model), flags={}, file=None, environ=read_environment().variables, api=given)


def _prepared(model: str | Path, settings: dict[str, Any], caps: DeviceCaps | None) -> Resolved:
    environment = read_environment()
    return prepare(
        merged(model, settings),
        cache_dir=environment.cache_dir,
        online=not environment.offline,
        note=lambda text: None,
        caps=caps,
    )
