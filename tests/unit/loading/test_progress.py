"""Progress: plain lines at quarters where there is no terminal, a bar where there is one."""

from __future__ import annotations

import io

from proa.loading.progress import Bar, Lines, Silent, progress_on


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_are_written_at_each_quarter_and_not_between() -> None:
    lines: list[str] = []
    with Lines(lines.append).phase("loading", 4096) as advance:
        for _ in range(64):
            advance(64)
    assert lines == [f"loading: {size} of 4 KiB ({percent} %)" for size, percent in
                     (("1 KiB", 25), ("2 KiB", 50), ("3 KiB", 75), ("4 KiB", 100))]  # fmt: skip


def test_one_large_step_is_one_line() -> None:
    lines: list[str] = []
    with Lines(lines.append).phase("loading", 100) as advance:
        advance(90)
    assert lines == ["loading: 90 B of 100 B (75 %)"]


def test_a_phase_without_bytes_does_not_divide_by_zero() -> None:
    lines: list[str] = []
    with Lines(lines.append).phase("loading", 0) as advance:
        advance(0)
    assert lines == ["loading: 0 B of 0 B (100 %)"]


def test_a_terminal_gets_a_bar_and_a_file_gets_lines() -> None:
    terminal, file = Terminal(), io.StringIO()
    assert isinstance(progress_on(terminal), Bar)
    with progress_on(terminal).phase("loading draft weights", 2048) as advance:
        advance(2048)
    assert "loading draft weights" in terminal.getvalue()
    with progress_on(file).phase("loading", 8) as advance:
        advance(8)
    assert file.getvalue() == "loading: 8 B of 8 B (100 %)\n"


def test_silence_is_silent() -> None:
    with Silent().phase("loading", 8) as advance:
        advance(8)
