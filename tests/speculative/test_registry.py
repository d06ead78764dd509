"""Which drafter a contract gives."""

from __future__ import annotations

from typing import Any

import pytest

from proa.cache.pages import PagePool
from proa.cache.tables import BlockTables
from proa.choice import AUTO
from proa.conditions import Source
from proa.errors import PlanError
from proa.kernels.cost import CostTable
from proa.plan.decision import Decision
from proa.plan.runner_plan import DraftContract, PairCheck
from proa.sampling.params import SamplingParams
from proa.speculative.draft_length import FixedLengths, MeasuredLengths
from proa.speculative.drafters.ngram import NgramDrafter
from proa.speculative.drafters.standalone import StandaloneDrafter
from proa.speculative.protocol import DraftContext, DraftRequest
from proa.speculative.registry import build_drafter, build_lengths
from proa.units import Algorithm, Verification
from tests.speculative.worlds import state


class Draft:
    tables = BlockTables(PagePool(1), 1)


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
    )


@pytest.mark.parametrize(
    ("algorithm", "kind"), [(Algorithm.NGRAM, NgramDrafter), (Algorithm.STANDALONE, StandaloneDrafter)]
)
def test_a_contract_gives_its_drafter_with_its_longest_proposal(algorithm: Algorithm, kind: type) -> None:
    drafter = build_drafter(contract(algorithm), draft=Draft(), vocab=10, prefill_chunk=8)
    assert isinstance(drafter, kind)
    assert drafter.max_tokens == 5


def test_without_a_contract_nobody_proposes() -> None:
    assert build_drafter(None, draft=None, vocab=10, prefill_chunk=8) is None
    assert build_drafter(contract(Algorithm.NONE), draft=None, vocab=10, prefill_chunk=8) is None


@pytest.mark.parametrize("algorithm", [Algorithm.DSPARK, Algorithm.STANDALONE])
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
