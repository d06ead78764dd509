"""The environment's variables that are no settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from proa.env import VARIABLES, read_environment
from proa.errors import ConfigError


def test_only_proa_names_that_are_not_empty_are_kept() -> None:
    environment = read_environment({"PROA_DTYPE": "float32", "PROA_THREADS": "", "HOME": "/h"})
    assert environment.variables == {"PROA_DTYPE": "float32"}
    assert (environment.debug, environment.offline) == (False, False)


@pytest.mark.parametrize(("text", "meaning"), [("1", True), ("TRUE", True), ("on", True), ("0", False), ("no", False)])
def test_switches_are_read_from_their_words(text: str, meaning: bool) -> None:
    environment = read_environment({"PROA_DEBUG": text, "PROA_OFFLINE": text})
    assert (environment.debug, environment.offline) == (meaning, meaning)


def test_a_switch_that_is_neither_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"config/bad-value.*PROA_DEBUG = 'maybe'"):
        read_environment({"PROA_DEBUG": "maybe"})


def test_the_cache_directory_is_the_one_asked_for_else_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert read_environment({"PROA_CACHE_DIR": "/c"}).cache_dir == Path("/c")
    assert read_environment({"PROA_CACHE_DIR": "~/c"}).cache_dir == Path("/home/somebody/c")
    assert read_environment({"PROA_CACHE_DIR": "c"}).cache_dir == Path.cwd() / "c"
    assert read_environment({"XDG_CACHE_HOME": "/x"}).cache_dir == Path("/x/proa")
    assert read_environment({"XDG_CACHE_HOME": "relative"}).cache_dir == Path("/home/somebody/.cache/proa")


def test_without_any_home_the_cache_directory_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(ConfigError, match="PROA_CACHE_DIR") as caught:
        _ = read_environment({}).cache_dir
    assert caught.value.slug == "config/no-cache-dir"


def test_every_variable_has_help_and_a_default() -> None:
    assert all(one.name.startswith("PROA_") and one.help and one.default for one in VARIABLES)
