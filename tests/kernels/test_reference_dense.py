"""Reference norm, rotation, MLP and attention input against the same formulas in numpy and float64."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from proa.arch.blocks import QueryScale
from proa.kernels.reference.attention import ReferenceAttention
from proa.kernels.reference.misc import ReferenceDense, rms_norm, rotate
from proa.kernels.seam import HeadNorm, Heads, LayerKV, RopeRows

OPS = ReferenceDense()


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rope_rows(positions: torch.Tensor, frequencies: torch.Tensor) -> RopeRows:
    angles = torch.cat((frequencies, frequencies)) * positions.view(-1, 1, 1)
    signs = torch.cat((-torch.ones_like(frequencies), torch.ones_like(frequencies)))
    return RopeRows(cos=angles.cos(), sin=angles.sin() * signs)


def norm64(x: torch.Tensor, weight: torch.Tensor, eps: float) -> np.ndarray:
    rows = x.double().numpy()
    return rows / np.sqrt((rows**2).mean(axis=-1, keepdims=True) + eps) * weight.double().numpy()


def test_rms_norm_is_the_formula() -> None:
    x, weight = random(5, 48) * 3, random(48, seed=1)
    np.testing.assert_allclose(rms_norm(x, weight, 1e-5).numpy(), norm64(x, weight, 1e-5), rtol=2e-6, atol=1e-6)


def test_rms_norm_of_tiny_rows_is_held_by_eps() -> None:
    x, weight = random(2, 48) * 1e-4, torch.ones(48)
    np.testing.assert_allclose(rms_norm(x, weight, 1e-5).numpy(), norm64(x, weight, 1e-5), rtol=2e-6)


def test_a_half_precision_row_is_normed_in_float32() -> None:
    x, weight = (random(3, 48) * 200).half(), torch.ones(48)  # squares overflow float16
    np.testing.assert_allclose(rms_norm(x, weight, 1e-5).numpy(), norm64(x, weight, 1e-5), rtol=1e-5, atol=1e-6)


def test_add_norm_adds_to_the_residual_in_place() -> None:
    residual, delta, weight = random(3, 16), random(3, 16, seed=1).bfloat16(), random(16, seed=2)
    total = residual.double() + delta.double()
    out = OPS.add_norm(residual, delta, weight, 1e-6, torch.float32)
    np.testing.assert_allclose(residual.numpy(), total.numpy(), rtol=1e-6)
    np.testing.assert_allclose(out.numpy(), norm64(total, weight, 1e-6), rtol=1e-5, atol=1e-6)
    assert OPS.norm(residual, weight, 1e-6, torch.bfloat16).dtype is torch.bfloat16


@pytest.mark.parametrize("size", [16, 8])
def test_rotation_is_a_complex_product_of_the_two_halves(size: int) -> None:
    """x[i] + 1j * x[i + size/2] turns by position * frequency; what lies past `size` stays."""
    x, positions = random(4, 3, 16), torch.tensor([0.0, 1.0, 7.0, 100.0])
    frequencies = torch.tensor([1.0, 0.3, 0.1, 0.01, 0.5, 0.2, 0.7, 0.05][: size // 2])
    out = rotate(x, rope_rows(positions, frequencies)).double().numpy()
    rows, half = x.double().numpy(), size // 2
    turned = (rows[..., :half] + 1j * rows[..., half:size]) * np.exp(
        1j * positions.double().numpy()[:, None, None] * frequencies.double().numpy()
    )
    expected = np.concatenate((turned.real, turned.imag, rows[..., size:]), axis=-1)
    np.testing.assert_allclose(out, expected, atol=5e-5)


def test_neighbours_that_are_pairs_turn_alike_and_come_to_lie_in_halves() -> None:
    x, positions = random(4, 3, 12), torch.tensor([0.0, 1.0, 7.0, 100.0])
    frequencies = torch.tensor([1.0, 0.3, 0.1, 0.01])
    out = rotate(x, replace(rope_rows(positions, frequencies), is_interleaved=True)).double().numpy()
    rows = x.double().numpy()
    turned = (rows[..., 0:8:2] + 1j * rows[..., 1:8:2]) * np.exp(
        1j * positions.double().numpy()[:, None, None] * frequencies.double().numpy()
    )
    np.testing.assert_allclose(out, np.concatenate((turned.real, turned.imag, rows[..., 8:]), axis=-1), atol=5e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_grow_with_their_position(dtype: torch.dtype) -> None:
    x, positions = random(5, 2, 4).to(dtype), [0, 7, 8, 17, 4000]
    out = ReferenceDense().scale_queries(x, torch.tensor(positions), QueryScale(beta=0.1, original=8))
    factors = [1 + 0.1 * math.log(1 + position // 8) for position in positions]
    expected = x.double().numpy() * np.array(factors)[:, None, None]
    assert out.dtype is dtype
    np.testing.assert_allclose(out.double().numpy(), expected, rtol=1e-6 if dtype is torch.float32 else 1e-2)


def test_the_gated_mlp_is_the_formula() -> None:
    x, up_gate, down = random(5, 12), random(20, 12, seed=1), random(12, 10, seed=2)
    out = OPS.ffn(x, OPS.pack(up_gate, None), OPS.pack(down, None))
    rows, matrix = x.double().numpy(), up_gate.double().numpy()
    gate, up = rows @ matrix[:10].T, rows @ matrix[10:].T
    expected = gate / (1 + np.exp(-gate)) * up @ down.double().numpy().T
    np.testing.assert_allclose(out.numpy(), expected, atol=1e-4)


def test_matmul_adds_the_bias() -> None:
    x, weight, bias = random(3, 6), random(4, 6, seed=1), random(4, seed=2)
    packed = OPS.pack(weight, bias)
    assert (packed.in_features, packed.out_features) == (6, 4)
    expected = x.double() @ weight.double().T + bias.double()
    np.testing.assert_allclose(OPS.matmul(x, packed).numpy(), expected.numpy(), atol=1e-5)


@pytest.mark.parametrize("has_norm", [False, True])
def test_attention_input_norms_rotates_and_writes_the_cache(has_norm: bool) -> None:
    heads, tokens = Heads(query=4, key_value=2, size=8), 3
    x, weight, bias = random(tokens, 10), random(64, 10, seed=1), random(64, seed=2)
    rope = rope_rows(torch.tensor([3.0, 4.0, 9.0]), torch.tensor([1.0, 0.5, 0.2, 0.1]))
    scale = torch.cat((random(1, 8, seed=3).expand(4, -1), random(1, 8, seed=4).expand(2, -1)))
    norm = HeadNorm(weight=scale, eps=1e-6) if has_norm else None
    kv = LayerKV(keys=torch.zeros(12, 2, 8), values=torch.zeros(12, 2, 8), page_size=4)
    slots = torch.tensor([5, 2, 11])
    queries = ReferenceAttention().write(OPS.matmul(x, OPS.pack(weight, bias)), heads, norm, rope, kv, slots)

    rows = (x @ weight.T + bias).view(tokens, 8, 8)
    mixed = rows[:, :6]
    if has_norm:
        mixed = torch.from_numpy(norm64(mixed, scale, 1e-6)).float()
    mixed = rotate(mixed, rope)
    torch.testing.assert_close(queries, mixed[:, :4], atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(kv.keys[slots], mixed[:, 4:], atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(kv.values[slots], rows[:, 6:], atol=2e-5, rtol=1e-5)
    untouched = torch.ones(12, dtype=torch.bool).index_fill_(0, slots, False)
    assert not kv.keys[untouched].any() and not kv.values[untouched].any()


def test_a_whole_norm_takes_all_heads_of_a_kind_as_one_vector() -> None:
    """MiniMax M2: queries are normed over H * d elements, keys over K * d, by weights of that width."""
    heads, tokens = Heads(query=4, key_value=2, size=8), 3
    projected, scale = random(tokens, 64), random(6, 8, seed=3)
    rope = rope_rows(torch.zeros(3), torch.tensor([1.0, 0.5, 0.2, 0.1]))  # position 0: nothing turns
    kv = LayerKV(keys=torch.zeros(4, 2, 8), values=torch.zeros(4, 2, 8), page_size=4)
    norm = HeadNorm(weight=scale, eps=1e-6, is_whole=True)
    queries = ReferenceAttention().write(projected, heads, norm, rope, kv, torch.tensor([1, 0, 2]))
    query, key = (
        norm64(projected[:, :32], scale[:4].flatten(), 1e-6),
        norm64(projected[:, 32:48], scale[4:].flatten(), 1e-6),
    )
    np.testing.assert_allclose(queries.flatten(1).numpy(), query, atol=1e-5)
    np.testing.assert_allclose(kv.keys[[1, 0, 2]].flatten(1).numpy(), key, atol=1e-5)
