"""Runs a verb of `proa` in the test's own process, for hosts that do not exist."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from proa.cli.main import main
from proa.kernels.caps import DeviceCaps, caps_to_json

FUSED_ASKED = ("--shared-experts", "fused")
SEPARATE_ASKED = ("--shared-experts", "separate")


@dataclass(frozen=True, slots=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Verb = Callable[..., Ran]


def verb_of(capsys: pytest.CaptureFixture[str]) -> Verb:
    """`verb("explain", model, "--json")`: exit code, stdout, stderr."""

    def run(*words: str | Path) -> Ran:
        capsys.readouterr()
        code = main([str(word) for word in words])
        seen = capsys.readouterr()
        return Ran(code, seen.out, seen.err)

    return run


def caps_file(folder: Path, caps: DeviceCaps) -> Path:
    """What `--caps` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "caps.json"
    file.write_text(json.dumps(caps_to_json(caps)))
    return file


def edit(model: Path, *remove: str, **keys: Any) -> None:
    """Change config.json as a user would."""
    config = json.loads((model / "config.json").read_text())
    kept = {key: value for key, value in config.items() if key not in remove}
    (model / "config.json").write_text(json.dumps(kept | keys))


def decisions(document: Any, role: str = "target") -> Any:
    """The decisions of a runner in the document of `explain --json`."""
    return document["runners"][role]["decisions"]
