"""Products on stored blocks: against float64 arithmetic on weights that gguf's own code dequantised, with activations
rounded as the format of the kernel says; and their exactness."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from proa.kernels.catalog import BLOCK_FORMATS
from proa.kernels.native.abi import load_library
from proa.kernels.native.ops import NativeDense
from proa.kernels.native.sink import Direct
from proa.kernels.reference.misc import ReferenceDense
from proa.units import DType
from tests.factories.native import probed, why_not

FOUND = probed()
WHY_NOT = why_not(FOUND) or (None if "avx512_vnni" in FOUND.caps.isa else "this CPU has no avx512_vnni")
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

FORMATS = [(format, format.name) for format in sorted(BLOCK_FORMATS, key=lambda format: format.name)]
DTYPES = (torch.float32, torch.bfloat16)
# The sums of integers are exact; scales and the sum over blocks are float32, the output is rounded to its type.
BOUND = {torch.float32: 1e-5, torch.bfloat16: 2**-8}


@pytest.fixture(scope="module")
def dense() -> NativeDense:
    library = load_library(FOUND.library)
    return NativeDense(library, Direct(library))


def stored(out: int, size: int, kind: str, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(uint8 rows of blocks, float64 weights that they stand for), both by gguf. `size` grows to whole blocks."""
    form, rng = gguf.GGMLQuantizationType[kind], np.random.default_rng(seed)
    if kind.endswith("_K"):  # gguf does not quantise these: any bytes are blocks, but for their float16 factors
        elements, nbytes = gguf.GGML_QUANT_SIZES[form]
        blocks = rng.integers(0, 256, (out, size * 8 // elements, nbytes), dtype=np.uint8)
        for at in {"Q4_K": (0, 2), "Q6_K": (208,)}[kind]:
            factors = (0.002 + 0.01 * rng.random(blocks.shape[:2])).astype(np.float16)
            blocks[..., at : at + 2] = factors[..., None].view(np.uint8)
        blocks = blocks.reshape(out, -1)
    else:
        blocks = gguf.quants.quantize(rng.standard_normal((out, size)).astype(np.float32), form)
    return torch.from_numpy(blocks.copy()), torch.from_numpy(gguf.quants.dequantize(blocks, form)).double()


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Activations as the kernels see them: per row and 32 values, 127 steps to the largest."""
    groups = x.float().view(len(x), -1, 32)
    largest = groups.abs().amax(-1, keepdim=True)
    inverse = torch.where(largest > 0, 127 / largest, 0)  # float32, as the kernel has it; its product is not rounded
    return (torch.round(groups.double() * inverse.double()) * (largest / 127).double()).view(x.shape)


@pytest.mark.parametrize(("format", "kind"), FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 6, 7, 17])
@pytest.mark.parametrize(("out", "size"), [(16, 32), (48, 96), (33, 64), (1, 256), (90, 160)])
def test_products_on_blocks_are_those_of_the_dequantised_weights(
    dense: NativeDense, format: DType, kind: str, dtype: torch.dtype, rows: int, out: int, size: int
) -> None:
    blocks, weight = stored(out, size, kind)
    bias = torch.linspace(-1, 1, out).to(dtype)
    x = torch.randn(rows, weight.shape[1], generator=torch.Generator().manual_seed(1)).to(dtype)
    x[0, :32] = 0  # a group without a largest value
    packed = dense.pack_blocks(blocks, bias, format, dtype)
    block = BLOCK_FORMATS[format]
    assert packed.nbytes == weight.numel() // block.elements * block.nbytes
    expected = rounded(x) @ weight.T + bias.double()
    error = (dense.matmul(x, packed).double() - expected).abs().max()
    assert error <= BOUND[dtype] * expected.abs().max()
    # And rounding activations to 8 bits costs what it should: a hundredth of the vectors' lengths, not more.
    plain = x.double() @ weight.T + bias.double()
    assert ((expected - plain).abs() <= 0.01 * x.double().norm(dim=1)[:, None] * weight.norm(dim=1) + 1e-9).all()


@pytest.mark.parametrize(("format", "kind"), FORMATS)
def test_rows_of_blocks_are_looked_up_bit_for_bit(dense: NativeDense, format: DType, kind: str) -> None:
    blocks, weight = stored(70, 96, kind)
    ids = torch.tensor([69, 0, 16, 15, 33])
    packed = dense.pack_blocks(blocks, None, format, torch.bfloat16)
    torch.testing.assert_close(dense.lookup(packed, ids).double(), weight[ids], atol=0, rtol=1e-6)


@pytest.mark.parametrize(("format", "kind"), FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_on_blocks_have_the_same_bits_beside_any_other_rows(
    dense: NativeDense, format: DType, kind: str, dtype: torch.dtype
) -> None:
    up, weight = stored(128, 96, kind)
    down, _ = stored(96, 64 if kind[-1] != "K" else 32, kind, seed=1)
    if kind.endswith("_K"):
        up, weight = stored(512, 96, kind)
    x = torch.randn(40, weight.shape[1], generator=torch.Generator().manual_seed(2)).to(dtype)
    packs = [dense.pack_blocks(blocks, None, format, dtype) for blocks in (up, down)]
    for op in (lambda rows: dense.matmul(rows, packs[0]), lambda rows: dense.ffn(rows, *packs)):
        whole = op(x)
        for step in (1, 2, 3, 5, 6, 8, 16):
            assert torch.equal(torch.cat([op(part.contiguous()) for part in x.split(step)]), whole)


@pytest.mark.parametrize(("format", "kind"), FORMATS)
def test_the_reference_computes_with_the_dequantised_weights(format: DType, kind: str) -> None:
    blocks, weight = stored(24, 64, kind)
    x = torch.randn(3, weight.shape[1], generator=torch.Generator().manual_seed(3))
    ops = ReferenceDense()
    out = ops.matmul(x, ops.pack_blocks(blocks, None, format, torch.float32))
    torch.testing.assert_close(out.double(), x.double() @ weight.T, atol=2e-4, rtol=1e-5)


def test_the_mlp_on_blocks_is_the_formula(dense: NativeDense) -> None:
    up, gate_up = stored(128, 96, "Q8_0")
    down, weight = stored(96, 64, "Q8_0", seed=1)
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(4)) / 8
    packs = [dense.pack_blocks(blocks, None, DType.Q8_0, torch.float32) for blocks in (up, down)]
    both = rounded(x) @ gate_up.T
    hidden = (both[:, :64] * both[:, :64].sigmoid() * both[:, 64:]).float()
    expected = rounded(hidden) @ weight.T
    error = (dense.ffn(x, *packs).double() - expected).abs().max()
    assert error <= 1e-2 * expected.abs().max()  # a hidden value next to a rounding border may fall to either side
