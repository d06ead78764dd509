"""What the rules of one runner may see: its own intent, tensors and spec, the host, and facts of its target.

No plan of another runner is in here, so no rule can read one. Nothing below the planner may import this file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from proa.arch.decoder import DecoderSpec, DraftSpec
from proa.arch.family import Family, Weights
from proa.arch.weights import WeightRule
from proa.checkpoint.quant import Form, QuantSpec
from proa.checkpoint.types import Checkpoint
from proa.conditions import Facts
from proa.config.intent import ParallelIntent, RunnerIntent
from proa.kernels.caps import DeviceCaps
from proa.kernels.plugins import KernelPlugin
from proa.kernels.rollback import RollbackCosts
from proa.kernels.verdicts import PASSED
from proa.plan.shapes import delta_kinds, delta_sizes, expert_sizes, latent_sizes, mixer_words, router_groups, widths
from proa.plan.stored import Found, format_of
from proa.units import DType, Numerics, Role

HEAD = "head.weight"
DEQUANTISED = frozenset({Form.FP8_BLOCK})
"""Quantised forms that loading turns into values. Others are accounted for, and refused by name when loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetFacts:
    """All that a draft may know of its target: what the model is, never what was decided for it.

    `vocab` counts embedding rows, padding included.
    """

    vocab: int
    hidden: int
    num_layers: int
    max_positions: int
    tied_head: bool


