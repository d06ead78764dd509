"""From intent to plans: both checkpoints' headers, host facts, resolve(). Torch-free; builds nothing, loads nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from proa.checkpoint.locate import locate
from proa.checkpoint.open import open_checkpoint
from proa.checkpoint.types import Checkpoint
from proa.config.intent import EngineConfig
from proa.kernels.caps import DeviceCaps, read_caps
from proa.kernels.verdicts import with_verdicts
from proa.plan.resolve import Resolved, resolve


def prepare(
    config: EngineConfig, *, cache_dir: Path, online: bool, note: Callable[[str], None], caps: DeviceCaps | None = None
) -> Resolved:
    """Open what the intent names and plan it, for the host that `caps` describes (None: this one)."""

    def opened(name: str) -> Checkpoint:
        return open_checkpoint(locate(name, cache_dir, online=online, note=note))

    draft = config.draft.path.value
    return resolve(
        config,
        opened(config.model),
        None if draft is None else opened(draft),
        host_caps(config, cache_dir) if caps is None else caps,
    )


def host_caps(config: EngineConfig, cache_dir: Path) -> DeviceCaps:
    """What this host can, with the self-test verdicts that are known of it. Compiles and tests nothing."""
    return with_verdicts(read_caps(config.target.device.value or "auto"), cache_dir)
