"""What a runner is, told twice: by the objects that were built, and by its plan. The two must be equal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proa.arch.decoder import DecoderSpec
from proa.arch.weights import ParameterInfo
from proa.cache.kv import KVCache
from proa.kernels.bind import KernelNames
from proa.layers.base import kernel_names, torch_dtype
from proa.layers.decoder import Decoder
from proa.layers.embedding import TiedHead
from proa.plan.footprint import weights_bytes
from proa.plan.runner_plan import RunnerPlan
from proa.units import Phase


def built(model: Decoder, kv: KVCache) -> dict[str, Any]:
    """Read off the modules, tensors and bound kernels; the plan is not looked at."""
    embedding = model.embed.weight
    return {
        **_kernels(model.kernels.names),
        "device": model.norm.weight.device.type,
        "dtype": str(embedding.dtype),
        "kv_dtype": str(kv.layers[0].keys.dtype),
        "layout": {"head": "tied" if isinstance(model.head, TiedHead) else "untied"},
        "num_layers": len(kv.layers),
        "page_size": kv.page_size,
        "num_pages": kv.num_pages,
        "weights_bytes": model.weights_bytes(),
        "kv_bytes": kv.nbytes,
    }


def promised(
    plan: RunnerPlan, spec: DecoderSpec, parameters: Mapping[str, ParameterInfo], num_pages: int
) -> dict[str, Any]:
    """The same, from the plan, the spec and the parameter table alone."""
    dtype, page_size = plan.dtype.value, plan.page_size.value
    rows = num_pages * page_size
    return {
        **_kernels(kernel_names(plan)),
        "device": plan.device.value,
        "dtype": str(torch_dtype(dtype)),
        "kv_dtype": str(torch_dtype(plan.kv_dtype.value)),
        "layout": {"head": "tied" if plan.layout.tied_head else "untied"},
        "num_layers": plan.num_layers,
        "page_size": page_size,
        "num_pages": num_pages,
        "weights_bytes": weights_bytes(parameters, plan),
        "kv_bytes": sum(plan.kv_dtype.value.nbytes(rows * layer.state.kv_width) for layer in spec.layers),
    }


def _kernels(names: KernelNames) -> dict[str, Any]:
    attention = {f"attention.{phase.value}": names.attention.get(phase) for phase in Phase}
    return {"matmul_kernel": names.matmul, **attention}
