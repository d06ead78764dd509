"""What benchmarks/ claims rests on these rules: which pairs count, and what is the median of what."""

from __future__ import annotations

import json

import pytest

from benchmarks.pairing import Pair, as_json, collect, measure_pair, summarise


def pair(left: float, right: float, *probes: float) -> Pair:
    first, second, third = probes or (50.0, 50.0, 50.0)
    return Pair(left=left, right=right, probes=(first, second, third))


def test_the_ratio_is_left_over_right() -> None:
    assert pair(30.0, 20.0).ratio == 1.5


@pytest.mark.parametrize("probes", [(50.0, 50.0, 50.0), (50.0, 54.9, 52.0), (54.9, 52.0, 50.0)])
def test_a_pair_with_probes_within_ten_per_cent_is_kept(probes: tuple[float, float, float]) -> None:
    assert Pair(left=1.0, right=1.0, probes=probes).is_steady


@pytest.mark.parametrize("probes", [(50.0, 55.1, 50.0), (55.1, 50.0, 50.0), (50.0, 50.0, 44.0)])
def test_a_pair_with_probes_further_apart_is_dropped(probes: tuple[float, float, float]) -> None:
    assert not Pair(left=1.0, right=1.0, probes=probes).is_steady


def test_dropped_pairs_are_counted_and_change_no_figure() -> None:
    kept = [pair(10.0, 5.0), pair(12.0, 6.0), pair(14.0, 7.0)]
    summary = summarise([*kept, pair(1000.0, 1.0, 40.0, 80.0, 40.0)])
    assert (summary.kept, summary.dropped) == (3, 1)
    assert (summary.left, summary.right, summary.ratio) == (12.0, 6.0, 2.0)


def test_the_ratio_is_the_median_of_ratios_and_not_the_ratio_of_medians() -> None:
    # Ratios 1, 3 and 2; the medians of the sides are 20 and 10.
    summary = summarise([pair(10.0, 10.0), pair(30.0, 10.0), pair(20.0, 10.0)])
    assert summary.ratio == 2.0
    # Ratios 0.1, 4 and 3; the medians of the sides are 30 and 10, which would also make 3, so move one.
    summary = summarise([pair(10.0, 100.0), pair(40.0, 10.0), pair(30.0, 20.0)])
    assert summary.ratio == 1.5
    assert (summary.left, summary.right) == (30.0, 20.0)
    assert (summary.lowest_ratio, summary.highest_ratio) == (0.1, 4.0)


def test_nothing_kept_gives_no_figure() -> None:
    summary = summarise([pair(2.0, 1.0, 40.0, 80.0, 40.0)])
    assert (summary.kept, summary.dropped, summary.ratio, summary.left) == (0, 1, None, None)


def test_the_bandwidth_beside_the_left_side_is_that_of_the_probes_around_it() -> None:
    assert summarise([pair(1.0, 1.0, 50.0, 52.0, 54.0)]).probe == 51.0


def test_rounds_go_on_until_enough_pairs_are_steady() -> None:
    made = [pair(1.0, 1.0), pair(1.0, 1.0, 40.0, 80.0, 40.0), pair(1.0, 1.0), pair(1.0, 1.0)]
    assert collect(made.__getitem__, 2, 10) == made[:3]


def test_rounds_end_at_the_most_pairs_however_unsteady_the_host() -> None:
    pairs = collect(lambda _: pair(1.0, 1.0, 40.0, 80.0, 40.0), 2, 4)
    assert len(pairs) == 4


def test_every_measurement_has_a_probe_before_and_after() -> None:
    events: list[str] = []

    def noted(name: str, value: float) -> float:
        events.append(name)
        return value

    probes = iter((50.0, 51.0, 52.0))
    made = measure_pair(lambda: noted("left", 3.0), lambda: noted("right", 2.0), lambda: noted("probe", next(probes)))
    assert events == ["probe", "left", "probe", "right", "probe"]
    assert made == Pair(left=3.0, right=2.0, probes=(50.0, 51.0, 52.0))


def test_the_record_holds_the_raw_values_of_kept_and_dropped_pairs() -> None:
    record = json.loads(json.dumps(as_json([pair(3.0, 2.0), pair(9.0, 2.0, 40.0, 80.0, 40.0)])))
    assert [(one["left"], one["kept"]) for one in record["pairs"]] == [(3.0, True), (9.0, False)]
    assert record["pairs"][1]["probes"] == [40.0, 80.0, 40.0]
    assert record["ratio"] == 1.5


@pytest.mark.parametrize(("left", "right"), [(0.0, 2.0), (2.0, 0.0)])
def test_a_pair_with_a_rate_that_could_not_be_measured_is_dropped(left: float, right: float) -> None:
    broken = pair(left, right)
    assert not broken.is_steady
    record = as_json([broken, pair(3.0, 2.0)])
    assert (record["kept"], record["dropped"], record["ratio"]) == (1, 1, 1.5)
    assert record["pairs"][0]["ratio"] is None
