from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proa.checkpoint.strict_json import freeze, parse_object
from proa.errors import CheckpointError

_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=50)
@given(st.dictionaries(st.text(), _VALUES, max_size=3))
def test_an_object_is_read_as_the_standard_library_reads_it(value: dict[str, object]) -> None:
    raw = json.dumps(value).encode()
    assert parse_object(raw, "x.json") == json.loads(raw)


@pytest.mark.parametrize("raw", ['{"a": 1, "a": 2}', '{"b": {"a": 1, "c": 0, "a": 1}}', '[{"a": 1, "a": 1}]'])
def test_a_duplicate_key_at_any_depth_is_refused_by_name(raw: str) -> None:
    with pytest.raises(CheckpointError, match=r"x\.json: the key 'a' appears twice") as error:
        parse_object(raw.encode(), "x.json")
    assert error.value.slug == "checkpoint/duplicate-key"


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"3",
        b"null",
        b'{"a": NaN}',
        b'{"a": -Infinity}',
        b'{"a": 1e999}',
        b'{"a": "\xff"}',
        b'{"a": ' + b"[" * 200_000,
        b'{"a": ' + b"9" * 5000 + b"}",
        b"{} {}",
    ],
)
def test_what_is_not_one_finite_json_object_is_refused_naming_the_file(raw: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"x\.json") as error:
        parse_object(raw, "x.json")
    assert error.value.slug == "checkpoint/bad-json"


@given(st.binary(max_size=200))
def test_no_bytes_make_the_parser_fail_in_another_way(raw: bytes) -> None:
    with suppress(CheckpointError):
        parse_object(raw, "x.json")


def test_a_frozen_value_is_a_deep_copy_that_cannot_be_changed() -> None:
    original = {"a": [1, {"b": [2]}]}
    frozen = freeze(original)
    original["a"].append(3)
    assert frozen["a"][0] == 1 and len(frozen["a"]) == 2 and frozen["a"][1]["b"] == (2,)
    assert isinstance(frozen, Mapping) and not hasattr(frozen, "__setitem__")
    assert not hasattr(frozen["a"][1], "__setitem__")
