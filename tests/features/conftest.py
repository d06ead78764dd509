"""What the feature tests share: a verb to call, and capability files of hosts that do not exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.factories.headers import GPU_HOST, LAPTOP
from tests.features.verbs import Verb, caps_file, verb_of


@pytest.fixture
def verb(capsys: pytest.CaptureFixture[str]) -> Verb:
    return verb_of(capsys)


@pytest.fixture(scope="session")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """`--caps FILE` of a host with a GPU."""
    return "--caps", caps_file(tmp_path_factory.mktemp("gpu"), GPU_HOST)


@pytest.fixture(scope="session")
def laptop(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """`--caps FILE` of a host without one, and without AVX-512."""
    return "--caps", caps_file(tmp_path_factory.mktemp("laptop"), LAPTOP)
