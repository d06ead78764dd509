"""Which drafter a contract gives."""

from __future__ import annotations

from typing import Any

import pytest

from proa.arch.decoder import HiddenTap, TapPoint
from proa.cache.pages import PagePool
from proa.cache.tables import BlockTables
from proa.choice import AUTO
from proa.conditions import Source
from proa.errors import PlanError
from proa.kernels.cost import CostTable
from proa.kernels.reference.sample import ReferenceSample
from proa.plan.decision import Decision
from proa.plan.runner_plan import DraftContract, PairCheck
from proa.sampling.params import SamplingParams
from proa.speculative.draft_length import FixedLengths, MeasuredLengths
from proa.speculative.drafters.nextn import NextNDrafter
from proa.speculative.drafters.ngram import NgramDrafter
from proa.speculative.drafters.standalone import StandaloneDrafter
from proa.speculative.drift import AcceptWatch
from proa.speculative.protocol import DraftContext, DraftRequest
from proa.speculative.registry import (
    PRIORS,
    build_drafter,
    build_lengths,
    build_watch,
    draft_gives_hidden,
    target_gives_hidden,
)
from proa.units import Algorithm, Verification
from tests.speculative.worlds import state


class Draft:
    tables = BlockTables(PagePool(1), 1)
    states = None
    kernels = ReferenceSample()


TABLE = CostTable(rows=(1,), seconds=(1.0,))


def contract(algorithm: Algorithm, length: int = 5, *, measured: bool = True) -> DraftContract:
    def decided(knob: str, value: Any) -> Decision:
        return Decision(
            knob=knob, value=value, requested=AUTO, source=Source.DEFAULT, rule="test", reason="", inputs={},
            rejected=(), notes=(),
        )  # fmt: skip

    return DraftContract(
        algorithm=algorithm,
        num_draft_tokens=decided("num_draft_tokens", length),
        measures_length=measured,
        verification=decided("verification", Verification.COUPLED),
        draft_vocab=10,
        checks=PairCheck(verdicts=(), notes=()),
        taps=(HiddenTap(point=TapPoint.NORMED, width=8),) if algorithm is Algorithm.NEXTN else (),
    )


@pytest.mark.parametrize(
    ("algorithm", "kind", "needs_hidden"),
    [
        (Algorithm.NGRAM, NgramDrafter, False),
        (Algorithm.STANDALONE, StandaloneDrafter, False),
        (Algorithm.NEXTN, NextNDrafter, True),
    ],
)
def test_a_contract_gives_its_drafter_with_its_longest_proposal(
    algorithm: Algorithm, kind: type, needs_hidden: bool
) -> None:
    drafter = build_drafter(contract(algorithm), draft=Draft(), vocab=10, prefill_chunk=8)
    assert isinstance(drafter, kind)
    assert drafter.max_tokens == 5
    assert drafter.needs_hidden == needs_hidden


@pytest.mark.parametrize("kind", [NgramDrafter, StandaloneDrafter])
def test_a_drafter_that_needs_no_hidden_rows_takes_them_without_a_trace(kind: type) -> None:
    algorithm = Algorithm.NGRAM if kind is NgramDrafter else Algorithm.STANDALONE
    drafter = build_drafter(contract(algorithm), draft=Draft(), vocab=10, prefill_chunk=8)
    assert drafter is not None and drafter.observe([]) is None


def test_hidden_rows_are_given_by_a_target_whose_drafter_reads_them_and_by_a_draft_that_goes_on_from_its_own() -> None:
    longer, single = contract(Algorithm.NEXTN, 3), contract(Algorithm.NEXTN, 1)
    assert (target_gives_hidden(longer), draft_gives_hidden(longer)) == (True, True)
    assert (target_gives_hidden(single), draft_gives_hidden(single)) == (True, False)
    for nobody in (None, contract(Algorithm.NGRAM), contract(Algorithm.STANDALONE)):
        assert not target_gives_hidden(nobody) and not draft_gives_hidden(nobody)


def test_the_accept_length_is_watched_where_a_model_drafts() -> None:
    def watch(of: DraftContract | None) -> AcceptWatch | None:
        return build_watch(of, note=lambda text: None)

    assert all(watch(contract(algorithm)) for algorithm in (Algorithm.STANDALONE, Algorithm.NEXTN))
    assert not any(watch(of) for of in (None, contract(Algorithm.NONE), contract(Algorithm.NGRAM)))


def test_next_token_layers_begin_with_the_acceptance_that_their_makers_published() -> None:
    one, two, three, *_ = PRIORS[Algorithm.NEXTN]
    expected = [1 + one, 1 + one + one * two, 1 + one + one * two + one * two * three]
    assert expected == pytest.approx([1.85, 2.5, 2.9], abs=0.02)


def test_without_a_contract_nobody_proposes() -> None:
    assert build_drafter(None, draft=None, vocab=10, prefill_chunk=8) is None
    assert build_drafter(contract(Algorithm.NONE), draft=None, vocab=10, prefill_chunk=8) is None


@pytest.mark.parametrize("algorithm", [Algorithm.DSPARK, Algorithm.STANDALONE, Algorithm.NEXTN])
def test_an_algorithm_that_cannot_be_served_is_refused_by_name(algorithm: Algorithm) -> None:
    with pytest.raises(PlanError, match=f"speculative/no-drafter.*{algorithm.value}"):
        build_drafter(contract(algorithm), draft=None, vocab=10, prefill_chunk=8)


def build(of: DraftContract | None, costs: dict[str, CostTable]):
    return build_lengths(of, costs, note=lambda text: None)


def test_lengths_are_measured_where_they_were_left_open_and_fixed_where_they_were_asked_for() -> None:
    free = build(contract(Algorithm.NGRAM), {"target": TABLE})
    paired = build(contract(Algorithm.STANDALONE), {"target": TABLE, "draft": TABLE})
    for lengths in (free, paired):
        assert isinstance(lengths, MeasuredLengths) and lengths.metrics()["longest"] == 5
    assert paired.metrics()["costs"]["draft"] == TABLE.digest
    fixed = build(contract(Algorithm.NGRAM, 3, measured=False), {})
    assert isinstance(fixed, FixedLengths) and fixed.metrics()["longest"] == 3
    for nothing in (None, contract(Algorithm.NGRAM, 0, measured=False)):
        assert isinstance(build(nothing, {}), FixedLengths)


def test_lengths_that_follow_from_costs_need_the_target_s() -> None:
    with pytest.raises(KeyError, match="target"):
        build(contract(Algorithm.NGRAM), {})


def test_a_single_token_of_agreement_is_used_only_where_lengths_are_measured() -> None:
    def proposed(of: DraftContract) -> int:
        drafter = build_drafter(of, draft=None, vocab=10, prefill_chunk=8)
        assert drafter is not None
        asked = DraftRequest(request_id=0, tokens=(1, 2, 1), sampling=state(SamplingParams()), limit=2)
        return len(drafter.propose(DraftContext(requests=(asked,))).tokens[0])

    assert (proposed(contract(Algorithm.NGRAM)), proposed(contract(Algorithm.NGRAM, 5, measured=False))) == (2, 0)
