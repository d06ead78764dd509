"""Rotary frequencies of every kind against the published formulas, written another way."""

from __future__ import annotations

import math

import pytest
import torch

from proa.arch.blocks import RopeKind, RopeSpec, YarnSpec
from proa.layers.rope import Ropes, inverse_frequencies
from proa.units import DType
from tests.factories.layers import layer_context


def published(base: float, dim: int) -> list[float]:
    """theta_i = base^(-2i/dim) (RoFormer)."""
    return [math.exp(-2 * i / dim * math.log(base)) for i in range(dim // 2)]


def llama3_by_wavelength(frequency: float, spec: RopeSpec) -> float:
    """As Llama 3.1's model code states it: three cases by wavelength."""
    wavelength = 2 * math.pi / frequency
    if wavelength < spec.original_max_position / spec.high_freq_factor:
        return frequency
    if wavelength > spec.original_max_position / spec.low_freq_factor:
        return frequency / spec.factor
    smooth = (spec.original_max_position / wavelength - spec.low_freq_factor) / (
        spec.high_freq_factor - spec.low_freq_factor
    )
    return (1 - smooth) * frequency / spec.factor + smooth * frequency


def test_default_frequencies_are_powers_of_the_base() -> None:
    spec = RopeSpec(kind=RopeKind.DEFAULT, base=10000.0, dim=64)
    assert inverse_frequencies(spec, None).tolist() == pytest.approx(published(10000.0, 64), rel=1e-12)


def test_linear_scaling_slows_every_pair() -> None:
    spec = RopeSpec(kind=RopeKind.LINEAR, base=10000.0, dim=32, factor=4.0)
    assert inverse_frequencies(spec, None).tolist() == pytest.approx([f / 4 for f in published(10000.0, 32)], rel=1e-12)


@pytest.mark.parametrize(("factor", "original"), [(8.0, 8192), (32.0, 8192), (8.0, 64)])
def test_llama3_scaling_is_the_published_case_distinction(factor: float, original: int) -> None:
    spec = RopeSpec(
        kind=RopeKind.LLAMA3, base=500000.0, dim=128, factor=factor, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position=original,
    )  # fmt: skip
    expected = [llama3_by_wavelength(frequency, spec) for frequency in published(500000.0, 128)]
    assert inverse_frequencies(spec, None).tolist() == pytest.approx(expected, rel=1e-12)
    kept = [a == pytest.approx(b, rel=1e-12) for a, b in zip(expected, published(500000.0, 128), strict=True)]
    assert any(kept) and not all(kept)


def test_factors_from_the_file_divide_the_frequencies() -> None:
    spec = RopeSpec(kind=RopeKind.FACTORS, base=10000.0, dim=8)
    factors = torch.tensor([1.0, 2.0, 4.0, 8.0])
    expected = [f / d for f, d in zip(published(10000.0, 8), factors.tolist(), strict=True)]
    assert inverse_frequencies(spec, factors).tolist() == pytest.approx(expected, rel=1e-7)


def test_factors_that_are_missing_are_not_taken_for_ones() -> None:
    with pytest.raises(ValueError, match="FACTORS"):
        inverse_frequencies(RopeSpec(kind=RopeKind.FACTORS, base=10000.0, dim=8), None)


def yarn(*, dim: int, base: float, factor: float, original: int, truncate: bool, magnitude: float = 1.0) -> RopeSpec:
    spec = YarnSpec(beta_fast=32.0, beta_slow=1.0, magnitude=magnitude, truncate=truncate)
    return RopeSpec(kind=RopeKind.YARN, base=base, dim=dim, factor=factor, original_max_position=original, yarn=spec)


def test_yarn_frequencies_are_those_of_transformers() -> None:
    """Of 5.23.0: DeepSeek V3's numbers (every fourth pair), a tiny model's, and bounds that are no whole pairs."""
    deepseek = inverse_frequencies(yarn(dim=64, base=1e4, factor=40.0, original=4096, truncate=True), None).tolist()
    assert deepseek[::4] == pytest.approx(
        [1.0, 0.31622776, 0.1, 0.026879361, 0.0055000004, 7.9056941e-4, 2.4999999e-05, 7.9056945e-06], rel=1e-6
    )
    assert deepseek[11:14] == pytest.approx([0.039006926, 0.026879361, 0.018378144], rel=1e-6)
    tiny = inverse_frequencies(yarn(dim=8, base=1e4, factor=4.0, original=64, truncate=True), None).tolist()
    assert tiny == pytest.approx([1.0, 0.0625, 0.0025, 0.00025], rel=1e-6)
    kimi = inverse_frequencies(yarn(dim=64, base=5e4, factor=32.0, original=4096, truncate=False), None).tolist()
    assert kimi[8:12] == pytest.approx([0.066874035, 0.047303252, 0.030518392, 0.019471008], rel=1e-5)
    assert kimi[-1] == pytest.approx(8.7644128e-07, rel=1e-5)


def test_whole_bounds_make_a_difference() -> None:
    """The reverse of the third case above."""
    kept, cut = (
        inverse_frequencies(yarn(dim=64, base=5e4, factor=32.0, original=4096, truncate=t), None) for t in (False, True)
    )
    assert ((kept - cut).abs() / kept).max() > 1e-2


def test_yarn_without_its_numbers_is_refused() -> None:
    with pytest.raises(ValueError, match="YARN"):
        inverse_frequencies(RopeSpec(kind=RopeKind.YARN, base=10000.0, dim=8, factor=4.0), None)


def test_each_rope_of_a_model_has_its_own_rotation_and_magnitude() -> None:
    plain = RopeSpec(kind=RopeKind.DEFAULT, base=10000.0, dim=8, is_interleaved=True)
    scaled = yarn(dim=8, base=1e4, factor=4.0, original=64, truncate=True, magnitude=1.5)
    context = layer_context((), dtype=DType.F32, is_latent=False)
    ropes = Ropes(context, (plain, scaled))
    ropes.finish(context.kernels)
    rows = ropes(torch.tensor([0, 3]))
    assert set(rows) == {plain, scaled}
    assert rows[plain].is_interleaved and not rows[scaled].is_interleaved
    for spec, size in ((plain, 1.0), (scaled, 1.5)):
        angles = 3 * inverse_frequencies(spec, None).repeat(2)
        signs = torch.tensor([-1.0] * 4 + [1.0] * 4)
        torch.testing.assert_close(rows[spec].cos[1, 0], (size * angles.cos()).float())
        torch.testing.assert_close(rows[spec].sin[1, 0], (size * angles.sin() * signs).float())
        assert rows[spec].cos[0, 0].tolist() == [size] * 8
