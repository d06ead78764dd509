"""The one writer of the command line. Results go to stdout; progress, notes and errors go to stderr."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from typing import Any, TextIO


class Output:
    """What a verb may write with. `is_terminal` says whether a person reads stdout as it comes."""

    def __init__(self, stdout: TextIO, stderr: TextIO) -> None:
        self._stdout = stdout
        self._stderr = stderr
        self.is_terminal = stdout.isatty()

    @classmethod
    def standard(cls) -> Output:
        return cls(sys.stdout, sys.stderr)

    def line(self, text: str = "") -> None:
        _put(self._stdout, text + "\n")

    def write(self, text: str) -> None:
        """A piece of streamed text, shown at once."""
        _put(self._stdout, text)
        self._stdout.flush()

    def json(self, value: Any) -> None:
        """One JSON document. NaN and infinity are refused: no reader of JSON has to know them."""
        self.line(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))

    def note(self, text: str) -> None:
        """A line on stderr. That nobody reads it any more is no reason to stop."""
        with suppress(BrokenPipeError):
            _put(self._stderr, text + "\n")
            self._stderr.flush()

    def flush(self) -> None:
        self._stdout.flush()


def _put(stream: TextIO, text: str) -> None:
    """Write, with escapes for what the stream cannot encode: a model may emit what a terminal cannot show."""
    try:
        stream.write(text)
    except UnicodeEncodeError:
        encoding = stream.encoding or "ascii"
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
