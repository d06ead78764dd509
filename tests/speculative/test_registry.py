"""Which drafter a contract gives."""

from __future__ import annotations

from typing import Any

import pytest

from proa.cache.pages import PagePool
from proa.cache.tables import BlockTables
from proa.choice import AUTO
from proa.conditions import Source
from proa.errors import PlanError
from proa.plan.decision import Decision
from proa.plan.runner_plan import DraftContract, PairCheck
from proa.speculative.drafters.ngram import NgramDrafter
from proa.speculative.drafters.standalone import StandaloneDrafter
from proa.speculative.registry import build_drafter
from proa.units import Algorithm, Verification


class Draft:
    tables = BlockTables(PagePool(1), 1)


def contract(algorithm: Algorithm) -> DraftContract:
    def decided(knob: str, value: Any) -> Decision:
        return Decision(
            knob=knob, value=value, requested=AUTO, source=Source.DEFAULT, rule="test", reason="", inputs={},
            rejected=(), notes=(),
        )  # fmt: skip

    return DraftContract(
        algorithm=algorithm,
        num_draft_tokens=decided("num_draft_tokens", 5),
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
