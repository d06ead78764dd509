"""What the rules of one runner may see: its own intent, checkpoint and spec, the host, and facts of its target.

No plan of another runner is in here, so no rule can read one. Nothing below the planner may import this file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from proa.arch.decoder import DecoderSpec
from proa.arch.family import Family
from proa.checkpoint.types import Checkpoint
from proa.config.intent import ParallelIntent, RunnerIntent
from proa.kernels.caps import DeviceCaps
from proa.kernels.verdicts import PASSED
from proa.units import Role

HEAD = "lm_head.weight"


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
class RunnerContext:
    """Everything that decides one runner's plan. `peer` is None for the target."""

    role: Role
    intent: RunnerIntent
    checkpoint: Checkpoint
    family: Family
    spec: DecoderSpec
    caps: DeviceCaps
    parallel: ParallelIntent
    peer: TargetFacts | None


def runner_facts(ctx: RunnerContext) -> Mapping[str, Any]:
    """The facts that rules and conditions read by name, each a plain value."""
    stored, counts = Counter[str](), Counter[str]()
    for tensor in ctx.checkpoint.tensors.values():
        stored[tensor.dtype.value] += tensor.nbytes
        counts[tensor.dtype.value] += 1
    return MappingProxyType(
        {
            **caps_facts(ctx.caps),
            "checkpoint.form": ctx.checkpoint.form,
            "checkpoint.has_head": HEAD in ctx.checkpoint.tensors,
            "stored.bytes": dict(stored.most_common()),
            "stored.tensors": dict(counts.most_common()),
            "spec.tied_head": ctx.spec.tied_head,
            "spec.sizes": _sizes(ctx.spec),
            "spec.linear_layers": 0,
            "spec.moe_layers": 0,
            "parallel.tensor": ctx.parallel.tensor_parallel.value or 1,
            "parallel.expert": ctx.parallel.expert_parallel.value or 1,
        }
    )


def _sizes(spec: DecoderSpec) -> dict[str, int]:
    """The widths that kernels work along. Layers of one model agree in them."""
    mixer, ffn = spec.layers[0].mixer, spec.layers[0].ffn
    return {
        "hidden": spec.hidden,
        "ffn_width": ffn.width,
        "head_dim": mixer.head_dim,
        "rope_dim": mixer.rope.dim,
        "query_width": mixer.num_heads * mixer.head_dim,
    }


def caps_facts(caps: DeviceCaps) -> dict[str, Any]:
    return {
        "caps.device": caps.device,
        "caps.no_cuda": caps.no_cuda,
        "caps.isa": list(caps.isa),
        "caps.cores": caps.cores,
        "caps.has_compiler": caps.compiler is not None,
        "caps.kernels": dict(caps.kernels),
        # What passed and what nobody has tested yet are the same to most kernels, and must give the same digest.
        "caps.failed_kernels": {name: verdict for name, verdict in caps.kernels.items() if verdict != PASSED},
    }
