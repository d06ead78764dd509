"""How loading reports what it does: phase and bytes. A bar on a terminal, plain lines elsewhere, or nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, TextIO

from proa.units import format_bytes

LINES_PER_PHASE = 4  # on a stream that is no terminal: at 25, 50, 75 and 100 %


class Advance(Protocol):
    def __call__(self, nbytes: int, /) -> None:
        """`nbytes` more of the phase are done."""
        ...


class Progress(Protocol):
    def phase(self, name: str, total_bytes: int) -> AbstractContextManager[Advance]:
        """A stretch of work over `total_bytes`, in a `with` statement."""
        ...


class Silent:
    """Reports nothing."""

    @contextmanager
    def phase(self, name: str, total_bytes: int) -> Iterator[Advance]:
        yield lambda nbytes: None


class Lines:
    """One plain line per quarter of a phase."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write

    @contextmanager
    def phase(self, name: str, total_bytes: int) -> Iterator[Advance]:
        done = quarter = 0

        def advance(nbytes: int) -> None:
            nonlocal done, quarter
            done += nbytes
            reached = LINES_PER_PHASE * done // total_bytes if total_bytes else LINES_PER_PHASE
            if reached > quarter:
                quarter = reached
                percent = 100 * quarter // LINES_PER_PHASE
                self._write(f"{name}: {format_bytes(done)} of {format_bytes(total_bytes)} ({percent} %)")

        yield advance


class Bar:
    """A moving bar with bytes, rate and time left, drawn by rich."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @contextmanager
    def phase(self, name: str, total_bytes: int) -> Iterator[Advance]:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
        from rich.progress import Progress as RichProgress

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True),
                   TransferSpeedColumn(), TimeRemainingColumn())  # fmt: skip
        with RichProgress(*columns, console=Console(file=self._stream), transient=True) as bar:
            task = bar.add_task(name, total=total_bytes)
            yield lambda nbytes: bar.advance(task, nbytes)


def progress_on(stream: TextIO) -> Progress:
    """A bar where `stream` is a terminal, else lines on it."""
    if stream.isatty():
        return Bar(stream)
    return Lines(lambda text: stream.write(text + "\n"))
