"""Drawing tokens and reading log probabilities."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from proa.kernels.reference import sample as reference
from proa.kernels.reference.noise import gumbel
from proa.kernels.reference.sample import ReferenceSample
from proa.sampling.noise import Purpose, noise_key
from proa.sampling.params import SamplingParams
from proa.sampling.sampler import draw, logprobs, sample
from proa.sampling.state import SamplingRow, SamplingState


def row(temperature: float, *, seed: int = 5, choice: int = 0, output: tuple[int, ...] = ()) -> SamplingRow:
    params = SamplingParams(temperature=temperature)
    state = SamplingState(params=params, seed=seed, choice=choice, prompt=(1, 2), stop_ids=frozenset())
    return SamplingRow(state=state, output=output)


def tokens(logits: torch.Tensor, rows: list[SamplingRow], at: list[int] | None = None) -> list[int]:
    return sample(ReferenceSample(), logits, rows, range(len(rows)) if at is None else at, Purpose.TOKEN)


def test_greedy_rows_take_the_lowest_id_of_the_largest_value_and_leave_the_logits_alone() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0], [3.0, 1.0, 3.0], [-1.0, -1.0, -1.0]])
    before = logits.clone()
    assert tokens(logits, [row(0), row(0), row(0)]) == [1, 0, 0]
    assert tokens(logits, [row(0), row(0)], [2, 0]) == [0, 1]
    assert torch.equal(logits, before)


def test_rows_with_and_without_penalties_are_drawn_in_their_order() -> None:
    """Logits that leave no choice: 3 of row 0, 1 of row 1; a bias makes it 2."""
    logits = torch.tensor([[0.0, 0.0, 0.0, 900.0], [0.0, 900.0, 0.0, 0.0]])
    state = SamplingState(
        params=SamplingParams(logit_bias={2: 100.0, 3: -100.0}), seed=1, choice=0, prompt=(0,), stop_ids=frozenset()
    )
    biased = SamplingRow(state=state, output=())
    assert tokens(logits, [row(1), biased, row(0), biased], [0, 1, 1, 0]) == [3, 1, 1, 3]
    assert tokens(logits / 20, [biased, row(1), biased], [1, 1, 0]) == [2, 1, 2]


def test_a_row_knows_its_position_by_output_and_proposed_tokens_together() -> None:
    whole, split = row(1, output=(3, 4, 5)), SamplingRow(state=row(1).state, output=(3,), proposed=(4, 5))
    assert (split.position, split.num_output, list(split.tokens)) == (5, 3, [3, 4, 5])
    logits = torch.randn(1, 500, generator=torch.Generator().manual_seed(0))
    assert tokens(logits, [split]) == tokens(logits, [whole])


def test_a_token_does_not_depend_on_its_batch_and_changes_with_seed_choice_and_position() -> None:
    logits = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    rows = [row(1), row(1, seed=6), row(1, choice=1), row(1, output=(3,)), row(0)]
    drawn = tokens(torch.stack([logits] * 5), rows)
    assert len(set(drawn)) == 5
    assert [tokens(logits[None], [one])[0] for one in rows] == drawn
    # Not what the output holds, only how long it is.
    assert tokens(logits[None], [row(1, output=(4,))])[0] == drawn[3]


def test_the_draw_is_the_argmax_with_the_noise_of_the_position_that_the_token_takes() -> None:
    logits = torch.randn(100, generator=torch.Generator().manual_seed(1))
    one = row(1, output=(7, 7, 7))
    noise = gumbel(noise_key(5, 0, 5, Purpose.TOKEN), 100, torch.device("cpu"))
    assert draw(logits, one, Purpose.TOKEN) == int((logits + noise).argmax())


VOCAB = 3 * reference._WORTH_SCREENING


@st.composite
def large_rows(draw_from: st.DrawFn) -> torch.Tensor:
    """Flat, peaked, tied, far from zero, partly masked, float32 or float64: all above the size that is screened."""
    generator = torch.Generator().manual_seed(draw_from(st.integers(0, 2**32)))
    spread = draw_from(st.sampled_from([0.0, 1e-6, 0.1, 3.0, 30.0, 1e4]))
    values = torch.randn(VOCAB, generator=generator) * spread + draw_from(st.sampled_from([0.0, -200.0, 500.0]))
    if draw_from(st.booleans()):
        values = values.round()
    values[torch.rand(VOCAB, generator=generator) < draw_from(st.sampled_from([0.0, 0.2, 0.9]))] = -math.inf
    return values.double() if draw_from(st.booleans()) else values


def full_draw(values: torch.Tensor, seed: int) -> int:
    noise = gumbel(noise_key(seed, 0, 2, Purpose.TOKEN), VOCAB, torch.device("cpu"))
    return int((values + noise).argmax())


@settings(max_examples=300, deadline=None)
@given(values=large_rows(), seed=st.integers(0, 2**64 - 1))
def test_leaving_out_ids_that_cannot_win_gives_the_token_of_the_full_draw(values: torch.Tensor, seed: int) -> None:
    assert draw(values, row(1, seed=seed), Purpose.TOKEN) == full_draw(values, seed)


def test_few_ids_are_left_to_compute_noise_for_whatever_the_shape_of_the_distribution() -> None:
    for spread in (0.0, 0.1, 3.0, 30.0):
        values = (torch.randn(49152, generator=torch.Generator().manual_seed(2)) * spread).numpy()
        left = [reference._may_win(key, np.arange(49152), values).size for key in range(50)]
        assert min(left) >= 1
        assert sum(left) / 50 < 50


def test_a_screen_that_is_too_narrow_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_SLACK", -20.0)
    values = torch.randn(VOCAB, generator=torch.Generator().manual_seed(3))
    with pytest.raises((AssertionError, ValueError)):
        for seed in range(50):
            assert draw(values, row(1, seed=seed), Purpose.TOKEN) == full_draw(values, seed)


def test_masked_tokens_are_never_drawn_and_the_others_keep_their_noise() -> None:
    logits = torch.zeros(50)
    logits[3:40] = -math.inf
    drawn = {draw(logits, row(1, seed=seed), Purpose.TOKEN) for seed in range(300)}
    assert drawn == {0, 1, 2, *range(40, 50)}
    for seed in range(50):
        with_all = draw(torch.zeros(50), row(1, seed=seed), Purpose.TOKEN)
        if not 3 <= with_all < 40:
            assert draw(logits, row(1, seed=seed), Purpose.TOKEN) == with_all


def test_a_row_with_nothing_to_draw_gives_token_0() -> None:
    assert draw(torch.full((4,), -math.inf), row(1), Purpose.TOKEN) == 0


def test_logprobs_are_of_the_raw_logits_with_ranks_in_the_total_order() -> None:
    raw = torch.tensor([1.0, 3.0, 2.0, 3.0, 0.0])
    total = math.log(sum(math.exp(value) for value in raw.tolist()))
    entry = logprobs(raw, 2, 2)
    assert (entry.token, entry.rank) == (2, 3)
    assert entry.logprob == pytest.approx(2 - total)
    assert [token for token, _ in entry.top] == [1, 3]
    assert [value for _, value in entry.top] == pytest.approx([3 - total] * 2)
    assert [logprobs(raw, token, 0).rank for token in range(5)] == [4, 1, 3, 2, 5]


def test_logprobs_zero_is_the_token_alone_and_minus_one_the_whole_vocabulary() -> None:
    raw = torch.tensor([1.0, 3.0, 2.0])
    assert logprobs(raw, 0, 0).top == ()
    assert [token for token, _ in logprobs(raw, 0, -1).top] == [1, 2, 0]
    assert [token for token, _ in logprobs(raw, 0, 20).top] == [1, 2, 0]
