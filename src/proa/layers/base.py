"""How modules are built, and what one forward carries. Owns no layer.

The plan is read while a module is built and not kept: after that a module knows shapes, parameters and its kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import nn

from proa.arch.blocks import MLASpec
from proa.arch.decoder import DecoderSpec
from proa.arch.layout import ParameterInfo
from proa.dist.mesh import Mesh
from proa.kernels.delta import StateSlots
from proa.kernels.kernel_set import KernelNames, KernelSet
from proa.kernels.memory import empty
from proa.kernels.seam import Segment
from proa.plan.runner_plan import PhasePlan, RunnerPlan
from proa.units import DType, Phase

if TYPE_CHECKING:
    from proa.layers.decoder import Decoder

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


def state_dtype(plan: RunnerPlan) -> DType:
    """That of the delta states. TypeError where the plan knows no linear attention."""
    dtype = plan.state_dtype.value
    if dtype is None:
        raise TypeError(f"the plan of {plan.family} has no linear attention, hence no state_dtype")
    return dtype


def kernel_names(plan: RunnerPlan, spec: DecoderSpec) -> KernelNames:
    """The kernels that a plan names for a model, for `bind`. A phase whose op does not occur is left out."""
    return KernelNames(
        matmul=plan.matmul_kernel.value,
        attention=_by_phase(plan.attention),
        is_latent=any(isinstance(layer.mixer, MLASpec) for layer in spec.layers),
        delta=_by_phase(plan.linear_attention),
        moe=plan.moe_kernel.value if spec.moe_layers else None,
        sampling=plan.sampling_kernel.value,
    )


def _by_phase(plan: PhasePlan) -> dict[Phase, str]:
    phases = {Phase.PREFILL: plan.prefill, Phase.DECODE: plan.decode, Phase.VERIFY: plan.verify}
    return {phase: choice.value for phase, choice in phases.items() if choice.value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildContext:
    """Passed to every module's __init__ and never stored. `table` gives each parameter's shape by its full name,
    `prefix` is where in the model the module stands (`layers.3.attn`, empty at the root). `lender` is the built target
    of a draft that borrows modules (arch/decoder.py: Borrow)."""

    plan: RunnerPlan
    table: Mapping[str, ParameterInfo]
    mesh: Mesh
    kernels: KernelSet
    prefix: str
    lender: Decoder | None

    @property
    def dtype(self) -> torch.dtype:
        return torch_dtype(self.plan.dtype.value)

    def child(self, name: str) -> BuildContext:
        return replace(self, prefix=self._full(name))

    def has(self, name: str) -> bool:
        return self._full(name) in self.table

    def parameter(self, name: str) -> nn.Parameter:
        """An unfilled parameter on the plan's device; its shape and type stand in the table, nowhere else. A block
        format's is uint8, the last dimension the bytes of a row."""
        info, device = self.table[self._full(name)], self.plan.device.value
        if info.dtype is not None and info.dtype.is_block:
            shape, dtype = (*info.shape[:-1], info.dtype.nbytes(info.shape[-1])), torch.uint8
        else:
            shape, dtype = info.shape, self.dtype if info.dtype is None else torch_dtype(info.dtype)
        is_packed_in_place = device == "cpu" and info.dtype is None and len(shape) == 2
        data = self.kernels.unpacked(shape, dtype) if is_packed_in_place else empty(shape, dtype, device)
        return nn.Parameter(data, requires_grad=False)

    def blocks(self, name: str) -> DType | None:
        """The block format that a parameter is kept in, None where it is plain."""
        dtype = self.table[self._full(name)].dtype
        return dtype if dtype is not None and dtype.is_block else None

    def scales(self, name: str) -> nn.Parameter | None:
        """The unfilled scales of a parameter that is kept as block FP8, None of others. By loading's rule their name is
        the parameter's with `_scale` at its end."""
        info = self.table[self._full(name)]
        if info.scale_shape is None:
            return None
        data = torch.empty(info.scale_shape, dtype=torch.float32, device=self.plan.device.value)
        return nn.Parameter(data, requires_grad=False)

    def scale_columns(self, name: str) -> int:
        """Columns per scale of such a parameter, 0 of others."""
        return self.table[self._full(name)].scale_columns or 0

    def optional(self, name: str) -> nn.Parameter | None:
        """As `parameter`, None where the table has no such name (a bias that the model lacks)."""
        return self.parameter(name) if self.has(name) else None

    def _full(self, name: str) -> str:
        return f"{self.prefix}.{name}" if self.prefix else name


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """Everything that one forward reads besides weights and cache. Built by runner/batch.py.

    `token_ids`, `positions`, `write_slots` are [T] int64; `logits_rows` [R] are the batch rows that need logits, None
    when all do, in order. `segments` cover the T rows in order; `states` says for each of them where the states of
    delta layers come from and go to, and is empty for models without such layers. `hidden` [T, D] are the hidden rows
    that a draft's rows begin with (arch/decoder.py: EntrySpec), None for others. `wants_hidden`: the rows after the
    final norm are asked for, too.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    write_slots: torch.Tensor
    segments: tuple[Segment, ...]
    logits_rows: torch.Tensor | None
    states: tuple[StateSlots, ...] = ()
    hidden: torch.Tensor | None = None
    wants_hidden: bool = False


class Layer(nn.Module):
    """A module with a step between loading and running."""

    def finish(self, kernels: KernelSet) -> None:
        """Called once when the parameters are filled: pack weights, compute what depends on them."""
        raise NotImplementedError

    def reads(self) -> Iterable[nn.Parameter]:
        """The parameters that must be filled before `finish`."""
        return self.parameters()

    def held(self) -> Iterable[tuple[torch.Tensor, int]]:
        """The tensors in which its own weights really lie (packed ones, where there are), with their bytes."""
        return own_parameters(self)


def own_parameters(module: nn.Module) -> Iterable[tuple[torch.Tensor, int]]:
    return [(parameter, parameter.nbytes) for parameter in module.parameters(recurse=False)]


class Weight(nn.Module):
    """A parameter `weight` and nothing else: a kernel reads it together with others."""

    def __init__(self, ctx: BuildContext) -> None:
        super().__init__()
        self.weight = ctx.parameter("weight")
