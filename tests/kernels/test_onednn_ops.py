"""Onednn ops against float64 arithmetic; that its packed weights are for it alone; and why it is not called exact."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from proa.kernels.caps import read_caps
from proa.kernels.catalog import CATALOG, has_onednn_bf16
from proa.kernels.onednn import OnednnDense
from proa.kernels.probing.probe import self_test_onednn
from proa.kernels.reference.misc import ReferenceDense
from proa.kernels.verdicts import PASSED
from proa.runner.describe import promised
from proa.units import Numerics
from tests.factories.headers import LAPTOP, planned
from tests.factories.native import native_runner, probed, why_not
from tests.factories.runners import Rows, built_runner, runner_of

ISA = read_caps("cpu").isa
VERDICT = self_test_onednn(ISA)
pytestmark = pytest.mark.skipif(VERDICT != PASSED, reason=f"onednn cannot run here: {VERDICT}")
DTYPES = [torch.float32, *([torch.bfloat16] if has_onednn_bf16(ISA) else [])]
# float32: sums of up to 1536 products in another order. bfloat16: the rounding of the output (2^-9), and in chains that
# of the values between two products.
BOUND = {torch.float32: 1e-5, torch.bfloat16: 2**-8}
CHAIN = {torch.float32: 1e-5, torch.bfloat16: 2**-6}
HOST = replace(LAPTOP, isa=ISA, compiler=None, kernels={"onednn": PASSED})


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + 7 * len(shape)))


def assert_near(ours: torch.Tensor, expected: torch.Tensor, bound: float) -> None:
    """Relative to the largest expected value."""
    assert (ours.double() - expected).abs().max() <= bound * expected.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 7, 33])
@pytest.mark.parametrize(("out", "size"), [(1, 16), (15, 33), (100, 200), (130, 1537)])
def test_matmul_is_the_product_with_bias(dtype: torch.dtype, rows: int, out: int, size: int) -> None:
    ops = OnednnDense()
    x, weight, bias = values(rows, size).to(dtype), values(out, size, seed=1).to(dtype), values(out, seed=2).to(dtype)
    packed = ops.pack(weight, bias)
    assert (packed.out_features, packed.in_features, packed.nbytes) == (out, size, weight.nbytes)
    product = x.double() @ weight.double().T
    assert_near(ops.matmul(x, packed), product + bias.double(), BOUND[dtype])
    made = ops.logits(x, ops.pack(weight, None))
    assert made.dtype == torch.float32
    assert_near(made, product, BOUND[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_rows_are_no_results(dtype: torch.dtype) -> None:
    ops = OnednnDense()
    assert ops.matmul(values(0, 48).to(dtype), ops.pack(values(32, 48).to(dtype), None)).shape == (0, 32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gated_mlp_is_the_formula(dtype: torch.dtype) -> None:
    ops = OnednnDense()
    x, gate_up = values(6, 48).to(dtype), (values(160, 48, seed=1) / 7).to(dtype)
    down = (values(48, 80, seed=2) / 9).to(dtype)
    both = x.double() @ gate_up.double().T
    expected = both[:, :80] * both[:, :80].sigmoid() * both[:, 80:] @ down.double().T
    assert_near(ops.ffn(x, ops.pack(gate_up, None), ops.pack(down, None)), expected, CHAIN[dtype])


def test_what_it_does_not_change_is_the_references() -> None:
    ops, reference, scale = OnednnDense(), ReferenceDense(), 1 + values(48) / 8
    x, delta, ids = values(5, 48), values(5, 48, seed=1), torch.tensor([3, 0])
    assert torch.equal(ops.norm(x, scale, 1e-6, x.dtype), reference.norm(x, scale, 1e-6, x.dtype))
    ours, theirs = x.clone(), x.clone()
    made = ops.add_norm(ours, delta, scale, 1e-6, x.dtype), reference.add_norm(theirs, delta, scale, 1e-6, x.dtype)
    assert torch.equal(made[0], made[1]) and torch.equal(ours, theirs)
    assert torch.equal(ops.select(x, ids), x[ids])
    assert torch.equal(ops.lookup(ops.table(x), ids), x[ids])


def test_packed_weights_are_for_its_matmuls_alone() -> None:
    ops, weight = OnednnDense(), values(32, 48)
    with pytest.raises(TypeError, match="another backend"):
        ops.matmul(values(2, 48), ReferenceDense().pack(weight, None))
    with pytest.raises(TypeError, match="only oneDNN can read"):
        ops.lookup(ops.pack(weight, None), torch.tensor([0]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_called_inexact_because_one_row_rounds_otherwise_than_many(dtype: torch.dtype) -> None:
    assert not any(kernel.exact for kernel in CATALOG if kernel.backend == "onednn")
    ops, x, weight = OnednnDense(), values(64, 2048).to(dtype), (values(1024, 2048, seed=1) / 45).to(dtype)
    packed = ops.pack(weight, None)
    whole = ops.matmul(x, packed)
    equal = [step for step in (1, 3, 7) if torch.equal(_in_parts(ops.matmul, x, step, packed), whole)]
    if len(equal) == 3:
        pytest.skip("this CPU's oneDNN sums in one order here; the claim is made for others")
    assert 1 not in equal


def _in_parts(matmul: Callable[..., torch.Tensor], x: torch.Tensor, step: int, packed: object) -> torch.Tensor:
    return torch.cat([matmul(part.contiguous(), packed) for part in x.split(step)])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["float32", *(["bfloat16"] if has_onednn_bf16(ISA) else [])])
def test_a_model_on_it_is_what_its_plan_says_and_answers_as_on_reference(
    tiny: Callable[..., Path], tied: bool, dtype: str
) -> None:
    path = tiny("llama", tie_word_embeddings=tied)
    plan = planned(path, caps=HOST, dtype=dtype).target
    assert plan.plan.matmul_kernel.value == "onednn" and plan.plan.numerics.value is Numerics.FAST
    runner = built_runner(plan)
    assert runner.describe() == promised(plan.plan, plan.spec, plan.parameters, runner.tables.pool.num_pages)
    reference = built_runner(planned(path, caps=HOST, dtype=dtype, matmul_kernel="reference").target)
    ours, theirs = (Rows(one, requests=1, rows=16) for one in (runner, reference))
    expected = theirs.prefill(0, [1, 5, 9, 2, 7])
    assert_near(ours.prefill(0, [1, 5, 9, 2, 7]), expected.double(), 1e-4 if dtype == "float32" else 0.05)
    assert_near(ours.decode([3]), theirs.decode([3]).double(), 1e-4 if dtype == "float32" else 0.05)
    copy = [note.reason for note in plan.plan.matmul_kernel.notes]
    assert copy == (["the tied head is a second copy of the embedding in memory"] if tied else [])
    embedding = plan.parameters["embed.weight"].nbytes(plan.plan.dtype.value)
    assert runner.describe()["weights_bytes"] - reference.describe()["weights_bytes"] == (embedding if tied else 0)


def test_its_matmuls_and_native_attention_work_together(tiny: Callable[..., Path]) -> None:
    found = probed()
    if reason := why_not(found):
        pytest.skip(reason)
    path = tiny("qwen3", head_dim=16)
    mixed, plain = native_runner(path, found, matmul_kernel="onednn"), runner_of(path)
    ours, theirs = (Rows(one, requests=1, rows=16) for one in (mixed, plain))
    assert_near(ours.prefill(0, [1, 2, 3]), theirs.prefill(0, [1, 2, 3]).double(), 1e-4)
    assert {"ffn/onednn", "attention.prefill/native"} <= set(mixed.kernel_calls())
