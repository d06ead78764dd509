"""Planned runners: everything that loading needs to build them, and nothing that it may ask again. Owns no rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from proa.arch.config_keys import ConfigReport
from proa.arch.decoder import DecoderSpec
from proa.arch.family import Family, Weights
from proa.arch.layout import ParameterInfo
from proa.arch.weights import NameMap
from proa.checkpoint.quant import QuantSpec
from proa.checkpoint.types import Checkpoint
from proa.kernels.plugins import KernelPlugin
from proa.plan.runner_plan import PlanSet, RunnerPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Lender:
    """Of the target that a draft borrows modules of: where its weights are stored. It may be another checkpoint."""

    checkpoint: Checkpoint
    names: NameMap


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """`names` answers for every stored tensor name what becomes of it, `--allow-unexpected` included; `parameters` is
    the table that `names` was proved to fill exactly once (shapes; dtype None = `plan.dtype.value`). `weights` gives
    this runner's own rules for any layout; `quant` is what its config says of quantised weights. `lender` is there for
    a bundled draft only."""

    checkpoint: Checkpoint
    family: Family
    spec: DecoderSpec
    plan: RunnerPlan
    weights: Weights
    quant: QuantSpec | None
    names: NameMap
    parameters: Mapping[str, ParameterInfo]
    lender: Lender | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """The plans, what loading needs per runner, and per role the config keys that nobody reads.

    `plugins` are the kernels of other packages that the plans may name: their ops are bound from here.
    """

    plans: PlanSet
    target: Planned
    draft: Planned | None
    configs: Mapping[str, ConfigReport]
    plugins: tuple[KernelPlugin, ...]

    @property
    def runners(self) -> tuple[Planned, ...]:
        return (self.target,) if self.draft is None else (self.target, self.draft)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Lines for a person, each worth printing once."""
        return tuple(_warnings(self.configs))


def _warnings(configs: Mapping[str, ConfigReport]) -> Iterator[str]:
    for role, config in configs.items():
        for key, value in config.unknown.items():
            yield f"{role}: {config.where}: unknown key {key} = {_short(value)}; it is ignored"
        yield from (f"{role}: {config.where}: {note}" for note in config.notes)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
