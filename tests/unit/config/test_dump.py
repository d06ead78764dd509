"""The dumped intent reads back to the same values."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proa.config.dump import to_toml
from proa.config.fields import KEYS
from proa.config.intent import EngineConfig
from proa.config.kinds import Kind
from proa.config.load import load_config


def load(api: dict[str, object], file: Path | None = None) -> EngineConfig:
    return load_config("m", flags={}, file=file, environ={}, api=api)


def values(config: EngineConfig) -> dict[str, Any]:
    """Of every leaf, and whether it was asked for together with others."""
    return {path: (choice.value, choice.origin.is_base) for path, choice in config.leaves()}


def some_value(kind: Kind) -> st.SearchStrategy[object]:
    text = st.text(alphabet="aZ é𝄞\"\\\t\n\x7f#='[]{}", min_size=1, max_size=6)
    by_metavar: dict[str, st.SearchStrategy[object]] = {
        "N": st.integers(1, 1024),
        "SIZE": st.integers(1, 2**40),
        "PATH": text,
        "GLOB": st.lists(text, min_size=1),
    }
    return st.just("auto") | by_metavar.get(kind.metavar, st.sampled_from(kind.choices or ("native", "q4_1")))


@st.composite
def asked(draw: st.DrawFn) -> dict[str, object]:
    keys = draw(st.lists(st.sampled_from(KEYS), unique_by=lambda key: key.dotted))
    return {key.dotted.replace(".", "_"): draw(some_value(key.field.kind)) for key in keys}


@settings(deadline=None)
@given(api=asked())
def test_a_dump_reads_back_to_the_same_values(api: dict[str, object], tmp_path_factory: pytest.TempPathFactory) -> None:
    config = load(api)
    file = tmp_path_factory.getbasetemp() / "dumped.toml"
    file.write_text(to_toml(config), encoding="utf-8")
    assert values(load({}, file)) == values(config)


def test_only_what_was_asked_is_set_and_each_line_names_its_origin() -> None:
    config = load_config(
        "m", flags={"--draft.dtype": "float32"}, file=None, environ={"PROA_THREADS": "auto"}, api={"page_size": 4}
    )
    text = to_toml(config)
    assert tomllib.loads(text) == {
        "draft": {"dtype": "float32", "page_size": 4},
        "target": {"page_size": 4},
        "threads": "auto",
    }
    assert 'draft.dtype = "float32"  # flag --draft.dtype' in text
    assert 'threads = "auto"  # environment PROA_THREADS' in text
    assert "target.page_size = 4  # api page_size" in text
    assert '# target.dtype = "auto"' in text


def test_a_file_name_with_a_line_break_cannot_leave_its_comment(tmp_path: Path) -> None:
    file = tmp_path / "a\nthreads = 9.toml"
    file.write_text("page_size = 4")
    assert "threads" not in tomllib.loads(to_toml(load({}, file)))


def test_what_was_asked_of_all_phases_stays_one_line_beside_what_was_asked_of_one() -> None:
    flags: dict[str, str | list[str]] = {"--draft.attention": "native", "--draft.attention.decode": "reference"}
    text = to_toml(load_config("m", flags=flags, file=None, environ={}, api={}))
    lines = [line for line in text.splitlines() if line.startswith("draft.attention")]
    assert lines == [
        'draft.attention.base = "native"  # flag --draft.attention',
        'draft.attention.decode = "reference"  # flag --draft.attention.decode',
    ]
