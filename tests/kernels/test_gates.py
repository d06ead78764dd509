"""The gate of attention in every backend against its formula, and heads that are a part of longer rows."""

from __future__ import annotations

import ctypes

import pytest
import torch

from proa.kernels.native.abi import load_library
from proa.kernels.native.ops import NativeAttention, NativeDense
from proa.kernels.native.sink import Direct
from proa.kernels.onednn import OnednnDense
from proa.kernels.reference.attention import ReferenceAttention
from proa.kernels.reference.misc import ReferenceDense
from proa.kernels.seam import AttentionOps, DenseOps, HeadNorm, Heads, LayerKV, RopeRows
from tests.factories.native import probed, why_not

HEADS = Heads(query=6, key_value=2, size=32)
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-8}


def dense(name: str) -> DenseOps:
    if name == "native":
        library = native_library()
        return NativeDense(library, Direct(library))
    return ReferenceDense() if name == "reference" else OnednnDense()


def attention(name: str) -> AttentionOps:
    return ReferenceAttention() if name == "reference" else NativeAttention(Direct(native_library()))


def native_library() -> ctypes.CDLL:
    found = probed()
    if why_not(found) is not None:
        pytest.skip(str(why_not(found)))
    return load_library(found.library)


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", ["reference", "onednn", "native"])
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("rows", [1, 5, 20])
def test_a_gate_is_the_sigmoid_of_a_part_of_a_row(name: str, dtype: torch.dtype, rows: int) -> None:
    x, projected = values(rows, 48).to(dtype), values(rows, 200, seed=1).to(dtype)
    projected[0, 80:89] = torch.tensor([-1e4, -100.0, -88.0, -20.0, 0.0, 20.0, 88.0, 100.0, 1e4])
    gate = projected[:, 80:128]
    out = dense(name).gate(x, gate)
    assert out.dtype == dtype
    expected = x.double() * gate.double().sigmoid()
    assert ((out.double() - expected).abs() <= ROUNDING[dtype] * expected.abs() + 1e-30).all()


@pytest.mark.parametrize("name", ["reference", "native"])
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("is_whole", [False, True])
def test_what_a_row_has_behind_its_heads_is_not_read(name: str, dtype: torch.dtype, is_whole: bool) -> None:
    rows, ops = 7, attention(name)
    norm = HeadNorm(weight=1 + values(8, 32, seed=2) / 8, eps=1e-6, is_whole=is_whole)
    angles = torch.arange(rows)[:, None, None] * torch.logspace(0, -2, 16).repeat(2)
    rope = RopeRows(cos=angles.cos(), sin=angles.sin() * torch.tensor([-1.0, 1.0]).repeat_interleave(16))
    long = torch.full((rows, HEADS.width + 90), float("nan"), dtype=dtype)
    long[:, : HEADS.width] = values(rows, HEADS.width, seed=3).to(dtype)
    results = []
    for projected in (long, long[:, : HEADS.width].contiguous()):
        kv = LayerKV(keys=torch.zeros(16, 2, 32, dtype=dtype), values=torch.zeros(16, 2, 32, dtype=dtype), page_size=16)
        queries = ops.write(projected, HEADS, norm, rope, kv, torch.arange(rows) + 4)
        results.append((queries, kv.keys, kv.values))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    assert results[0][1].any() and not results[0][0].isnan().any()
