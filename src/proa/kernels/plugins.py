"""Kernels that other packages bring: what they say of themselves, and where they are found. No torch.

A package declares an entry point in the group `proa.kernels` that names a KernelPlugin. Its module must not import
torch: `explain` reads it. Plans and builds are handed what `read_plugins` found; nothing else looks for any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from proa.kernels.delta_catalog import DELTA_OPS
from proa.kernels.kernel_info import KernelInfo
from proa.units import Phase

GROUP = "proa.kernels"
DeltaFactory = Callable[[Mapping[Phase, str]], Any]
"""Makes the DeltaOps (kernels/delta.py) of one runner from its plan: the kernel of linear attention in each phase. May
import torch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelPlugin:
    """One backend for one kind of device.

    `kernels` are its entries of the catalogue, for ops of linear attention, with their own conditions: those of the
    device included. `device` is that device's name in torch (`npu`), and `is_present` whether this host has one.
    """

    backend: str
    device: str
    kernels: tuple[KernelInfo, ...]
    delta: DeltaFactory
    is_present: Callable[[], bool]

    def __post_init__(self) -> None:
        for kernel in self.kernels:
            if kernel.backend != self.backend or kernel.op not in DELTA_OPS:
                raise ValueError(
                    f"{self.backend} may add its own kernels for {', '.join(DELTA_OPS)}, "
                    f"not {kernel.backend} for {kernel.op}"
                )


def read_plugins(
    note: Callable[[str], None], found: Iterable[metadata.EntryPoint] | None = None
) -> tuple[KernelPlugin, ...]:
    """Every plugin that is installed, in the order of their names. One that cannot be read is noted and passed over.

    `found` stands for the entry points of the installed packages.
    """
    plugins: dict[str, KernelPlugin] = {}
    entries = metadata.entry_points(group=GROUP) if found is None else found
    for entry in sorted(entries, key=lambda entry: entry.name):
        try:
            plugin = entry.load()
        except Exception as error:  # noqa: BLE001  (another package's code: whatever it raises, it is not ours to run)
            note(f"kernel package {entry.name} ({entry.value}) is passed over: {type(error).__name__}: {error}")
            continue
        if not isinstance(plugin, KernelPlugin) or plugin.backend in plugins:
            what = "names no KernelPlugin" if not isinstance(plugin, KernelPlugin) else f"adds {plugin.backend} again"
            note(f"kernel package {entry.name} ({entry.value}) is passed over: it {what}")
            continue
        plugins[plugin.backend] = plugin
    return tuple(plugins.values())
