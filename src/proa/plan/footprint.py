"""Bytes of one runner's weights and states in memory, and of what a step reads of them, from its plan, parameters and
spec. What is built is equal."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from proa.arch.blocks import MoESpec
from proa.arch.decoder import DecoderSpec
from proa.arch.delta_blocks import DeltaSpec
from proa.arch.layout import ParameterInfo
from proa.kernels.catalog import BLOCK_FORMATS, ONEDNN
from proa.plan.runner_plan import RunnerPlan
from proa.units import DType

EMBEDDING = "embed.weight"
EXPERT_STACKS = ("experts.gate_up", "experts.down")


def weights_bytes(parameters: Mapping[str, ParameterInfo], plan: RunnerPlan) -> int:
    """Of all parameters, and of the second copy where a tied head needs one."""
    sizes = {name: _packed_bytes(info, plan.dtype.value) for name, info in parameters.items()}
    return sum(sizes.values()) + (
        sizes[EMBEDDING] if copies_embedding(plan.matmul_kernel.value, plan.head.value) else 0
    )


def step_bytes(spec: DecoderSpec, parameters: Mapping[str, ParameterInfo], plan: RunnerPlan) -> int:
    """Of the weights that a step of one row reads: of experts the routed ones, of tables one row."""
    sizes = {name: _packed_bytes(info, plan.dtype.value) for name, info in parameters.items()}
    for layer in spec.layers:
        if isinstance(layer.ffn, MoESpec):
            unread = layer.ffn.num_experts - layer.ffn.top_k
            for name in (f"layers.{layer.index}.ffn.{part}" for part in EXPERT_STACKS):
                sizes[name] -= sizes[name] // parameters[name].shape[0] * unread
            if layer.ffn.router.table is not None:
                sizes[f"layers.{layer.index}.ffn.router.table"] //= layer.ffn.router.table
    if plan.head.value != "tied" and EMBEDDING in sizes:
        sizes[EMBEDDING] //= spec.vocab
    return sum(sizes.values())


def state_bytes(spec: DecoderSpec, compute: DType, states: DType | None) -> int:
    """Of one request's states that do not grow with it, over all layers: a slot. `compute` and `states` are the plan's
    types."""
    return sum(
        (compute if tensor.dtype is None else states or tensor.dtype).nbytes(prod(tensor.shape))
        for layer in spec.layers
        for tensor in layer.state.recurrent
    )


def kept_bytes(spec: DecoderSpec, plan: RunnerPlan) -> int:
    """Of one verified row's inputs, kept to be applied again, over all layers."""
    widths = (layer.mixer.kept_width for layer in spec.layers if isinstance(layer.mixer, DeltaSpec))
    return plan.dtype.value.nbytes(sum(widths))


def _packed_bytes(info: ParameterInfo, compute: DType) -> int:
    if info.dtype is None or not info.dtype.is_block:
        return info.nbytes(compute)
    block = BLOCK_FORMATS[info.dtype]
    return prod(info.shape) // block.elements * block.nbytes


def copies_embedding(matmul_kernel: str, head: str) -> bool:
    """Nothing but oneDNN reads what it arranged, so a tied head is a copy, and the embedding stays for lookups."""
    return matmul_kernel == ONEDNN and head == "tied"
