"""Which drafts may propose for which targets: every condition of the pair check, both ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from proa.conditions import Blocks, Condition
from proa.errors import PlanError
from proa.plan.pair import BUNDLED, STANDALONE, check_pair
from proa.plan.runner_plan import DraftContract
from proa.plan.tokens import TokenTable
from tests.factories.checkpoints import tiny_config
from tests.factories.headers import planned, write_headers, write_tiny_headers
from tests.factories.tokenizer import write_tokenizer


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_headers(tmp_path_factory.mktemp("pair") / "target", "llama")


def contract_of(target: Path, draft: Path, **settings: Any) -> DraftContract:
    contract = planned(target, draft=draft, **settings).plans.contract
    assert contract is not None
    return contract


def test_a_draft_with_the_same_tokens_is_accepted_whatever_its_family(target: Path, tmp_path: Path) -> None:
    contract = contract_of(target, write_tiny_headers(tmp_path / "d", "qwen3", num_hidden_layers=1))
    assert [v.reason for v in contract.checks.verdicts] == [None] * len(STANDALONE)
    assert (contract.draft_vocab, contract.max_positions, contract.checks.notes) == (512, None, ())


@pytest.mark.parametrize("rows", [520, 576])
def test_padding_rows_of_either_side_are_allowed_and_noted(target: Path, tmp_path: Path, rows: int) -> None:
    padded = write_tiny_headers(tmp_path / "d", "qwen2", vocab_size=rows)
    for pair in ((target, padded), (padded, target)):
        contract = contract_of(*pair)
        assert contract.draft_vocab == 512
        assert [note.condition for note in contract.checks.notes] == ["pair.padding"]
        assert str(rows) in contract.checks.notes[0].reason and "512" in contract.checks.notes[0].reason


def test_two_swapped_ids_are_refused_and_the_first_is_named(target: Path, tmp_path: Path) -> None:
    draft = write_tiny_headers(tmp_path / "d", "llama")
    write_tokenizer(draft, texts={400: b"one", 401: b"two"})
    with pytest.raises(PlanError, match="token id 400 is .* in the target and 'one' in the draft") as caught:
        planned(target, draft=draft)
    assert (caught.value.slug, caught.value.role, caught.value.exit_code) == ("plan/pair", "draft", 2)


def test_a_smaller_vocabulary_is_refused_at_its_end_in_both_directions(target: Path, tmp_path: Path) -> None:
    smaller = write_tiny_headers(tmp_path / "d", "llama", vocab_size=500)
    write_tokenizer(smaller, texts={}, size=500)
    with pytest.raises(PlanError, match=r"token id 500 is '.+' in the target and no token in the draft"):
        planned(target, draft=smaller)
    with pytest.raises(PlanError, match=r"token id 500 is no token in the target and '.+' in the draft"):
        planned(smaller, draft=target)


@pytest.mark.parametrize("lacking", ["target", "draft"])
def test_a_checkpoint_without_tokenizer_is_refused_by_role(tmp_path: Path, lacking: str) -> None:
    folders = {
        role: write_headers(tmp_path / role, tiny_config("llama"), has_tokenizer=role != lacking)
        for role in ("target", "draft")
    }
    with pytest.raises(PlanError, match=f"the {lacking} checkpoint has no tokenizer"):
        planned(folders["target"], draft=folders["draft"])


def test_fewer_embedding_rows_than_ids_are_refused(target: Path, tmp_path: Path) -> None:
    draft = write_tiny_headers(tmp_path / "d", "llama", vocab_size=256)
    with pytest.raises(PlanError, match="256 embedding rows for 512 token ids"):
        planned(target, draft=draft)


def test_a_draft_with_a_shorter_context_proposes_only_within_it_and_the_plan_says_so(
    target: Path, tmp_path: Path
) -> None:
    draft = write_tiny_headers(tmp_path / "d", "llama", max_position_embeddings=128)
    contract = contract_of(target, draft)
    assert contract.max_positions == 128
    assert [note.condition for note in contract.checks.notes] == ["pair.context"]
    assert contract_of(target, draft, max_model_len=128).max_positions is None


FACTS: dict[str, Any] = {
    "target.tokens": TokenTable(["a", "b"]),
    "draft.tokens": TokenTable(["a", "b"]),
    "target.vocab": 2,
    "draft.vocab": 2,
    "draft.max_positions": 10,
    "schedule.max_model_len": 10,
}
BREAKS: dict[str, dict[str, Any]] = {
    "pair.tokenizers": {"draft.tokens": None},
    "pair.ids_agree": {"draft.tokens": TokenTable(["a", "c"])},
    "pair.rows_cover_ids": {"draft.vocab": 1},
    "pair.padding": {"target.vocab": 4},
    "pair.context": {"draft.max_positions": 9},
}
LAYER_FACTS: dict[str, Any] = {
    "target.vocab": 3,
    "target.hidden": 8,
    "target.num_layers": 4,
    "draft.vocab": 3,
    "draft.hidden": 8,
    "draft.num_layers": 4,
    "draft.layers": [4],
    "draft.taps": [8],
    "draft.max_positions": 10,
    "schedule.max_model_len": 10,
}
LAYER_BREAKS: dict[str, dict[str, Any]] = {
    "pair.vocab": {"draft.vocab": 4},
    "pair.hidden": {"draft.hidden": 16},
    "pair.layers": {"draft.layers": [5]},
    "pair.taps": {"draft.taps": [16]},
    "pair.context": {"draft.max_positions": 9},
}


@pytest.mark.parametrize(
    ("conditions", "facts", "breaks"),
    [(STANDALONE, FACTS, BREAKS), (BUNDLED, LAYER_FACTS, LAYER_BREAKS)],
    ids=["standalone", "bundled"],
)
def test_every_condition_can_hold_and_can_fail(
    conditions: tuple[Condition, ...], facts: dict[str, Any], breaks: dict[str, dict[str, Any]]
) -> None:
    assert {v.condition: v.reason for v in check_pair(conditions, facts).verdicts} == dict.fromkeys(breaks)
    for condition in conditions:
        broken = facts | breaks[condition.id]
        if condition.blocks is Blocks.ALWAYS:
            with pytest.raises(PlanError) as caught:
                check_pair(conditions, broken)
            assert caught.value.slug == "plan/pair"
        else:
            assert [note.condition for note in check_pair(conditions, broken).notes] == [condition.id]


@pytest.mark.parametrize("layers", [[], [4, 5], [3]])
def test_a_bundled_draft_is_the_one_layer_behind_its_targets_last(layers: list[int]) -> None:
    with pytest.raises(PlanError, match="layer 4"):
        check_pair(BUNDLED, LAYER_FACTS | {"draft.layers": layers})


def test_a_bundled_draft_that_is_numbered_by_itself_was_made_for_a_model_like_its_target() -> None:
    own = LAYER_FACTS | {"draft.layers": [0]}
    assert all(v.reason is None for v in check_pair(BUNDLED, own).verdicts)
    with pytest.raises(PlanError, match="the target has 4 layers, the draft was made for a model of 3"):
        check_pair(BUNDLED, own | {"draft.num_layers": 3})


def test_every_reason_of_a_bad_pair_is_listed() -> None:
    with pytest.raises(PlanError) as caught:
        check_pair(STANDALONE, FACTS | BREAKS["pair.ids_agree"] | BREAKS["pair.rows_cover_ids"])
    assert "token id 1" in str(caught.value) and "embedding rows" in str(caught.value)


def test_ids_without_token_at_the_end_are_padding_and_in_between_they_count() -> None:
    assert TokenTable(["a", "b", None, None]).first_difference(TokenTable(["a", "b"])) is None
    assert TokenTable(["a", None, "b"]).first_difference(TokenTable(["a", "x", "b"])) == 1
    assert TokenTable(["a", "b"]).first_difference(TokenTable(["a"])) == 1


def test_a_token_table_prints_short_and_tells_equal_from_different() -> None:
    one, same, other = TokenTable(["a"] * 10**5), TokenTable(["a"] * 10**5), TokenTable(["b"])
    assert len(repr(one)) < 40 and repr(one) == repr(same) != repr(other)
