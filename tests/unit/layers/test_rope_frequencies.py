"""Rotary frequencies of every kind against the published formulas, written another way."""

from __future__ import annotations

import math

import pytest
import torch

from proa.arch.blocks import RopeKind, RopeSpec
from proa.layers.rope import inverse_frequencies


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
