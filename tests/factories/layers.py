"""What a single layer is built with, without a checkpoint: a plan of the few leaves that modules read."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import cast

import torch

from proa.arch.layout import ParameterInfo
from proa.dist.mesh import SINGLE
from proa.kernels.bind import bind
from proa.kernels.kernel_set import KernelNames
from proa.layers.base import BuildContext, Layer
from proa.plan.runner_plan import RunnerPlan
from proa.units import DType, Phase


def layer_context(
    parameters: Iterable[tuple[str, ParameterInfo]], *, dtype: DType, is_latent: bool, delta: str | None = "reference"
) -> BuildContext:
    """Reference kernels on the CPU; `delta` is the kernel of linear attention, None for a plan that names none."""
    plan = SimpleNamespace(dtype=SimpleNamespace(value=dtype), device=SimpleNamespace(value="cpu"))
    names = KernelNames(
        matmul="reference",
        attention=dict.fromkeys(Phase, "reference"),
        is_latent=is_latent,
        delta={} if delta is None else dict.fromkeys(Phase, delta),
        moe="reference",
        sampling="reference",
    )
    return BuildContext(
        plan=cast(RunnerPlan, plan),
        table=dict(parameters),
        mesh=SINGLE,
        kernels=bind(names, None),
        prefix="",
        lender=None,
    )


def finish(module: torch.nn.Module, context: BuildContext) -> None:
    """As Decoder.finish."""
    for part in module.modules():
        if isinstance(part, Layer):
            part.finish(context.kernels)
