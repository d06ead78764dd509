"""The noise source: known vectors of its hash, the distribution it gives, independence of all that differs in a key."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from proa.kernels.reference.noise import gumbel, gumbel_of, uniform_floors
from proa.sampling.noise import Purpose, noise_key, uniform

CPU = torch.device("cpu")
P = torch.tensor([0.5, 0.25, 0.15, 0.0999, 0.0001], dtype=torch.float64)
DRAWS = 1_000_000

# The first outputs of SplitMix64 seeded with 1234567, as published with other implementations of it.
SPLITMIX = (
    6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821,
)  # fmt: skip


def draws(keys: Callable[[int], int], count: int) -> torch.Tensor:
    """Tokens [count] drawn from P, draw i under the key keys(i)."""
    words = torch.tensor([key - 2**64 if key >= 2**63 else key for key in map(keys, range(count))])
    return (P.log() + gumbel_of(words[:, None], torch.arange(5))).argmax(dim=1)


def surprise(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """The chance of a deviation at least as large, with nothing estimated from the counts."""
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    return float(chi2.sf(statistic, counts.numel() - 1))


def fits(tokens: torch.Tensor) -> float:
    return surprise(torch.bincount(tokens, minlength=5).double(), P * len(tokens))


def independent(left: torch.Tensor, right: torch.Tensor) -> float:
    common = P[:4] / P[:4].sum()  # the rare token would leave cells that expect next to nothing
    both = (left < 4) & (right < 4)
    pairs = torch.bincount(left[both] * 4 + right[both], minlength=16).double()
    return surprise(pairs, torch.outer(common, common).flatten() * both.sum())


@pytest.fixture(scope="module")
def by_position() -> torch.Tensor:
    return draws(lambda position: noise_key(42, 0, position, Purpose.TOKEN), DRAWS)


def test_a_million_draws_by_position_follow_the_distribution(by_position: torch.Tensor) -> None:
    assert fits(by_position) > 1e-3


@pytest.mark.parametrize("distance", [1, 2, 64])
def test_draws_at_neighbouring_positions_are_independent(by_position: torch.Tensor, distance: int) -> None:
    assert independent(by_position[:-distance], by_position[distance:]) > 1e-3


@pytest.mark.parametrize(
    "other",
    [
        lambda position: noise_key(43, 0, position, Purpose.TOKEN),
        lambda position: noise_key(42 ^ 2**63, 0, position, Purpose.TOKEN),
        lambda position: noise_key(42, 1, position, Purpose.TOKEN),
        lambda position: noise_key(42, 0, position, Purpose.RESIDUAL),
        lambda position: noise_key(42, 0, position, Purpose.DRAFT),
        lambda position: noise_key(position, 0, 42, Purpose.TOKEN),
    ],
    ids=["seed", "high bit of the seed", "choice", "purpose", "another purpose", "words exchanged"],
)
def test_draws_whose_keys_differ_in_one_word_are_independent(by_position: torch.Tensor, other) -> None:
    tokens = draws(other, DRAWS // 10)
    assert fits(tokens) > 1e-3
    assert independent(by_position[: DRAWS // 10], tokens) > 1e-3


def test_the_tests_above_notice_a_biased_and_a_repeating_source(by_position: torch.Tensor) -> None:
    assert fits(torch.where(by_position == 4, 0, by_position)) < 1e-9
    repeating = torch.where(torch.arange(DRAWS) % 10 == 0, by_position.roll(1), by_position)
    assert independent(by_position.roll(1), repeating) < 1e-9


def test_uniforms_for_acceptance_are_uniform_and_independent_of_the_token_drawn(by_position: torch.Tensor) -> None:
    values = torch.tensor([uniform(noise_key(42, 0, position, Purpose.ACCEPT)) for position in range(DRAWS // 10)])
    assert values.min() > 0 and values.max() < 1
    bins = (values * 20).long()
    assert surprise(torch.bincount(bins, minlength=20).double(), torch.full((20,), DRAWS / 200)) > 1e-3
    assert abs(torch.corrcoef(torch.stack([values, by_position[: DRAWS // 10].float()]))[0, 1]) < 0.015


def test_the_hash_is_splitmix64() -> None:
    expected = [-math.log(-math.log1p(-(word + 0.5) * 2.0**-64)) for word in SPLITMIX]
    assert gumbel_of(1234567, torch.arange(5)).tolist() == pytest.approx(expected, rel=1e-12)


def test_selected_ids_get_the_noise_that_they_have_in_the_full_vocabulary() -> None:
    key = noise_key(7, 0, 3, Purpose.TOKEN)
    ids = torch.tensor([5, 0, 49151, 77])
    assert torch.equal(gumbel(key, 49152, CPU)[ids], gumbel_of(key, ids))


def test_large_noise_is_finely_resolved_so_rare_tokens_are_reached() -> None:
    noise = gumbel(noise_key(1, 0, 0, Purpose.TOKEN), 4_000_000, CPU)
    large = noise[noise > 9]
    expected = 4_000_000 * -math.expm1(-math.exp(-9))
    assert abs(len(large) - expected) < 5 * expected**0.5
    assert len(large.unique()) == len(large)
    # What 24-bit uniforms, as of float32, would have given: few values, hence ties and a hard upper end.
    coarse = (-((-(-noise).exp()).expm1())).mul(2**24).round() / 2**24
    assert len(coarse[noise > 9].unique()) < len(large)
    assert noise.isfinite().all()


def test_the_extreme_hashes_give_finite_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    words = torch.tensor([0, -1, 2**63 - 1, -(2**63)])
    monkeypatch.setattr("proa.kernels.reference.noise._mix_tensor", lambda _: words)
    lowest, highest, upper_half, lower_half = gumbel_of(0, torch.arange(4)).tolist()
    assert lowest == pytest.approx(65 * math.log(2))
    assert highest == pytest.approx(-math.log(53 * math.log(2)))
    assert upper_half == pytest.approx(lower_half) == pytest.approx(-math.log(math.log(2)))


def test_the_floor_of_a_uniform_is_what_its_gumbel_noise_is_made_of_cut_to_31_bits() -> None:
    ids = np.arange(70_000)  # three blocks
    for key in (0, 1, 2**63, 2**64 - 1, 0x1234567890ABCDEF):
        noise = gumbel(key, ids.size, torch.device("cpu"))
        uniforms = -torch.expm1(-torch.exp(-noise))
        floors = torch.from_numpy(uniform_floors(key, ids)).double()
        assert (floors <= uniforms * (1 + 1e-7) + 1e-15).all()
        assert (floors >= uniforms - 2.0**-31 - 1e-7 * uniforms - 1e-15).all()
        some = torch.from_numpy(uniform_floors(key, ids[3:60_000:7])).double()
        assert torch.equal(some, floors[3:60_000:7])
