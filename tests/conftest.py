"""Fixtures that many tests share: tiny checkpoints (written once), the real model's file, the reference checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.factories.checkpoints import write_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny("llama", seed=1)`: a checkpoint directory, written once per session. Tests must not change its files."""
    root = tmp_path_factory.mktemp("tiny")

    def write(family: str, seed: int = 0, **overrides: object) -> Path:
        words = [f"{key}-{value}" for key, value in sorted(overrides.items())]
        path = root / "_".join([family, str(seed), *words])
        return path if path.exists() else write_tiny(family, path, seed, **overrides)

    return write


@pytest.fixture(scope="session")
def oracle_dir() -> Path:
    """Reference checkpoints: a directory with llama/, qwen2/, ... named by PROA_ORACLES."""
    named = os.environ.get("PROA_ORACLES")
    if not named:
        pytest.skip("PROA_ORACLES names no directory of reference checkpoints")
    return Path(named)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The real model's GGUF: PROA_TEST_GGUF, else where `proa fetch smollm2` puts it."""
    named = os.environ.get("PROA_TEST_GGUF")
    if named:
        return Path(named)
    cache = Path(os.environ.get("PROA_CACHE_DIR") or Path.home() / ".cache" / "proa")
    found = sorted(cache.rglob("SmolLM2-135M-Instruct*.gguf"))
    if not found:
        pytest.skip("SmolLM2 is not in the cache directory: `proa fetch smollm2`, or set PROA_TEST_GGUF")
    return found[0]
