"""Kernel sets: bound by name, one per runner, counting their own calls only."""

from __future__ import annotations

import pytest
import torch

from proa.errors import KernelUnavailable
from proa.kernels.bind import KernelNames, bind
from proa.units import Phase

REFERENCE = KernelNames(matmul="reference", attention=dict.fromkeys(Phase, "reference"))


def test_a_kernel_set_says_which_backends_it_has() -> None:
    assert bind(REFERENCE, None).names == REFERENCE


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
        (KernelNames(matmul="nowhere", attention={}), "matmul_kernel = nowhere"),
        (KernelNames(matmul="reference", attention={Phase.VERIFY: "nowhere"}), "attention.verify = nowhere"),
    ],
)
def test_a_name_without_a_kernel_is_refused_by_its_knob(names: KernelNames, knob: str) -> None:
    with pytest.raises(KernelUnavailable, match=knob) as caught:
        bind(names, None)
    assert caught.value.slug == "kernels/unknown"
