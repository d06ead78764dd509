"""What `proa run` does around its answers. The answers themselves are tests/e2e's."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from proa.cli.run import collector_at_rest


@pytest.fixture(autouse=True)
def nothing_frozen() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.unfreeze()


def test_the_collector_rests_during_start_up_and_passes_over_what_start_up_made_afterwards() -> None:
    with collector_at_rest():
        assert not gc.isenabled()
        kept = [[] for _ in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= len(kept)


def test_a_start_up_that_fails_leaves_the_collector_on() -> None:
    with pytest.raises(ValueError, match="no model"), collector_at_rest():
        raise ValueError("no model")
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with collector_at_rest():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
