"""Native sampling gives the reference's own tokens, and leaves to it only what rounding could decide."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from proa.kernels.native.abi import load_library
from proa.kernels.native.sample import UNDECIDED, NativeSample
from proa.kernels.native.sink import Direct
from proa.kernels.reference.noise import GAMMA, MASK, gumbel_of, mix
from proa.kernels.reference.sample import ReferenceSample, token_of
from proa.kernels.seam import Draw
from tests.factories.native import probed, why_not

FOUND = probed()
WHY_NOT = why_not(FOUND)
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))


@pytest.fixture(scope="module")
def native() -> NativeSample:
    return NativeSample(Direct(load_library(FOUND.library)))


def drawn(row: int = 0, key: int = 1, **changes: float) -> Draw:
    return Draw(row, key, 0, 1.0, 1.0, -math.inf)._replace(**changes)


@st.composite
def rows(draw: st.DrawFn) -> torch.Tensor:
    """[1, V]: flat or peaked, far from zero, with ties, masked ids, and now and then a value that is no number."""
    size = draw(st.sampled_from([1, 2, 15, 16, 17, 100, 513, 3001]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    spread = draw(st.sampled_from([0.0, 1e-6, 0.1, 3.0, 30.0, 1e4, 1e38]))
    values = torch.randn(size, generator=generator) * spread + draw(st.sampled_from([0.0, -200.0, 500.0]))
    if draw(st.booleans()):
        values = values.round()
    values[torch.rand(size, generator=generator) < draw(st.sampled_from([0.0, 0.2, 0.9, 0.9999, 1.0]))] = -math.inf
    odd = draw(st.sampled_from([None] * 12 + [math.nan, math.inf]))
    if odd is not None:
        values[draw(st.integers(0, size - 1))] = odd
    return values[None]


draws = st.builds(
    Draw,
    row=st.just(0),
    key=st.integers(0, 2**64 - 1),
    top_k=st.sampled_from([0, 0, 0, 1, 2, 40, 512, 513, 3000, 3001, 5000]),
    temperature=st.sampled_from([0.0, 1e-40, 1e-3, 0.3, 0.8, 1.0, 1.0, 7.0, 1e30, 1e39]),
    top_p=st.sampled_from([1.0, 1.0, 1.0, 1e-9, 0.1, 0.5, 0.9, 0.99, 1 - 1e-12]),
    floor=st.sampled_from([-math.inf, -math.inf, -math.inf, math.log(0.05), math.log(0.8), 0.0]),
)


@settings(max_examples=400, deadline=None)
@given(logits=rows(), one=draws)
@example(logits=torch.zeros(1, 3000), one=drawn(top_p=0.5))
@example(logits=torch.full((1, 40), -math.inf), one=drawn(top_k=3))
@example(logits=torch.tensor([[0.0, math.nan, 5.0]]), one=drawn(temperature=0.0))
@example(logits=torch.tensor([[-math.inf] * 20 + [-7.0]]), one=drawn(top_p=0.3, top_k=1))
def test_every_token_is_the_one_of_the_definition(native: NativeSample, logits: torch.Tensor, one: Draw) -> None:
    before = logits.clone()
    with np.errstate(all="ignore"):
        expected = token_of(logits[0].numpy(), one)
        assert native.decided(logits, [one])[0] in (expected, UNDECIDED)
        assert native.sample(logits, [one]) == ReferenceSample().sample(logits, [one]) == [expected]
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())


FILTERS = {
    "temperature": {},
    "top_k": {"top_k": 40},
    "top_p": {"top_p": 0.9},
    "narrow top_p": {"top_p": 0.05},
    "min_p": {"floor": math.log(0.05)},
    "top_k and top_p": {"top_k": 20, "top_p": 0.95},
    "wide top_k and top_p": {"top_k": 4000, "top_p": 0.95},
}


@pytest.mark.parametrize("spread", [0.1, 2.5, 8.0])
@pytest.mark.parametrize("name", FILTERS)
def test_rows_of_a_real_vocabulary_are_decided_without_the_reference(
    native: NativeSample, name: str, spread: float
) -> None:
    logits = torch.randn(8, 49152, generator=torch.Generator().manual_seed(3)) * spread
    asked = [drawn(row, 1000 * row + key, **FILTERS[name]) for row in range(8) for key in range(40)]
    tokens = native.decided(logits, asked)
    assert tokens.count(UNDECIDED) <= 2
    checked = range(0, len(asked), 5)
    expected = [token_of(logits[asked[index].row].numpy(), asked[index]) for index in checked]
    assert all(tokens[index] in (token, UNDECIDED) for index, token in zip(checked, expected, strict=True))


def test_a_row_gives_its_token_in_any_batch_on_any_number_of_threads_and_as_part_of_a_longer_row(
    native: NativeSample,
) -> None:
    logits = torch.randn(9, 1003, generator=torch.Generator().manual_seed(4))
    asked = [drawn(index % 9, index, temperature=index % 3 / 2, top_p=0.9) for index in range(60)]
    alone = [native.sample(logits[one.row : one.row + 1], [one._replace(row=0)])[0] for one in asked]
    threads = torch.get_num_threads()
    try:
        for team in (1, 2, 5):
            torch.set_num_threads(team)
            assert native.sample(logits, asked) == alone
    finally:
        torch.set_num_threads(threads)
    assert native.sample(torch.cat((logits, logits + 9), dim=1)[:, :1003], asked) == alone


def key_that_gives(bits: int, token: int) -> int:
    """The key under which a token's hash is `bits`: SplitMix64's finaliser undone step by step."""

    def unshift(word: int, count: int) -> int:
        restored = word
        for _ in range(64 // count):
            restored = word ^ (restored >> count)
        return restored

    word = unshift(bits, 31) * pow(0x94D049BB133111EB, -1, 2**64) & MASK
    word = unshift(word, 27) * pow(0xBF58476D1CE4E5B9, -1, 2**64) & MASK
    key = (unshift(word, 30) - (token + 1) * GAMMA) & MASK
    assert mix((key + (token + 1) * GAMMA) & MASK) == bits
    return key


@pytest.mark.parametrize(("bits", "behind", "wins"), [(0, 35.0, True), (0, 70.0, False), (2**30, 14.0, True)])
def test_an_unlikely_token_with_enormous_noise_wins_where_it_should(
    native: NativeSample, bits: int, behind: float, wins: bool
) -> None:
    """Noise of up to 45.1: -log of (bits + 1/2) / 2^64. The screen must not pass over such a token."""
    key = key_that_gives(bits, 700)
    noise = float(gumbel_of(key, torch.tensor([700]))[0])
    assert noise == pytest.approx(-math.log((bits + 0.5) / 2**64), rel=1e-9)
    logits = torch.full((1, 1000), -90.0)
    logits[0, 3], logits[0, 700] = 0.0, -behind
    one = drawn(key=key)
    assert native.decided(logits, [one]) == [700 if wins else 3] == [token_of(logits[0].numpy(), one)]


def test_a_tie_of_scores_is_left_to_the_reference(native: NativeSample) -> None:
    """Of 3000 ids, the one whose lead in noise over id 0 float32 can express best, set back by just that."""
    noise = gumbel_of(5, torch.arange(3000))
    lead = noise - noise[0]
    lead[lead <= 0] = 1e9
    tied = int((lead - lead.float().double()).abs().masked_fill(lead > 1e8, 1).argmin())
    assert abs(lead[tied] - lead[tied].float().double()) < 1e-9
    logits = torch.full((1, 3000), -90.0)
    logits[0, 0], logits[0, tied] = 0.0, -lead[tied].float()
    assert native.decided(logits, [drawn(key=5)]) == [UNDECIDED]
    assert native.sample(logits, [drawn(key=5)]) == [token_of(logits[0].numpy(), drawn(key=5))]
    logits[0, tied] += 1e-5
    assert native.decided(logits, [drawn(key=5)]) == [tied]
