"""Every target entry, the drafts that can serve it, and the decisions that each answers. Generated from the tables.

An entry is a family of its own, or a wrapper around bodies that are entries themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from proa.arch.decoder import DecoderSpec, DraftSpec
from proa.arch.delta_blocks import Decay
from proa.arch.family import Family
from proa.arch.wrappers import WRAPPERS, Wrapper
from proa.conditions import Condition, evaluate
from proa.kernels.catalog import kernels_for
from proa.kernels.delta_catalog import DEFAULTS, DELTA, ELSEWHERE
from proa.kernels.kernel_info import KernelInfo, phase_op
from proa.plan.rules.moe import FUSION
from proa.plan.rules.speculative import LATER, REQUIRES
from proa.plan.runner_plan import LinearAttentionPlan, PhasePlan, RunnerPlan
from proa.plan.shapes import KINDS
from proa.units import Algorithm, Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A target family and one of the drafts that its checkpoints may bundle, with what each is asked about shared
    experts. A draft has no conditions of its own: those of its family are asked of it."""

    family: Family
    algorithm: Algorithm

    @property
    def target(self) -> str:
        return self.family.name

    @property
    def draft(self) -> str:
        return f"{self.family.name}/{self.algorithm.value}"

    @property
    def conditions(self) -> tuple[str, ...]:
        return fusion_ids(self.family)


def pairs(families: Sequence[Family]) -> tuple[Pair, ...]:
    return tuple(Pair(family=family, algorithm=algorithm) for family in families for algorithm in family.drafts)


def fusion_ids(family: Family) -> tuple[str, ...]:
    """The conditions on fusing shared experts, in the order in which they are asked."""
    return tuple(condition.id for condition in FUSION + family.fusion)


def unasked(target: DecoderSpec, draft: DraftSpec) -> Iterator[str]:
    """What a target is asked and its bundled draft is not: a draft layer with other experts than any target layer, or
    of another family, whose conditions would then be asked."""
    if draft.decoder.family != target.family:
        yield f"the draft calls itself {draft.decoder.family}, and would be asked that family's conditions"
    blocks = {layer.ffn for layer in target.layers}
    for layer in draft.decoder.layers:
        if layer.ffn not in blocks:
            yield f"layer {layer.index} of the draft has another MLP or other experts than every layer of its target"


def families_json(families: Sequence[Family]) -> list[dict[str, Any]]:
    own = [
        {
            "family": family.name,
            "architectures": list(family.architectures),
            "drafts": list(draft_algorithms(family)),
            "decisions": list(runner_knobs()),
            "bundled": [_draft_json(pair) for pair in pairs([family])],
            "conditions": {"shared_experts": list(fusion_ids(family))},
            "linear_attention": None if family.linear is None else _linear_json(family.linear),
        }
        for family in families
    ]
    return own + [_wrapper_json(wrapper) for wrapper in WRAPPERS]


def linear_kernels(kind: str, phase: Phase) -> tuple[KernelInfo, ...]:
    """The package's own kernels of linear attention of a kind in a phase, preferred ones first."""
    facts = {"spec.delta_kinds": [kind]}
    return tuple(
        kernel
        for kernel in kernels_for(phase_op(DELTA, phase))
        if kernel.backend not in ELSEWHERE and not any(v.blocked for v in evaluate(_of_kind(kernel), facts))
    )


def _of_kind(kernel: KernelInfo) -> list[Condition]:
    return [condition for condition in kernel.requires if condition.reads == ("spec.delta_kinds",)]


def _linear_json(decay: Decay) -> dict[str, Any]:
    """By phase, the kernels with the conditions that each must meet, and what runners of this kind prefer to them."""
    kind = KINDS[decay]
    return {
        "kind": kind,
        "kernels": {
            phase.value: {k.backend: [one.id for one in k.requires] for k in linear_kernels(kind, phase)}
            for phase in Phase
        },
        "defaults": {d.phase.value: d.backend for d in DEFAULTS if d.kind == kind},
    }


def _draft_json(pair: Pair) -> dict[str, Any]:
    return {
        "draft": pair.draft,
        "algorithm": pair.algorithm.value,
        "decisions": list(runner_knobs()),
        "conditions": {"shared_experts": list(pair.conditions)},
    }


def _wrapper_json(wrapper: Wrapper) -> dict[str, Any]:
    """A wrapper decides nothing: its body is one of the families, with that family's drafts and decisions."""
    return {
        "wrapper": wrapper.architectures[0],
        "architectures": list(wrapper.architectures),
        "config": list(wrapper.nested),
        "hands_quantization": wrapper.hands_quantization,
        "drafts": ["those of its body"],
        "decisions": list(runner_knobs()),
    }


def families_table(families: Sequence[Family]) -> str:
    lines = [f"every runner, target or draft, answers  {', '.join(runner_knobs())}"]
    for family in families:
        lines.append(f"{family.name}  ({', '.join(family.architectures)})")
        lines.append(f"  drafts     {', '.join(draft_algorithms(family))}")
        lines.append(f"  shared experts, where there are any, are judged by  {', '.join(fusion_ids(family))}")
        if family.linear is not None:
            lines.append(f"  linear attention, {_linear_words(KINDS[family.linear])}")
        lines += [f"  {pair.draft}  the same questions, over its own tensors" for pair in pairs([family])]
    for wrapper in WRAPPERS:
        lines.append(f"{', '.join(wrapper.architectures)}  (wrapper)")
        lines.append(f"  body       one of the families above, under {' or '.join(wrapper.nested)}, with its drafts")
    return "\n".join(lines)


def _linear_words(kind: str) -> str:
    said = [f"{phase.value} {', '.join(k.backend for k in linear_kernels(kind, phase))}" for phase in Phase]
    said += [f"by default {d.backend} in {d.phase.value} on {d.device}" for d in DEFAULTS if d.kind == kind]
    return f"{kind}:  {'; '.join(said)}"


def draft_algorithms(family: Family) -> tuple[str, ...]:
    """What can propose for a family: the drafts that it bundles, any smaller model, and the request's own tokens."""
    general = (a.value for a, requires in REQUIRES.items() if LATER not in requires and a not in _NOT_GENERAL)
    return (*(algorithm.value for algorithm in family.drafts), *general)


_NOT_GENERAL = frozenset({Algorithm.NONE, Algorithm.NEXTN})


def runner_knobs() -> tuple[str, ...]:
    """The knobs of a runner's plan, read off the plan's type."""
    knobs: list[str] = []
    for leaf in fields(RunnerPlan):
        if str(leaf.type) in (PhasePlan.__name__, LinearAttentionPlan.__name__):
            knobs += [f"{leaf.name}.{phase.value}" for phase in Phase]
        elif str(leaf.type).startswith("Decision"):
            knobs.append(leaf.name)
    return tuple(knobs)
