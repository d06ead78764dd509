"""The one table of settings: complete, unambiguous, and the same in every spelling."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from proa.config.fields import FIELDS, KEYS, flag_name, nearest, python_name, variable_name
from proa.config.intent import EngineConfig


def test_every_leaf_of_the_intent_has_exactly_one_key_of_its_own() -> None:
    leaves = {path for path, _ in EngineConfig(model="m").leaves()} - {"target.path"}
    own = Counter(key.leaves[0] for key in KEYS if len(key.leaves) == 1)
    assert set(own) == leaves
    assert set(own.values()) == {1}


def test_every_key_sets_leaves_that_exist() -> None:
    leaves = {path for path, _ in EngineConfig(model="m").leaves()}
    assert all(set(key.leaves) <= leaves for key in KEYS)


@pytest.mark.parametrize("spell", [str, flag_name, variable_name, python_name])
def test_no_two_settings_share_a_spelling(spell: Callable[[str], str]) -> None:
    names = Counter(spell(spelling) for key in KEYS for spelling in key.spellings)
    assert [name for name, times in names.items() if times > 1] == []


def test_the_spellings_are_those_of_the_interface() -> None:
    dotted = {key.dotted for key in KEYS}
    assert {"draft.path", "draft.kv_dtype", "linear_attention.decode", "target.attention.prefill"} <= dotted
    assert "target.path" not in dotted
    assert flag_name("draft.linear_attention.decode") == "--draft.linear-attention.decode"
    assert variable_name("draft.kv_dtype") == "PROA_DRAFT__KV_DTYPE"
    assert variable_name("linear_attention.decode") == "PROA_LINEAR_ATTENTION__DECODE"
    assert python_name("linear_attention.decode") == "linear_attention_decode"


def test_every_setting_has_help_and_a_shown_value() -> None:
    for field in FIELDS:
        assert len(field.help) > 5
        assert field.kind.metavar
        assert not field.help.endswith(".")


def test_nearest_names_one_candidate_or_none() -> None:
    assert nearest("--dtyp", ["--dtype", "--draft"]) == "did you mean --dtype?"
    assert (
        nearest("--draft-kv_dtype", ["--draft", "--kv-dtype", "--draft.kv-dtype"]) == "did you mean --draft.kv-dtype?"
    )
    assert nearest("zzz", ["--dtype"]) is None
    assert nearest("PROA_TARGET__THREADS", ["PROA_THREADS"]) == (
        "PROA_THREADS is a setting of the whole engine, not of one runner"
    )
