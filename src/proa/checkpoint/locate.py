"""From what a user calls a model to a path: directory, file, bundled recipe, or `user/repo` on the hub."""

from __future__ import annotations

import re
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from proa.checkpoint.fetch import Download, Note, fetch, pip_download
from proa.checkpoint.recipes import RECIPES, Recipe, find_recipe
from proa.errors import CheckpointError

HUB_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "*.safetensors",
    "*.safetensors.index.json",
)
"""What is taken from a hub repository: no pickles, no code."""

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def locate(name: str, cache_dir: Path, *, online: bool, note: Note, download: Download = pip_download) -> Path:
    """The path that `name` stands for. What exists on disk comes before recipes and the hub.

    `online` False: nothing is downloaded, and what is not here is an error that says what to type. Progress of a
    download goes to `note`.
    """
    path = Path(name).expanduser()
    if path.exists():
        return path
    recipe = find_recipe(name)
    if recipe is not None:
        if online:
            return _recipe_file(recipe, cache_dir, note, download)
        return _fetched_file(recipe, cache_dir)
    if _HUB_NAME.fullmatch(name) and path.suffix != ".gguf":
        return _hub_snapshot(name, online, note)
    known = [entry.name for entry in RECIPES]
    near = get_close_matches(name, known, n=1)
    raise CheckpointError(
        "checkpoint/not-found",
        f"{name}: no such directory or file.",
        facts=[f"recipes: {', '.join(known)}", "hub models are written user/repo"],
        hint=f"did you mean {near[0]}?" if near else None,
    )


def _recipe_file(recipe: Recipe, cache_dir: Path, note: Note, download: Download) -> Path:
    # A file that is there got its name only after its digest was right; `proa fetch` verifies it again.
    file = recipe.path(cache_dir)
    return file if file.exists() else fetch(recipe, cache_dir, note, download).path


def _fetched_file(recipe: Recipe, cache_dir: Path) -> Path:
    file = recipe.path(cache_dir)
    if file.exists():
        return file
    raise CheckpointError(
        "fetch/not-fetched",
        f"{recipe.name} ({recipe.about}) is not in the cache directory.",
        facts=[f"looked for {file}"],
        hint=f"proa fetch {recipe.name}",
    )


def _hub_snapshot(name: str, online: bool, note: Note) -> Path:
    """The local snapshot of a hub repository, in the hub client's own cache."""
    if find_spec("huggingface_hub") is None:
        raise CheckpointError(
            "hub/no-client",
            f"{name}: models of the hub need the package huggingface_hub.",
            hint="pip install huggingface_hub",
        )
    hub: Any = import_module("huggingface_hub")
    if online:
        note(f"fetching {name} from the hub")
    try:
        return Path(hub.snapshot_download(name, allow_patterns=list(HUB_FILES), local_files_only=not online))
    except Exception as error:  # the client raises its own, the HTTP library's and the system's errors
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise CheckpointError(
            "hub/unreachable",
            f"{name}: the hub repository could not be {'fetched' if online else 'found in the local hub cache'}.",
            facts=[f"{type(error).__name__}: {reason}"],
            hint="download it on a machine with a connection and give its directory",
        ) from error
