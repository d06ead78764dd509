"""Binds a runner's kernels by name. Owns no choice: names come from the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from proa.errors import KernelUnavailable
from proa.kernels import backends
from proa.kernels.delta import DeltaOps
from proa.kernels.kernel_set import KernelNames, KernelSet
from proa.kernels.latent_seam import LatentOps
from proa.kernels.plugins import KernelPlugin
from proa.kernels.seam import AttentionOps
from proa.units import Phase

T = TypeVar("T")


def bind(names: KernelNames, library: Path | None, plugins: Iterable[KernelPlugin] = ()) -> KernelSet:
    """A fresh kernel set. `library` is the compiled file of the native backend, where a name asks for it; `plugins` are
    backends of linear attention from other packages.

    Raises KernelUnavailable for a name that no backend here has: plans never contain one.
    """
    attention: dict[Phase, AttentionOps] = {}
    latent: dict[Phase, LatentOps] = {}
    for phase, name in names.attention.items():
        knob = f"attention.{phase.value}"
        if names.is_latent:
            latent[phase] = _backend(backends.LATENT, knob, name, library)
        else:
            attention[phase] = _backend(backends.ATTENTION, knob, name, library)
    return KernelSet(
        dense=_backend(backends.DENSE, "matmul_kernel", names.matmul, library),
        attention=attention,
        latent=latent,
        delta=_delta(names.delta, library, plugins),
        moe=None if names.moe is None else _backend(backends.MOE, "moe_kernel", names.moe, library),
        sampling=_backend(backends.SAMPLING, "sampling_kernel", names.sampling, library),
    )


def _delta(names: Mapping[Phase, str], library: Path | None, plugins: Iterable[KernelPlugin]) -> dict[Phase, DeltaOps]:
    table: dict[str, Callable[[Path | None], DeltaOps]] = {
        plugin.backend: lambda _, make=plugin.delta: make(names) for plugin in plugins
    }
    table |= backends.DELTA
    return {phase: _backend(table, f"linear_attention.{phase.value}", name, library) for phase, name in names.items()}


def _backend(table: Mapping[str, Callable[[Path | None], T]], knob: str, name: str, library: Path | None) -> T:
    if name not in table:
        raise KernelUnavailable(
            "kernels/unknown", f"{knob} = {name} is no kernel of this package", facts=(f"have: {', '.join(table)}",)
        )
    return table[name](library)
