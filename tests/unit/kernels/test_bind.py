"""Kernel sets: bound by name, one per runner, counting their own calls only."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from proa.errors import KernelUnavailable
from proa.kernels.bind import KernelNames, bind
from proa.units import Phase

REFERENCE = KernelNames(
    matmul="reference", attention=dict.fromkeys(Phase, "reference"), is_latent=False, delta={}, moe=None
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
