"""The cost table as a value, and the file that keeps it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from proa.kernels.cost import CostTable, cost_path, read_costs, write_costs

TABLE = CostTable(rows=(1, 4, 8), seconds=(0.004, 0.0044, 0.0052))


@pytest.mark.parametrize(
    ("rows", "seconds"), [(0, 0.0), (1, 4.0), (2, 4 + 0.4 / 3), (4, 4.4), (6, 4.8), (8, 5.2), (12, 6.0), (108, 25.2)]
)
def test_costs_between_and_beyond_the_entries_lie_on_lines(rows: int, seconds: float) -> None:
    assert TABLE.of(rows) == pytest.approx(seconds / 1000)


def test_one_entry_is_a_line_through_nothing() -> None:
    assert CostTable(rows=(2,), seconds=(1.0,)).of(6) == 3.0


def test_a_disturbed_measurement_counts_as_what_more_rows_took() -> None:
    assert CostTable.measured([(1, 2.0), (2, 1.5), (4, 3.0), (8, 2.9)]).seconds == (1.5, 1.5, 2.9, 2.9)


@pytest.mark.parametrize(
    ("rows", "seconds"),
    [((), ()), ((1, 2), (1.0,)), ((2, 1), (1.0, 2.0)), ((0, 1), (1.0, 2.0)), ((1, 2), (2.0, 1.0)), ((1,), (0.0,)),
     ((1,), (float("nan"),)), ((1, 2), (1.0, float("inf"))), ((1, 2, 4), (1.0, float("nan"), 2.0))],
)  # fmt: skip
def test_what_is_no_table_is_refused(rows: tuple[int, ...], seconds: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="cost table"):
        CostTable(rows=rows, seconds=seconds)


def test_it_reads_as_ratios_with_its_digest() -> None:
    assert str(TABLE) == f"1 row 4 ms, 4 x1.10, 8 x1.30 (costs {TABLE.digest[:8]})"
    assert TABLE.digest != CostTable(rows=(1, 4, 8), seconds=(0.004, 0.0044, 0.0053)).digest


def test_a_table_comes_back_from_its_file(tmp_path: Path) -> None:
    path, notes = tmp_path / "costs" / "a.json", []
    assert read_costs(path, notes.append) is None and not notes
    write_costs(path, TABLE, notes.append)
    assert read_costs(path, notes.append) == TABLE and not notes
    assert [entry.name for entry in path.parent.iterdir()] == ["a.json"]


GOOD = TABLE.to_json()


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "null", "\xff", json.dumps({"rows": [1]}), json.dumps({**GOOD, "seconds": [1.0]}),
        json.dumps({**GOOD, "rows": ["1", 4, 8]}), json.dumps({**GOOD, "seconds": [0.004, 0.0044, 0.0053]}),
        json.dumps({**GOOD, "seconds": [0.004, None, 0.0052]}), json.dumps({**GOOD, "rows": 5}),
    ],
)  # fmt: skip
def test_a_damaged_file_is_named_and_gives_no_table(tmp_path: Path, text: str) -> None:
    path, notes = tmp_path / "a.json", []
    path.write_bytes(text.encode("latin-1"))
    assert read_costs(path, notes.append) is None
    assert len(notes) == 1 and str(path) in notes[0] and "measured anew" in notes[0]


def test_a_directory_that_takes_no_file_is_named_and_no_error(tmp_path: Path) -> None:
    (tmp_path / "costs").write_text("in the way")
    notes: list[str] = []
    write_costs(tmp_path / "costs" / "a.json", TABLE, notes.append)
    assert len(notes) == 1 and "costs" in notes[0]


def test_another_plan_thread_count_or_processor_has_another_file(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    paths = {cost_path(tmp_path, "a", 1, tmp_path), cost_path(tmp_path, "b", 1, tmp_path)}
    paths.add(cost_path(tmp_path, "a", 2, tmp_path))
    (tmp_path / "proc/cpuinfo").write_text("model name\t: Other CPU\nflags\t\t: avx2\n")
    paths.add(cost_path(tmp_path, "a", 1, tmp_path))
    assert len(paths) == 4
    assert cost_path(tmp_path, "a", 1, tmp_path) in paths
