"""A peer runs in a process of its own, and says so when it cannot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from proa.bench import peer
from proa.bench.peer import Peer
from proa.errors import ConfigError


def test_a_peer_that_is_not_installed_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "is_installed", lambda name: False)
    with pytest.raises(ConfigError, match=r"bench/no-peer.*transformers"):
        Peer("transformers", Path("x"), dtype="float32", threads=1)


@pytest.mark.slow
def test_a_peer_that_cannot_load_the_model_ends_with_its_last_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(peer, "is_installed", lambda name: True)
    with pytest.raises(ConfigError, match="bench/peer-failed") as failed:
        Peer("transformers", tmp_path / "nothing-here", dtype="float32", threads=1)
    assert failed.value.facts


@pytest.mark.oracle
@pytest.mark.slow
def test_transformers_answers_with_seconds(tiny: Callable[..., Path]) -> None:
    pytest.importorskip("transformers")
    with Peer("transformers", tiny("llama"), dtype="float32", threads=1) as one:
        assert one.version
        assert 0 < one.seconds([[10, 11], [12, 13]], 3) < 60
