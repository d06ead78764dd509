"""Whether something proposes, and how: every combination of ask and draft checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from proa.conditions import Condition, Source, evaluate
from proa.errors import PlanError
from proa.plan.rules.speculative import NEXTN
from proa.units import Algorithm, Verification
from tests.factories.headers import asked, planned, write_tiny_headers


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_headers(tmp_path_factory.mktemp("speculative") / "llama", "llama")


@pytest.mark.parametrize(
    ("ask", "has_draft", "value", "source"),
    [
        (None, False, Algorithm.NONE, Source.CONSTRAINT),
        (None, True, Algorithm.STANDALONE, Source.CHECKPOINT),
        ("none", False, Algorithm.NONE, Source.ASKED),
        ("ngram", False, Algorithm.NGRAM, Source.ASKED),
        ("standalone", True, Algorithm.STANDALONE, Source.ASKED),
    ],
)
def test_the_algorithm_follows_the_ask_and_the_files(
    llama: Path, ask: str | None, has_draft: bool, value: Algorithm, source: Source
) -> None:
    settings = {} if ask is None else {"speculative": ask}
    plans = planned(llama, draft=llama if has_draft else None, **settings).plans
    assert (plans.speculative.value, plans.speculative.source) == (value, source)
    assert (plans.draft is not None) is has_draft
    assert (plans.contract is None) is (value is Algorithm.NONE)
    assert plans.contract is None or plans.contract.algorithm is value


@pytest.mark.parametrize(
    ("ask", "has_draft", "says"),
    [
        ("none", True, "contradiction"),
        ("ngram", True, "contradiction"),
        ("standalone", False, "no draft checkpoint was given"),
        ("nextn", False, "checkpoints of the llama family bundle no nextn draft"),
        ("nextn", True, "checkpoints of the llama family bundle no nextn draft"),
        ("eagle3", True, "comes later"),
        ("dflash", True, "comes later"),
        ("dspark", False, "comes later"),
    ],
)
def test_what_cannot_be_is_refused_by_name(llama: Path, ask: str, has_draft: bool, says: str) -> None:
    with pytest.raises(PlanError, match=f"speculative = {ask}") as caught:
        planned(llama, draft=llama if has_draft else None, flags={"--speculative": ask})
    assert says in str(caught.value) and "--speculative" in str(caught.value)
    assert (caught.value.slug, caught.value.exit_code) == ("plan/refused", 2)


BUNDLE: dict[str, Any] = {
    "bundle.family": "glm4_moe",
    "bundle.known": ["nextn"],
    "bundle.announced": ["nextn"],
    "bundle.stored": ["nextn"],
    "bundle.dspark_keys": [],
}
BUNDLE_BREAKS: dict[str, dict[str, Any]] = {
    "speculative.nextn.dspark": {"bundle.dspark_keys": ["dspark_block_size"]},
    "speculative.nextn.family": {"bundle.known": [], "bundle.announced": [], "bundle.stored": []},
    "speculative.nextn.announced": {"bundle.announced": [], "bundle.stored": []},
    "speculative.nextn.stored": {"bundle.stored": []},
}


@pytest.mark.parametrize("condition", NEXTN, ids=lambda condition: condition.id)
def test_every_condition_of_a_bundled_draft_can_hold_and_can_fail(condition: Condition) -> None:
    assert [v.condition.id for v in evaluate(NEXTN, BUNDLE) if v.blocked] == []
    assert [v.condition.id for v in evaluate(NEXTN, BUNDLE | BUNDLE_BREAKS[condition.id]) if v.blocked] == [
        condition.id
    ]


def test_a_draft_path_contradicts_none_even_before_its_checkpoint_is_opened(llama: Path) -> None:
    from proa.checkpoint.open import open_checkpoint
    from proa.plan.resolve import resolve
    from tests.factories.headers import LAPTOP

    with pytest.raises(PlanError, match="contradiction"):
        resolve(asked(llama, draft="x", speculative="none"), open_checkpoint(llama), None, LAPTOP)


@pytest.mark.parametrize(("ask", "has_draft", "length"), [("standalone", True, 7), ("ngram", False, 15)])
def test_the_length_of_a_proposal_has_a_default_with_a_reason(
    llama: Path, ask: str, has_draft: bool, length: int
) -> None:
    contract = planned(llama, draft=llama if has_draft else None, speculative=ask).plans.contract
    assert contract is not None
    assert (contract.num_draft_tokens.value, contract.num_draft_tokens.source) == (length, Source.DEFAULT)
    assert contract.measures_length
    assert contract.num_draft_tokens.reason.startswith("at most; the length of each step follows from measured costs")


@pytest.mark.parametrize("length", [0, 1, 9])
def test_an_asked_length_is_taken_0_included(llama: Path, length: int) -> None:
    contract = planned(llama, speculative="ngram", num_draft_tokens=length).plans.contract
    assert contract is not None
    assert (contract.num_draft_tokens.value, contract.num_draft_tokens.source) == (length, Source.ASKED)
    assert not contract.measures_length


def test_an_asked_length_with_nothing_that_proposes_is_an_error(llama: Path) -> None:
    with pytest.raises(PlanError, match="num_draft_tokens = 4") as caught:
        planned(llama, flags={"--num-draft-tokens": "4"})
    assert caught.value.slug == "plan/nothing-proposes"


def test_speculation_switched_off_by_name_lets_an_asked_length_stand(llama: Path) -> None:
    assert planned(llama, speculative="none", num_draft_tokens=4).plans.contract is None
    assert planned(llama, num_draft_tokens=0).plans.contract is None


def test_verification_is_coupled_unless_asked_otherwise(llama: Path) -> None:
    coupled = planned(llama, speculative="ngram").plans.contract
    rejection = planned(llama, speculative="ngram", verification="rejection").plans.contract
    assert coupled is not None and rejection is not None
    assert (coupled.verification.value, coupled.verification.source) == (Verification.COUPLED, Source.DEFAULT)
    assert (rejection.verification.value, rejection.verification.source) == (Verification.REJECTION, Source.ASKED)


def test_a_setting_that_names_the_draft_without_one_is_an_error(llama: Path) -> None:
    with pytest.raises(PlanError, match=r"--draft\.dtype") as caught:
        planned(llama, flags={"--draft.dtype": "float32"})
    assert caught.value.slug == "plan/no-draft-runner"


def test_a_setting_that_names_no_runner_needs_no_draft(llama: Path) -> None:
    assert planned(llama, flags={"--dtype": "float32"}).draft is None
