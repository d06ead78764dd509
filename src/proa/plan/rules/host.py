"""Device of a runner and threads of the process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proa.choice import Choice
from proa.conditions import Blocked, Blocks, Condition, Facts, FactView, Source
from proa.plan.context import RunnerContext
from proa.plan.decision import Decision
from proa.plan.rules.settle import Knob, Option, settle


def _cuda_usable(facts: FactView) -> Blocked | None:
    return Blocked(facts["caps.no_cuda"] or "no CUDA", Source.HARDWARE) if facts["caps.device"] != "cuda" else None


def _served(facts: FactView) -> Blocked | None:
    device = facts["caps.device"]
    if device in facts["plugins.devices"]:
        return None
    return Blocked(f"no installed package has kernels for {device}", Source.CONSTRAINT)


def _dry_run(_: FactView) -> Blocked:
    return Blocked("meta holds no data: a dry run, only when asked for", Source.CONSTRAINT)


def _within_cores(facts: FactView) -> Blocked | None:
    asked, cores = facts["asked.threads"], facts["caps.cores"]
    return Blocked(f"{asked} threads on {cores} usable cores take turns", Source.HARDWARE) if asked > cores else None


CUDA = Condition(
    id="device.cuda_usable", reads=("caps.device", "caps.no_cuda"), blocks=Blocks.ALWAYS, check=_cuda_usable
)
SERVED = Condition(id="device.served", reads=("caps.device", "plugins.devices"), blocks=Blocks.ALWAYS, check=_served)
META = Condition(id="device.dry_run", reads=(), blocks=Blocks.AUTO, check=_dry_run)
CORES = Condition(
    id="threads.within_cores", reads=("asked.threads", "caps.cores"), blocks=Blocks.AUTO, check=_within_cores
)


def device(ctx: RunnerContext, facts: Mapping[str, Any]) -> Decision[str]:
    """CUDA where it can be used, else another device that an installed package has kernels for, else the CPU."""
    word: str = ctx.caps.device
    other = () if word in ("cpu", "cuda") else (_other(word),)
    options = (
        *other,
        Option(value="cuda", rule="device.cuda", reason="a CUDA device", source=Source.HARDWARE, requires=(CUDA,)),
        Option(value="cpu", rule="device.cpu", reason="always there", source=Source.DEFAULT),
        Option(value="meta", rule="device.meta", reason="dry run", source=Source.ASKED, requires=(META,)),
    )
    return settle(Knob(name="device", role=ctx.role, ask=ctx.intent.device, is_capability=True), facts, options)


def _other(device: str) -> Option[str]:
    why = f"an installed package has kernels for {device}"
    return Option(value=device, rule="device.plugin", reason=why, source=Source.HARDWARE, requires=(SERVED,))


def threads(ask: Choice[int], facts: Facts) -> Decision[int]:
    """One thread per usable core. More than that is the asker's business: it runs, and the plan says what it costs."""
    cores = facts["caps.cores"]
    auto = Option(
        value=cores,
        rule="threads.cores",
        reason="one per usable core (affinity and CPU quota)",
        source=Source.HARDWARE,
        reads=("caps.cores",),
    )
    asked = Option(value=ask.value or cores, rule="", reason="", source=Source.ASKED, requires=(CORES,))
    return settle(Knob(name="threads", role=None, ask=ask), facts | {"asked.threads": ask.value}, (auto,), asked=asked)
