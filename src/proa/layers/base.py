"""How modules are built, and what one forward carries. Owns no layer.

The plan is read while a module is built and not kept: after that a module knows shapes, parameters and its kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import nn

from proa.arch.weights import ParameterInfo
from proa.dist.mesh import Mesh
from proa.kernels.bind import KernelNames, KernelSet
from proa.kernels.seam import Segment
from proa.plan.runner_plan import RunnerPlan
from proa.units import DType, Phase

_TORCH_DTYPES: Mapping[DType, torch.dtype] = MappingProxyType(
    {
        DType.F64: torch.float64,
        DType.F32: torch.float32,
        DType.F16: torch.float16,
        DType.BF16: torch.bfloat16,
        DType.F8_E4M3: torch.float8_e4m3fn,
        DType.F8_E5M2: torch.float8_e5m2,
        DType.I64: torch.int64,
        DType.I32: torch.int32,
        DType.I16: torch.int16,
        DType.I8: torch.int8,
        DType.U8: torch.uint8,
        DType.BOOL: torch.bool,
    }
)


def torch_dtype(dtype: DType) -> torch.dtype:
    """The only place where element types become torch's. Raises ValueError for stored-only (block) types."""
    if dtype not in _TORCH_DTYPES:
        raise ValueError(f"{dtype.value} is a stored format, not a type to compute in")
    return _TORCH_DTYPES[dtype]


def kernel_names(plan: RunnerPlan) -> KernelNames:
    """The kernels that a plan names, for `bind`. A phase whose op does not occur is left out."""
    phases = {Phase.PREFILL: plan.attention.prefill, Phase.DECODE: plan.attention.decode,
              Phase.VERIFY: plan.attention.verify}  # fmt: skip
    attention = {phase: choice.value for phase, choice in phases.items() if choice.value is not None}
    return KernelNames(matmul=plan.matmul_kernel.value, attention=attention)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildContext:
    """Passed to every module's __init__ and never stored. `table` gives each parameter's shape by its full name,
    `prefix` is where in the model the module stands (`layers.3.attn`, empty at the root)."""

    plan: RunnerPlan
    table: Mapping[str, ParameterInfo]
    mesh: Mesh
    kernels: KernelSet
    prefix: str

    @property
    def dtype(self) -> torch.dtype:
        return torch_dtype(self.plan.dtype.value)

    def child(self, name: str) -> BuildContext:
        return replace(self, prefix=self._full(name))

    def has(self, name: str) -> bool:
        return self._full(name) in self.table

    def parameter(self, name: str) -> nn.Parameter:
        """An unfilled parameter on the plan's device; its shape and type stand in the table, nowhere else. A block
        format's is uint8 [rows, bytes of a row]."""
        info = self.table[self._full(name)]
        if info.dtype is not None and info.dtype.is_block:
            shape, dtype = (info.shape[0], info.dtype.nbytes(info.shape[1])), torch.uint8
        else:
            shape, dtype = info.shape, self.dtype if info.dtype is None else torch_dtype(info.dtype)
        data = torch.empty(shape, dtype=dtype, device=self.plan.device.value)
        return nn.Parameter(data, requires_grad=False)

    def blocks(self, name: str) -> DType | None:
        """The block format that a parameter is kept in, None where it is plain."""
        dtype = self.table[self._full(name)].dtype
        return dtype if dtype is not None and dtype.is_block else None

    def optional(self, name: str) -> nn.Parameter | None:
        """As `parameter`, None where the table has no such name (a bias that the model lacks)."""
        return self.parameter(name) if self.has(name) else None

    def _full(self, name: str) -> str:
        return f"{self.prefix}.{name}" if self.prefix else name


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """Everything that one forward reads besides weights and cache. Built by runner/batch.py.

    `token_ids`, `positions`, `write_slots` are [T] int64; `logits_rows` [R] are the batch rows that need logits, None
    when all do, in order. `segments` cover the T rows in order.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    write_slots: torch.Tensor
    segments: tuple[Segment, ...]
    logits_rows: torch.Tensor | None


class Layer(nn.Module):
    """A module with a step between loading and running."""

    def finish(self, kernels: KernelSet) -> None:
        """Called once when the parameters are filled: pack weights, compute what depends on them."""
        raise NotImplementedError
