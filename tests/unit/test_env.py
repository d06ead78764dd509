"""The environment's variables that are no settings."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from proa.cli.main import main
from proa.env import SPIN_NAME, SPINS, VARIABLES, read_environment, shorten_waits
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


def test_the_variables_that_govern_threads_are_read_as_they_are() -> None:
    given = {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive", "HOME": "/h"}
    assert read_environment(given).openmp == {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"}


@pytest.mark.parametrize("said", [{}, {SPIN_NAME: "7"}, {SPIN_NAME: ""}, {"OMP_WAIT_POLICY": "active"}])
def test_threads_wait_as_the_environment_says_else_briefly(said: dict[str, str]) -> None:
    environ = dict(said)
    shorten_waits(environ)
    assert environ == (said or {SPIN_NAME: SPINS})


def test_only_the_command_line_of_its_own_process_changes_how_threads_wait(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (SPIN_NAME, "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", ["proa", "--version"])
    assert main(["--version"]) == 0 and SPIN_NAME not in os.environ
    monkeypatch.setenv(SPIN_NAME, "")  # so that it is unset again after this test
    del os.environ[SPIN_NAME]
    assert main() == 0 and os.environ[SPIN_NAME] == SPINS
