"""The bandwidth probe reads every byte and fits its buffer; its speed is the host's affair."""

from __future__ import annotations

import time

import pytest

from proa.bench.probe import Probe

MIB = 1 << 20


@pytest.mark.parametrize("threads", [1, 2])
def test_a_probe_gives_a_rate_that_memory_can_have(threads: int) -> None:
    with Probe(threads, nbytes=16 * MIB, repeats=2) as probe:
        assert 0.1 < probe() < 10_000


def test_the_rate_is_bytes_over_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0.0, 0.5, 1.0, 1.5])
    with Probe(1, nbytes=4 * MIB, repeats=2) as probe:
        monkeypatch.setattr(time, "perf_counter", lambda: next(ticks))
        assert probe() == pytest.approx(4 * MIB / 0.5 / 1e9)


@pytest.mark.parametrize("place", [0, 2 * MIB - 1, 2 * MIB, 4 * MIB - 1])
def test_the_probe_reads_its_whole_buffer(place: int) -> None:
    with Probe(2, nbytes=4 * MIB, repeats=1) as probe:
        probe._view[place] = 2  # the byte that it looks for
        with pytest.raises(RuntimeError, match="overwritten"):
            probe()
