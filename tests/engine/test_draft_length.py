"""Measured lengths in the engine: whatever a cost table says, the answers stay, and no page is lost."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proa.kernels.cost import CostTable
from proa.speculative.draft_length import MeasuredLengths, Step, StepCosts
from proa.speculative.drafters.ngram import NgramDrafter
from proa.speculative.drafters.standalone import StandaloneDrafter
from proa.units import Phase, Verification
from tests.engine.table_model import (
    VOCAB,
    Broken,
    GuessingDrafter,
    TableRunner,
    check_empty,
    expected,
    finish,
    make_engine,
    request,
    run,
    tokens_of,
)

STEEP = CostTable(rows=(1, 64), seconds=(1.0, 64.0))
TABLES = {
    "flat": CostTable(rows=(1, 64), seconds=(1.0, 1.0)),
    "native": CostTable(rows=(1, 4, 8, 32), seconds=(1.0, 1.1, 1.3, 2.8)),
    "steep": STEEP,
}
DRAFT = CostTable(rows=(1, 64), seconds=(0.1, 0.2))


def measured(table: CostTable, draft: CostTable | None = None, longest: int = 4, notes: list[str] | None = None):
    costs = StepCosts(target=table, draft=draft)
    note = (lambda text: None) if notes is None else notes.append
    return MeasuredLengths(longest=longest, costs=costs, prior=(0.5, 0.7, 0.9), note=note)


def requests(count: int = 8):
    return [
        request(i, [(5 * i + j) % VOCAB for j in range(1 + 3 * (i % 8))], max_tokens=20, temperature=0.8 * (i % 2))
        for i in range(count)
    ]


def standalone(draft: TableRunner, verification: Verification = Verification.COUPLED) -> StandaloneDrafter:
    return StandaloneDrafter(
        runner=draft, max_tokens=4, draft_vocab=VOCAB, vocab=VOCAB, prefill_chunk=7, verification=verification
    )


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("skill", [0.0, 0.6, 1.0])
def test_answers_are_those_of_plain_decoding_whatever_the_costs(table: str, skill: float) -> None:
    runner = TableRunner(num_pages=200, page_size=4)
    engine = make_engine(runner, drafter=GuessingDrafter(max_tokens=4, skill=skill), lengths=measured(TABLES[table]))
    asked = requests()
    assert tokens_of(run(engine, asked)) == {one.request_id: expected(one) for one in requests()}
    check_empty(runner)
    verified = any(span.phase is Phase.VERIFY for spans in runner.forwards for span in spans)
    assert verified == (table != "steep")


@pytest.mark.parametrize("weights", [0, 7])
@pytest.mark.parametrize("table", TABLES)
def test_a_draft_model_runs_only_as_far_as_its_proposals_are_wanted(table: str, weights: int) -> None:
    runner, draft = TableRunner(num_pages=200, page_size=4), TableRunner(num_pages=200, page_size=4, weights=weights)
    engine = make_engine(runner, draft=draft, drafter=standalone(draft), lengths=measured(TABLES[table], DRAFT))
    assert tokens_of(run(engine, requests())) == {one.request_id: expected(one) for one in requests()}
    check_empty(runner, draft)
    assert bool(draft.num_forwards) == (table != "steep")


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 60), max_size=5),
    st.sampled_from(list(TABLES)),
    st.booleans(),
    st.sampled_from([Verification.COUPLED, Verification.REJECTION]),
)
def test_a_step_that_fails_is_repeated_with_the_same_lengths(fails_at, table, has_model, verification) -> None:
    """Under rejection another length would draw another token, which the engine refuses to emit."""
    runner = TableRunner(num_pages=200, page_size=4, fails_at=fails_at)
    draft = TableRunner(num_pages=200, page_size=4, weights=7)
    drafter = standalone(draft, verification) if has_model else NgramDrafter(max_tokens=4, min_match=1, max_match=8)
    lengths = measured(TABLES[table], DRAFT if has_model else None)
    engine = make_engine(
        runner, draft=draft if has_model else None, drafter=drafter, lengths=lengths, verification=verification
    )
    for one in requests(4):
        engine.add(one)
    outputs: dict[int, list[int]] = {}
    while engine.has_work:
        try:
            for output in engine.step():
                outputs.setdefault(output.request_id, []).extend(output.tokens)
        except Broken:
            continue
    if verification is Verification.COUPLED:
        assert outputs == {one.request_id: expected(one) for one in requests(4)}
    else:
        assert all(len(outputs[one.request_id]) == 20 for one in requests(4))
    check_empty(runner, draft)


def test_the_policy_is_told_of_all_rows_of_the_step() -> None:
    seen: list[Step] = []

    class Noting(MeasuredLengths):
        def limits(self, useful: Mapping[int, int], step: Step) -> dict[int, int]:
            seen.append(step)
            return super().limits(useful, step)

    lengths = Noting(longest=4, costs=StepCosts(target=STEEP, draft=None), prior=(0.5,), note=lambda text: None)
    runner = TableRunner(num_pages=200, page_size=4)
    engine = make_engine(runner, drafter=GuessingDrafter(max_tokens=4), lengths=lengths, prefill_chunk=5)
    engine.add(request(0, [1, 2, 3], max_tokens=6))
    engine.step()
    engine.add(request(1, [1] * 12, max_tokens=6))
    finish(engine)
    assert [(step.decoding, step.prefill) for step in seen[:5]] == [(0, 3), (1, 5), (1, 5), (1, 2), (2, 0)]


def test_finished_requests_are_forgotten_and_losses_are_told_once() -> None:
    notes: list[str] = []
    lengths = measured(TABLES["steep"], notes=notes)
    engine = make_engine(
        TableRunner(num_pages=400, page_size=4), drafter=GuessingDrafter(max_tokens=4, skill=0.0), lengths=lengths
    )
    run(engine, requests(24))
    assert [note.partition(":")[0] for note in notes] == ["speculative/does-not-pay"]
    zeros, *others = engine.lengths.metrics()["histogram"]
    assert zeros > 64 and not any(others)
    assert not lengths._tracks and not lengths._chosen
