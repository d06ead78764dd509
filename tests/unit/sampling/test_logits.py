"""The sampling pipeline against a slow definition, token by token in plain Python floats."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from proa.sampling.logits import process
from proa.sampling.params import SamplingParams
from proa.sampling.sampler import total_order
from proa.sampling.state import SamplingRow, SamplingState

V = 9
NEVER = -math.inf

# Values of few bits and bounds that no sum of them meets, so that float32 and float64 decide alike.
quarters = st.integers(-12, 12).map(lambda count: count / 4)
tokens = st.lists(st.integers(0, V - 1), max_size=6)


@st.composite
def sampling_rows(draw: st.DrawFn) -> SamplingRow:
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.5, 0.8, 1.0, 2.0])),
        # Powers of two: no product is rounded, so what ties in float32 ties in the slow definition too.
        repetition_penalty=draw(st.sampled_from([0.5, 1.0, 1.0, 2.0, 4.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.25, -0.5])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 0.75, -1.0])),
        logit_bias=draw(st.dictionaries(st.integers(0, V - 1), quarters, max_size=3)),
        allowed_token_ids=draw(st.none() | st.lists(st.integers(2, V - 1), min_size=1)),
        min_tokens=draw(st.integers(0, 4)),
        top_k=draw(st.sampled_from([0, 0, -1, 1, 3, 6, V + 4])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.13, 0.41, 0.77, 0.995])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.07, 0.33, 0.8])),
    )
    state = SamplingState(
        params=params,
        seed=0,
        choice=0,
        prompt=draw(tokens),
        stop_ids=draw(st.frozensets(st.integers(0, 1))),
        bad_sequences=tuple(
            draw(st.lists(st.lists(st.integers(0, V - 1), min_size=1, max_size=3).map(tuple), max_size=3))
        ),
    )
    return SamplingRow(state=state, output=draw(tokens))


def slowly(logits: list[float], row: SamplingRow) -> list[float]:
    state, params, values = row.state, row.state.params, list(logits)
    for token in range(V):
        if token in state.prompt or token in row.output:
            factor = params.repetition_penalty
            values[token] = values[token] / factor if values[token] > 0 else values[token] * factor
        values[token] -= params.frequency_penalty * list(row.output).count(token)
        values[token] -= params.presence_penalty * (token in row.output)
        values[token] += params.logit_bias.get(token, 0.0)
    for token in range(V):
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            values[token] = NEVER
        if token in state.stop_ids and len(row.output) < params.min_tokens:
            values[token] = NEVER
    banned = set()
    for *prefix, last in state.bad_sequences:
        if not prefix or list(row.output)[-len(prefix) :] == prefix:
            banned.add(last)
    if any(value > NEVER for token, value in enumerate(values) if token not in banned):
        values = [NEVER if token in banned else value for token, value in enumerate(values)]
    if params.temperature == 0:
        return values
    values = [value / params.temperature for value in values]
    order = sorted((token for token in range(V) if values[token] > NEVER), key=lambda token: (-values[token], token))
    if params.top_k > 0:
        order = order[: params.top_k]
    weight = {token: math.exp(values[token] - values[order[0]]) for token in order}
    nucleus, mass = [], 0.0
    for token in order:
        if mass >= params.top_p * sum(weight.values()) and params.top_p < 1:
            break
        nucleus.append(token)
        mass += weight[token]
    kept = [token for token in nucleus if weight[token] >= params.min_p]
    return [values[token] if token in kept else NEVER for token in range(V)]


def normalised(values: list[float]) -> list[float]:
    total = math.log(sum(math.exp(value) for value in values))
    return [value - total for value in values]


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(st.lists(quarters, min_size=V, max_size=V), sampling_rows()), min_size=1, max_size=4))
def test_every_row_is_what_the_slow_definition_says(batch: list) -> None:
    logits = torch.tensor([values for values, _ in batch])
    before = logits.clone()
    processed = [process(raw, row) for raw, (_, row) in zip(logits, batch, strict=True)]
    assert torch.equal(logits, before)
    for got, (values, row) in zip(processed, batch, strict=True):
        wanted = slowly(values, row)
        assert [value > NEVER for value in got.tolist()] == [value > NEVER for value in wanted]
        assert normalised(got.tolist()) == pytest.approx(normalised(wanted), abs=1e-5)


def row(prompt: list[int] | None = None, output: list[int] | None = None, **changes) -> SamplingRow:
    fields = {name: changes.pop(name) for name in ("stop_ids", "bad_sequences") if name in changes}
    state = SamplingState(
        **{
            "params": SamplingParams(**changes),
            "seed": 0,
            "choice": 0,
            "prompt": prompt or [],
            "stop_ids": frozenset(),
            **fields,
        }
    )
    return SamplingRow(state=state, output=output or [])


def kept(logits: torch.Tensor, one: SamplingRow) -> list[int]:
    return (process(logits, one) > NEVER).nonzero().squeeze(1).tolist()


def test_ties_at_every_filter_go_to_the_lower_ids() -> None:
    flat = torch.zeros(3000)
    assert kept(flat, row(top_k=7)) == list(range(7))
    assert kept(flat, row(top_p=0.0101)) == list(range(31))
    assert kept(flat, row(top_p=0.5)) == list(range(1500))
    flat[2999] = 1.0
    assert kept(flat, row(top_k=3)) == [0, 1, 2999]


def test_top_p_is_the_same_whether_the_head_of_the_order_suffices_or_not() -> None:
    generator = torch.Generator().manual_seed(3)
    for spread in (0.3, 2.0, 6.0):
        logits = torch.randn(4096, generator=generator) * spread
        weights = logits.double().softmax(0)
        for top_p in (0.2, 0.9, 0.999):
            order = sorted(range(4096), key=lambda token: (-logits[token].item(), token))
            mass, wanted = 0.0, []
            for token in order:
                if mass >= top_p:
                    break
                wanted.append(token)
                mass += weights[token].item()
            assert kept(logits, row(top_p=top_p)) == sorted(wanted)


def test_a_tiny_temperature_neither_overflows_nor_loses_the_best_token() -> None:
    processed = process(torch.tensor([1e4, 2e4, -1e4]), row(temperature=1e-40))
    assert processed.tolist() == [NEVER, 0.0, NEVER]


def test_tokens_beyond_the_vocabulary_of_a_smaller_draft_are_ignored() -> None:
    one = row([1, 70], [80, 2], repetition_penalty=2.0, presence_penalty=1.0, logit_bias={3: 1.0, 90: 5.0},
              allowed_token_ids=[1, 2, 3, 99], stop_ids=frozenset({70, 3}), min_tokens=5)  # fmt: skip
    known = row([1], [4, 2], repetition_penalty=2.0, presence_penalty=1.0, allowed_token_ids=[1, 2])
    assert process(torch.ones(5), one).softmax(0).tolist() == process(torch.ones(5), known).softmax(0).tolist()


def test_nothing_left_to_sample_is_not_a_number_nowhere() -> None:
    processed = process(torch.zeros(4), row(allowed_token_ids=[7], top_p=0.5, top_k=2, min_p=0.1))
    assert processed.tolist() == [NEVER] * 4


def test_the_total_order_lists_the_ties_of_its_last_entry_and_no_masked_token() -> None:
    values = torch.tensor([1.0, 3.0, NEVER, 1.0, 2.0, 1.0])
    assert total_order(values, 1).tolist() == [1]
    assert total_order(values, 3).tolist() == [1, 4, 0, 3, 5]
    assert total_order(values, 6).tolist() == [1, 4, 0, 3, 5]


@pytest.mark.oracle
def test_the_filters_agree_with_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers", reason="the extra `oracle` is not installed")
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 500, generator=generator) * 3
    prompt = [3, 5, 5, 100]
    expected = transformers.RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([prompt]), logits.clone())
    for warper in (
        transformers.TemperatureLogitsWarper(0.7),
        transformers.TopKLogitsWarper(120),
        transformers.TopPLogitsWarper(0.9),
        transformers.MinPLogitsWarper(0.02),
    ):
        expected = warper(None, expected)
    one = row(prompt, [], repetition_penalty=1.3, temperature=0.7, top_k=120, top_p=0.9, min_p=0.02)
    torch.testing.assert_close(process(logits[0], one).softmax(-1), expected[0].softmax(-1))


def test_the_total_order_of_a_large_row_is_the_head_of_its_full_sort() -> None:
    generator = torch.Generator().manual_seed(4)
    for values in (torch.randn(50_000, generator=generator), torch.randn(50_000, generator=generator).mul(3).round()):
        values[torch.rand(50_000, generator=generator) < 0.3] = -math.inf
        ranked = [index for _, index in sorted((-value, index) for index, value in enumerate(values.tolist()))]
        for at_least in (1, 40, 1024, 20_000):
            found = total_order(values, at_least).tolist()
            assert found == ranked[: len(found)]
            assert len(found) >= at_least
            rest = values[ranked[len(found)]]
            assert rest == -math.inf or rest < values[found[at_least - 1]]
