"""Kernel sets: bound by name, one per runner, counting their own calls only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import cast

import numpy as np
import pytest
import torch

from proa.arch.delta_blocks import DeltaSpec
from proa.errors import KernelUnavailable
from proa.kernels.bind import bind
from proa.kernels.delta import DeltaState, DeltaWeights, StateSlots
from proa.kernels.kernel_set import KernelNames
from proa.kernels.plugins import KernelPlugin
from proa.units import Phase

REFERENCE = KernelNames(
    matmul="reference",
    attention=dict.fromkeys(Phase, "reference"),
    is_latent=False,
    delta={},
    moe=None,
    sampling="reference",
)
LATENT = replace(REFERENCE, is_latent=True, moe="reference")
HYBRID = replace(REFERENCE, delta={Phase.PREFILL: "torch", Phase.DECODE: "reference", Phase.VERIFY: "torch"})


@pytest.mark.parametrize("names", [REFERENCE, LATENT, HYBRID])
def test_a_kernel_set_says_which_backends_it_has(names: KernelNames) -> None:
    assert bind(names, None).names == names


def test_calls_are_counted_by_op_and_backend() -> None:
    kernels = bind(REFERENCE, None)
    packed = kernels.pack(torch.eye(4), None)
    for _ in range(3):
        kernels.matmul(torch.ones(2, 4), packed)
    assert kernels.calls == {("pack", "reference"): 1, ("matmul", "reference"): 3}


def test_two_kernel_sets_do_not_share_their_counts() -> None:
    first, second = bind(REFERENCE, None), bind(REFERENCE, None)
    first.pack(torch.eye(4), None)
    assert not second.calls


@pytest.mark.parametrize(
    ("names", "knob"),
    [
        (replace(REFERENCE, matmul="nowhere"), "matmul_kernel = nowhere"),
        (replace(REFERENCE, attention={Phase.VERIFY: "nowhere"}), "attention.verify = nowhere"),
        (replace(LATENT, attention={Phase.DECODE: "nowhere"}), "attention.decode = nowhere"),
        (replace(REFERENCE, moe="nowhere"), "moe_kernel = nowhere"),
        (replace(REFERENCE, delta={Phase.VERIFY: "nowhere"}), "linear_attention.verify = nowhere"),
    ],
)
def test_a_name_without_a_kernel_is_refused_by_its_knob(names: KernelNames, knob: str) -> None:
    with pytest.raises(KernelUnavailable, match=knob) as caught:
        bind(names, None)
    assert caught.value.slug == "kernels/unknown"


def test_experts_and_latent_rows_are_counted_too() -> None:
    kernels = bind(LATENT, None)
    kernels.query_norm(torch.ones(2, 4), torch.ones(4), 1e-6)
    kernels.pack_experts(torch.ones(2, 8, 4), torch.ones(2, 4, 4))
    assert kernels.calls == {("query_norm", "reference"): 1, ("pack_experts", "reference"): 1}


def test_a_model_without_experts_has_no_kernel_for_them() -> None:
    with pytest.raises(RuntimeError, match="without experts"):
        bind(REFERENCE, None).pack_experts(torch.ones(2, 8, 4), torch.ones(2, 4, 4))


class Elsewhere:
    """A backend of linear attention from another package."""

    name = "ascend"

    def __init__(self, names: Mapping[Phase, str]) -> None:
        self.names = names

    def replay(self, *args: object) -> None: ...


def test_a_backend_of_another_package_is_made_from_the_plan_and_found_only_where_it_is_given() -> None:
    names = replace(HYBRID, delta={Phase.PREFILL: "torch", Phase.DECODE: "ascend", Phase.VERIFY: "ascend"})
    plugin = KernelPlugin(backend="ascend", device="npu", kernels=(), delta=Elsewhere, is_present=lambda: True)
    kernels = bind(names, None, [plugin])
    assert kernels.names == names
    made = kernels._delta[Phase.DECODE]
    assert isinstance(made, Elsewhere) and made.names == names.delta
    nothing = torch.empty(0)
    state = DeltaState(conv=nothing, delta=nothing, kept=None)
    weights = DeltaWeights(conv=nothing, rate=nothing, bias=nothing, norm=nothing)
    kernels.replay(weights, cast("DeltaSpec", None), state, np.array([0]), StateSlots.of([], []))
    assert kernels.calls == {("delta.replay", "ascend"): 1}
    with pytest.raises(KernelUnavailable, match=r"linear_attention\.decode = ascend is no kernel of this package"):
        bind(names, None)


def test_a_backend_of_another_package_does_not_stand_for_one_of_this() -> None:
    plugin = KernelPlugin(backend="torch", device="npu", kernels=(), delta=Elsewhere, is_present=lambda: True)
    assert not isinstance(bind(HYBRID, None, [plugin])._delta[Phase.PREFILL], Elsewhere)
