"""From intent to plans: both checkpoints' headers, host facts, resolve(). Torch-free; builds nothing, loads nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from proa.checkpoint.locate import locate
from proa.checkpoint.open import open_checkpoint
from proa.checkpoint.types import Checkpoint
from proa.config.intent import EngineConfig
from proa.kernels.caps import DeviceCaps, read_caps
from proa.kernels.plugins import read_plugins
from proa.kernels.rollback import read_rollbacks, rollback_path
from proa.kernels.verdicts import with_verdicts
from proa.plan.resolve import Resolved, resolve

_PLENTY = 2**60


def prepare(
    config: EngineConfig, *, cache_dir: Path, online: bool, note: Callable[[str], None], caps: DeviceCaps | None = None
) -> Resolved:
    """Open what the intent names and plan it, for the host that `caps` describes (None: this one).

    Kernels of other packages are those of this environment; what undoing a proposal costs is known of this host only.
    """

    def opened(name: str) -> Checkpoint:
        return open_checkpoint(locate(name, cache_dir, online=online, note=note))

    draft = config.draft.path.value
    return resolve(
        config,
        opened(config.model),
        None if draft is None else opened(draft),
        host_caps(config, cache_dir) if caps is None else caps,
        read_plugins(note),
        read_rollbacks(rollback_path(cache_dir), note),
    )


def boundless(caps: DeviceCaps) -> DeviceCaps:
    """The same host with room for every model: for those who ask what a model is, not whether it fits."""
    gpus = tuple(replace(gpu, memory_bytes=_PLENTY, memory_free=_PLENTY) for gpu in caps.gpus)
    return replace(caps, memory_bytes=_PLENTY, memory_available=_PLENTY, gpus=gpus)


def host_caps(config: EngineConfig, cache_dir: Path) -> DeviceCaps:
    """What this host can, with the self-test verdicts that are known of it. Compiles and tests nothing."""
    caps = with_verdicts(read_caps(config.target.device.value or "auto"), cache_dir)
    served = [plugin.device for plugin in read_plugins(note=lambda text: None) if plugin.is_present()]
    return replace(caps, device=served[0]) if served and caps.device == "cpu" else caps
