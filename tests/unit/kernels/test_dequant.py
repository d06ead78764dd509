from __future__ import annotations

import math
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import quants
from hypothesis import given, settings
from hypothesis import strategies as st

from proa.checkpoint.open import open_checkpoint
from proa.errors import CheckpointError, WeightError
from proa.kernels.reference.dequant import dequantize, dequantize_fp8_block, unpermute_rope
from proa.units import DType

BLOCK_TYPES = [dtype for dtype in DType if dtype.is_block]
# Where a block keeps its float16 numbers (scale, and minimum where there is one), from ggml's block definitions.
HALVES = {DType.Q4_0: 1, DType.Q4_1: 2, DType.Q5_0: 1, DType.Q5_1: 2, DType.Q8_0: 1, DType.Q4_K: 2, DType.Q5_K: 2}
SPECIAL = np.array([0.0, -0.0, 6e-8, -6e-8, 6.1e-5, 1e-3, -1.0, 65504.0, -65504.0], dtype=np.float16)


def random_blocks(dtype: DType, count: int, seed: int) -> np.ndarray:
    """uint8 [count, bytes of a block]: any payload, and scales that are finite: random ones and every special one."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (count, dtype.storage.nbytes), dtype=np.uint8)
    scales = rng.standard_normal((count, HALVES.get(dtype, 1))).astype(np.float16)
    special = rng.random(scales.shape) < 0.3
    scales[special] = rng.choice(SPECIAL, special.sum())
    at = slice(208, 210) if dtype is DType.Q6_K else slice(0, 2 * scales.shape[1])
    blocks[:, at] = scales.view(np.uint8).reshape(count, -1)
    return blocks


def bits(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)


def test_every_block_format_is_tried_here() -> None:
    assert [dtype.name for dtype in BLOCK_TYPES] == ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]


@pytest.mark.parametrize("dtype", BLOCK_TYPES)
def test_a_blocks_size_is_the_gguf_librarys(dtype: DType) -> None:
    assert tuple(dtype.storage) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[dtype.name]]


@pytest.mark.parametrize("dtype", BLOCK_TYPES)
@settings(max_examples=25, deadline=None)
@given(count=st.integers(1, 64), seed=st.integers(0, 2**32 - 1))
def test_values_of_random_blocks_equal_the_gguf_librarys_bit_for_bit(dtype: DType, count: int, seed: int) -> None:
    blocks = random_blocks(dtype, count, seed)
    theirs = quants.dequantize(blocks, gguf.GGMLQuantizationType[dtype.name])
    ours = dequantize(torch.from_numpy(blocks.reshape(-1)), dtype, theirs.shape)
    assert ours.dtype == torch.float32
    assert np.isfinite(theirs).all()
    np.testing.assert_array_equal(bits(ours.numpy()), bits(theirs))


@pytest.mark.parametrize("dtype", BLOCK_TYPES)
def test_many_blocks_are_decoded_as_each_alone(dtype: DType) -> None:
    count = 3 * (1 << 18) // dtype.storage.elements + 1  # a few of the pieces that are decoded at a time, and a rest
    blocks = torch.from_numpy(random_blocks(dtype, count, 1))
    whole = dequantize(blocks.reshape(-1), dtype, (count, dtype.storage.elements))
    for index in (0, 1, count // 2, count - 2, count - 1):
        assert torch.equal(dequantize(blocks[index], dtype, (dtype.storage.elements,)), whole[index])


@pytest.mark.parametrize("dtype", [DType.F32, DType.F16, DType.BF16])
def test_plain_floats_keep_their_values_at_any_place_in_a_buffer(dtype: DType) -> None:
    values = torch.randn(3, 4).to(getattr(torch, dtype.value))
    raw = values.reshape(-1).view(torch.uint8)
    moved = torch.cat((torch.zeros(1, dtype=torch.uint8), raw))[1:]
    for stored in (raw, moved):
        assert torch.equal(dequantize(stored, dtype, (3, 4)), values.to(torch.float32))


def test_a_tensor_without_elements_has_none() -> None:
    assert dequantize(torch.empty(0, dtype=torch.uint8), DType.Q4_0, (0, 32)).shape == (0, 32)


@pytest.mark.parametrize(("nbytes", "shape"), [(18, (64,)), (36, (32,)), (17, (32,)), (18, (16,)), (18, (33,))])
def test_bytes_that_do_not_fit_the_shape_are_refused(nbytes: int, shape: tuple[int, ...]) -> None:
    with pytest.raises(CheckpointError, match=f"{nbytes} bytes are not q4_0 values") as error:
        dequantize(torch.zeros(nbytes, dtype=torch.uint8), DType.Q4_0, shape)
    assert error.value.slug == "checkpoint/wrong-size"


@pytest.mark.parametrize("dtype", [DType.I32, DType.F8_E4M3, DType.BOOL])
def test_a_type_that_is_no_float_by_itself_is_refused(dtype: DType) -> None:
    with pytest.raises(CheckpointError, match=dtype.value):
        dequantize(torch.zeros(dtype.storage.nbytes, dtype=torch.uint8), dtype, (1,))


@pytest.mark.parametrize(("heads", "head_dim"), [(1, 2), (1, 8), (3, 4), (4, 16)])
def test_attention_scores_of_interleaved_rope_on_stored_rows_are_those_of_half_split_rope_on_ours(
    heads: int, head_dim: int
) -> None:
    """GGUF's llama rows are for a rope that turns neighbours (2i, 2i+1); ours turns (i, i + head_dim/2)."""
    generator = torch.Generator().manual_seed(0)
    stored_q, stored_k = torch.randn(2, heads * head_dim, 5, generator=generator, dtype=torch.float64)
    x, y = torch.randn(2, 5, generator=generator, dtype=torch.float64)

    def interleaved(vector: torch.Tensor, position: int) -> torch.Tensor:
        pairs = torch.view_as_complex(vector.reshape(heads, head_dim // 2, 2).contiguous())
        return torch.view_as_real(pairs * turn(position)).reshape(heads, head_dim)

    def half_split(vector: torch.Tensor, position: int) -> torch.Tensor:
        first, second = vector.reshape(heads, head_dim).chunk(2, dim=1)
        turned = torch.complex(first, second) * turn(position)
        return torch.cat((turned.real, turned.imag), dim=1)

    def turn(position: int) -> torch.Tensor:
        angles = position * 10000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        return torch.polar(torch.ones_like(angles), angles)

    theirs = (interleaved(stored_q @ x, 9) * interleaved(stored_k @ y, 4)).sum(dim=1)
    ours_q, ours_k = unpermute_rope(stored_q, heads), unpermute_rope(stored_k, heads)
    ours = (half_split(ours_q @ x, 9) * half_split(ours_k @ y, 4)).sum(dim=1)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_rows_of_a_weight_and_of_a_bias_move_alike() -> None:
    bias = torch.arange(16)
    assert unpermute_rope(bias, 2).tolist() == [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15]
    assert torch.equal(unpermute_rope(bias[:, None].expand(16, 3), 2)[:, 0], unpermute_rope(bias, 2))


@pytest.mark.parametrize(("rows", "heads"), [(15, 2), (6, 2), (16, 0), (16, 3)])
def test_rows_that_are_no_whole_heads_are_refused(rows: int, heads: int) -> None:
    with pytest.raises(WeightError, match=f"{rows} rows are not {heads} heads") as error:
        unpermute_rope(torch.zeros(rows, 2), heads)
    assert error.value.slug == "weights/row-order"


@pytest.mark.model
def test_every_tensor_of_the_real_model_equals_the_gguf_librarys_values(smollm2: Path) -> None:
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(smollm2).tensors}
    data = np.memmap(smollm2, dtype=np.uint8, mode="r")
    for info in open_checkpoint(smollm2).tensors.values():
        raw = torch.from_numpy(np.array(data[info.offset : info.offset + info.nbytes]))
        tensor = theirs[info.stored_name]
        expected = quants.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(bits(dequantize(raw, info.dtype, info.shape).numpy()), bits(expected))


def by_elements(weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Each value times the scale of the block that it lies in, one at a time in double precision."""
    rows, columns = weight.shape
    values = [
        [float(weight[i, j]) * float(scale[i // block[0], j // block[1]]) for j in range(columns)] for i in range(rows)
    ]
    return torch.tensor(values, dtype=torch.float64).to(torch.float32).reshape(rows, columns)


@pytest.mark.parametrize("scales", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "block"), [((8, 6), (4, 3)), ((9, 7), (4, 3)), ((3, 2), (4, 3)), ((5, 4), (1, 4)), ((4, 5), (4, 1))]
)
def test_block_fp8_values_are_codes_times_the_scale_of_their_block(
    shape: tuple[int, int], block: tuple[int, int], scales: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(3)
    weight = (torch.randn(shape, generator=generator) * 100).to(torch.float8_e4m3fn)
    grid = (math.ceil(shape[0] / block[0]), math.ceil(shape[1] / block[1]))
    scale = torch.rand(grid, generator=generator).to(scales) + 0.01
    found = dequantize_fp8_block(weight, scale, block)
    assert found.dtype is torch.float32 and torch.equal(found, by_elements(weight, scale, block))


def test_every_fp8_code_has_its_value() -> None:
    """From the format: 1 sign bit, 4 exponent bits with bias 7, 3 fraction bits; S.1111.111 is no number."""
    codes = torch.arange(256, dtype=torch.uint8)
    found = dequantize_fp8_block(codes.view(torch.float8_e4m3fn).view(16, 16), torch.ones(1, 1), (16, 16)).flatten()
    for code in range(256):
        sign, exponent, fraction = -1.0 if code & 128 else 1.0, (code >> 3) & 15, code & 7
        if (exponent, fraction) == (15, 7):
            assert math.isnan(float(found[code]))
            continue
        value = (8 + fraction) / 8 * 2.0 ** (exponent - 7) if exponent else fraction / 8 * 2.0**-6
        assert float(found[code]) == sign * value


def test_scales_of_another_grid_are_refused() -> None:
    with pytest.raises(WeightError, match=r"scales \[1, 2\] are not one per 4 x 3 block of \[8, 6\]"):
        dequantize_fp8_block(torch.zeros(8, 6).to(torch.float8_e4m3fn), torch.ones(1, 2), (4, 3))
