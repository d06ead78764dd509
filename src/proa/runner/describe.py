"""What a runner is, told twice: by the objects that were built, and by its plan. The two must be equal."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from proa.arch.blocks import MoESpec
from proa.arch.decoder import Borrow, DecoderSpec, LayerSpec
from proa.arch.delta_blocks import DeltaSpec
from proa.arch.layout import ParameterInfo
from proa.cache.kv import KVCache
from proa.cache.state_values import StateRoom
from proa.kernels.kernel_set import KernelNames
from proa.layers.base import kernel_names, state_dtype, torch_dtype
from proa.layers.decoder import Decoder
from proa.layers.embedding import TiedHead
from proa.layers.moe import MoE
from proa.plan.footprint import weights_bytes
from proa.plan.runner_plan import RunnerPlan
from proa.units import Phase


def built(model: Decoder, kv: KVCache) -> dict[str, Any]:
    """Read off the modules, tensors and bound kernels; the plan is not looked at."""
    return {
        **_kernels(model.kernels.names),
        "device": model.norm.weight.device.type,
        "dtype": str(model.norm.weight.dtype),
        "kv_dtype": str(next((tensor.dtype for tensor in kv.tensors()), kv.dtype)),
        "layout": {"head": _built_head(model), "shared_experts": _built_experts(model)},
        "num_layers": len(kv.layers),
        "page_size": kv.page_size,
        "num_pages": kv.num_pages,
        "weights_bytes": model.weights_bytes(),
        "kv_bytes": kv.nbytes,
        "states": _built_states(kv),
    }


def promised(
    plan: RunnerPlan,
    spec: DecoderSpec,
    parameters: Mapping[str, ParameterInfo],
    num_pages: int,
    room: StateRoom | None = None,
) -> dict[str, Any]:
    """The same, from the plan, the spec and the parameter table alone; `room` as the memory plan has it."""
    dtype, page_size = plan.dtype.value, plan.page_size.value
    rows = num_pages * page_size
    return {
        **_kernels(kernel_names(plan, spec)),
        "device": plan.device.value,
        "dtype": str(torch_dtype(dtype)),
        "kv_dtype": str(torch_dtype(plan.kv_dtype.value)),
        "layout": {"head": _promised_head(plan, spec), "shared_experts": _promised_experts(plan, spec)},
        "num_layers": plan.num_layers,
        "page_size": page_size,
        "num_pages": num_pages,
        "weights_bytes": weights_bytes(parameters, plan),
        "kv_bytes": sum(plan.kv_dtype.value.nbytes(rows * layer.state.kv_width) for layer in spec.layers),
        "states": _promised_states(plan, spec, room),
    }


def _kernels(names: KernelNames) -> dict[str, Any]:
    attention = {f"attention.{phase.value}": names.attention.get(phase) for phase in Phase}
    delta = {f"linear_attention.{phase.value}": names.delta.get(phase) for phase in Phase}
    others = {"matmul_kernel": names.matmul, "moe_kernel": names.moe, "sampling_kernel": names.sampling}
    return {**others, **attention, **delta}


def _built_states(kv: KVCache) -> dict[str, Any] | None:
    """None where no layer has states."""
    states = list(kv.states())
    if not states:
        return None
    kept = states[0].kept
    return {
        "slots": len(states[0].delta),
        "kept_rows": 0 if kept is None else len(kept),
        "dtypes": {"conv": str(states[0].conv.dtype), "delta": str(states[0].delta.dtype)},
        "bytes": kv.state_nbytes,
    }


def _promised_states(plan: RunnerPlan, spec: DecoderSpec, room: StateRoom | None) -> dict[str, Any] | None:
    if not spec.delta_layers or room is None:
        return None
    compute, delta = plan.dtype.value, state_dtype(plan)
    mixers = [layer.mixer for layer in spec.delta_layers if isinstance(layer.mixer, DeltaSpec)]
    conv = sum(compute.nbytes(prod(mixer.conv_shape)) for mixer in mixers)
    states = sum(delta.nbytes(prod(mixer.state_shape)) for mixer in mixers)
    inputs = sum(compute.nbytes(mixer.kept_width) for mixer in mixers)
    return {
        "slots": room.slots,
        "kept_rows": room.kept_rows,
        "dtypes": {"conv": str(torch_dtype(compute)), "delta": str(torch_dtype(delta))},
        "bytes": room.slots * (conv + states) + room.kept_rows * inputs,
    }


def _built_head(model: Decoder) -> str:
    if "head" not in dict(model.named_children()):
        return "borrowed"
    return "tied" if isinstance(model.output_head, TiedHead) else "untied"


def _promised_head(plan: RunnerPlan, spec: DecoderSpec) -> str:
    if Borrow.HEAD in spec.borrows:
        return "borrowed"
    return "tied" if plan.layout.tied_head else "untied"


def _built_experts(model: Decoder) -> dict[str, str | None]:
    """By layer: `fused`, `separate`, or None where there are no shared experts."""
    layers = {index: layer.ffn for index, layer in model.layers.items()}
    return {index: _built_shared(ffn) for index, ffn in layers.items() if isinstance(ffn, MoE)}


def _built_shared(moe: MoE) -> str | None:
    if moe.shared is not None:
        return "separate"
    return "fused" if moe.experts.packed.slots > moe.router.weight.shape[0] else None


def _promised_experts(plan: RunnerPlan, spec: DecoderSpec) -> dict[str, str | None]:
    return {str(layer.index): _promised_shared(plan, layer) for layer in spec.moe_layers}


def _promised_shared(plan: RunnerPlan, layer: LayerSpec) -> str | None:
    if not isinstance(layer.ffn, MoESpec) or layer.ffn.shared is None:
        return None
    return "fused" if plan.layout.moe_of(layer.index).is_fused else "separate"