def target_facts(spec: DecoderSpec) -> TargetFacts:
    return TargetFacts(
        vocab=spec.vocab,
        hidden=spec.hidden,
        num_layers=len(spec.layers),
        max_positions=spec.max_positions,
        tied_head=spec.tied_head,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Undoing:
    """What the choice of a rollback rests on beside the runner: the longest proposal (0: none), how many requests may
    run, threads, and what was measured on this host (kernels/rollback.py), by case."""

    draft_tokens: int
    max_num_seqs: int
    threads: int
    costs: Mapping[str, RollbackCosts]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerContext:
    """Everything that decides one runner's plan. `peer` is None for the target.

    `draft` is what a bundled draft is beside its decoder `spec`, None for every other runner. `weights` gives the
    runner's own rules; `found` are the tensors that those claim, of a checkpoint that it may share. `quant` is what the
    config says of quantised weights: their forms are told by the tensors. `prefill_chunk` is what was asked of the
    schedule, or its default; `plugins` are the kernels that other packages add.
    """

    role: Role
    intent: RunnerIntent
    checkpoint: Checkpoint
    family: Family
    spec: DecoderSpec
    draft: DraftSpec | None
    weights: Weights
    found: Found
    quant: QuantSpec | None
    caps: DeviceCaps
    parallel: ParallelIntent
    prefill_chunk: int
    plugins: tuple[KernelPlugin, ...]
    undoing: Undoing
    peer: TargetFacts | None

    @property
    def name(self) -> str:
        """The family, with the algorithm of a bundled draft: `glm4_moe/nextn`."""
        return self.family.name if self.draft is None else f"{self.family.name}/{self.draft.algorithm.value}"


def runner_facts(ctx: RunnerContext) -> Facts:
    """The facts that rules and conditions read by name, each a plain value. Those of the host are made when read."""
    return Facts(_model_facts(ctx), CapsFacts(ctx.caps))


def _model_facts(ctx: RunnerContext) -> dict[str, Any]:
    return {
        **_stored_facts(ctx),
        "checkpoint.form": ctx.checkpoint.form,
        "checkpoint.has_head": any(_fills(group.rule, HEAD) for group in ctx.found.groups),
        "checkpoint.quant": None if ctx.quant is None else ctx.quant.method,
        "spec.tied_head": ctx.spec.tied_head,
        "spec.borrows": [module.value for module in ctx.spec.borrows],
        "spec.sizes": widths(ctx.spec),
        "spec.expert_sizes": expert_sizes(ctx.spec),
        "spec.latent_sizes": latent_sizes(ctx.spec),
        "spec.router_groups": router_groups(ctx.spec),
        "spec.mixers": mixer_words(ctx.spec),
        "spec.linear_layers": len(ctx.spec.delta_layers),
        "spec.delta_kinds": delta_kinds(ctx.spec),
        "spec.delta_sizes": delta_sizes(ctx.spec),
        "spec.moe_layers": len(ctx.spec.moe_layers),
        "parallel.tensor": ctx.parallel.tensor_parallel.value or 1,
        "parallel.expert": ctx.parallel.expert_parallel.value or 1,
        "ask.exact": ctx.intent.numerics.value is Numerics.EXACT,
        "schedule.prefill_chunk": ctx.prefill_chunk,
        "verify.is_tree": False,  # every drafter of this version proposes chains
        "plugins.devices": sorted({plugin.device for plugin in ctx.plugins}),
    }


def _fills(rule: WeightRule, parameter: str) -> bool:
    return any(target.parameter == parameter for target in rule.fills)


def _stored_facts(ctx: RunnerContext) -> dict[str, Any]:
    """Of the runner's own tensors: bytes and number by element type, number by quantised format, and those formats that
    loading cannot read. Scales and ids do not count: they are no values of the model."""
    sizes: dict[tuple[Form, DType], list[int]] = {}
    for group in ctx.found.groups:
        if not group.rule.is_integer:
            sizes.setdefault((group.form, group.main.dtype), []).append(group.main.nbytes)
    nbytes, counts, formats, unread = Counter[str](), Counter[str](), Counter[str](), set[str]()
    for (form, dtype), each in sizes.items():
        nbytes[dtype.value] += sum(each)
        counts[dtype.value] += len(each)
        if form is not Form.PLAIN:  # GGUF blocks carry their scales, and are element types
            formats[kind := format_of(form, dtype, ctx.quant)] += len(each)
            unread |= {kind} if form not in DEQUANTISED else set()
    return {
        "stored.bytes": dict(_falling(nbytes)),
        "stored.tensors": dict(_falling(counts)),
        "stored.formats": dict(_falling(formats)),
        "stored.unread": sorted(unread),
    }


def _falling(counts: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    return iter(sorted(counts.items(), key=lambda item: -item[1]))


class CapsFacts(Mapping[str, Any]):
    """Facts of a host, each read off its caps when it is asked for: a decision that reads none has looked at none.

    Of a library or kernel by name: `caps.library.NAME` is its version, `caps.verdict.NAME` its self-test's outcome,
    `caps.failed.NAME` how that failed (what passed and what nobody has tested yet are the same to most kernels, and
    must give the same digest). None where there is nothing to say.
    """

    def __init__(self, caps: DeviceCaps) -> None:
        self._caps = caps

    def __getitem__(self, name: str) -> Any:
        layer, _, fact = name.partition(".")
        kind, _, which = fact.partition(".")
        if layer != "caps" or kind not in (_NAMED if which else _PLAIN):
            raise KeyError(name)
        return _NAMED[kind](self._caps, which) if which else _PLAIN[kind](self._caps)

    def __iter__(self) -> Iterator[str]:
        return (f"caps.{kind}" for kind in _PLAIN)

    def __len__(self) -> int:
        return len(_PLAIN)


def _failure(caps: DeviceCaps, kernel: str) -> str | None:
    verdict = caps.kernels.get(kernel)
    return None if verdict == PASSED else verdict


_PLAIN: Mapping[str, Callable[[DeviceCaps], Any]] = MappingProxyType(
    {
        "device": lambda caps: caps.device,
        "no_cuda": lambda caps: caps.no_cuda,
        "isa": lambda caps: list(caps.isa),
        "cores": lambda caps: caps.cores,
        "has_compiler": lambda caps: caps.compiler is not None,
        "sm": lambda caps: caps.sm,
        "cuda_version": lambda caps: caps.cuda_version,
    }
)
_NAMED: Mapping[str, Callable[[DeviceCaps, str], Any]] = MappingProxyType(
    {
        "library": lambda caps, name: caps.libraries.get(name),
        "verdict": lambda caps, name: caps.kernels.get(name),
        "failed": _failure,
    }
)
