"""A kernel package as others would write one: linear attention for a device that this machine has not. No torch here.

`proa_ascend_ops` is the part that needs torch; it is imported when a runner is built whose plan names the backend.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from proa.conditions import Blocked, Blocks, Condition, FactView, Source
from proa.kernels.kernel_info import KernelInfo
from proa.kernels.plugins import KernelPlugin
from proa.units import Phase

PHASES = (Phase.PREFILL, Phase.DECODE)  # no verify, as in the engine that the name was taken from


def _device(facts: FactView) -> Blocked | None:
    device = facts["plan.device"]
    return None if device == "ascend" else Blocked(f"ascend needs an Ascend device, not {device}", Source.HARDWARE)


def _kind(facts: FactView) -> Blocked | None:
    kinds = facts["spec.delta_kinds"]
    return None if kinds == ["gdn"] else Blocked(f"ascend has gdn only, no {' or '.join(kinds)}", Source.CHECKPOINT)


CONDITIONS = (
    Condition(id="kernel.ascend.device", reads=("plan.device",), blocks=Blocks.ALWAYS, check=_device),
    Condition(id="kernel.ascend.kind", reads=("spec.delta_kinds",), blocks=Blocks.ALWAYS, check=_kind),
)


def _delta(plan: Mapping[Phase, str]) -> Any:
    return import_module("proa_ascend_ops").AscendDelta(plan)


PLUGIN = KernelPlugin(
    backend="ascend",
    device="ascend",
    kernels=tuple(
        KernelInfo(
            op=f"delta.{phase.value}",
            backend="ascend",
            requires=CONDITIONS,
            needs="an Ascend device",
            exact=False,
            rank=0,
        )
        for phase in PHASES
    ),
    delta=_delta,
    is_present=lambda: False,
)
