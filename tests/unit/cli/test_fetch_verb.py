"""`proa fetch`: what it prints, as text and as JSON."""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path

import pytest

from proa.checkpoint.fetch import Fetched
from proa.checkpoint.recipes import RECIPES
from proa.cli import fetch as verb
from proa.cli.output import Output
from proa.errors import CheckpointError, ConfigError


def ask(name: str, *, as_json: bool) -> tuple[int, str]:
    stdout = io.StringIO()
    code = verb.run(argparse.Namespace(name=name, json=as_json), None, Output(stdout, io.StringIO()))
    return code, stdout.getvalue()


@pytest.fixture
def fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PROA_CACHE_DIR", str(tmp_path))
    path = RECIPES[0].path(tmp_path)
    monkeypatch.setattr(
        verb, "fetch", lambda recipe, cache, note, download: Fetched(path=recipe.path(cache), downloaded=False)
    )
    return path


def test_a_file_that_was_there_is_said_to_be_verified_again(fetched: Path) -> None:
    code, text = ask("smollm2", as_json=False)
    assert code == 0
    assert text.startswith(f"smollm2: already there, verified again: {fetched}\n")
    assert RECIPES[0].sha256 in text


def test_the_json_names_path_digest_and_licence(fetched: Path) -> None:
    code, text = ask("smollm2", as_json=True)
    assert (code, json.loads(text)) == (
        0,
        {
            "name": "smollm2", "path": str(fetched), "nbytes": 98362432, "sha256": RECIPES[0].sha256,
            "licence": "Apache-2.0", "downloaded": False,
        },
    )  # fmt: skip


def test_an_unknown_recipe_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="did you mean smollm2") as caught:
        ask("smolm2", as_json=False)
    assert caught.value.slug == "fetch/unknown-recipe"


def test_offline_a_recipe_that_is_not_there_is_not_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROA_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PROA_OFFLINE", "1")
    with pytest.raises(CheckpointError) as caught:
        ask("smollm2", as_json=False)
    assert caught.value.slug == "fetch/offline"
