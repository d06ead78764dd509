"""The writer: results on stdout, notes on stderr, and text that the terminal cannot show."""

from __future__ import annotations

import io

import pytest

from proa.cli.output import Output


def test_results_go_to_stdout_and_notes_to_stderr() -> None:
    stdout, stderr = io.StringIO(), io.StringIO()
    out = Output(stdout, stderr)
    out.write("a")
    out.line("b")
    out.note("n")
    out.json({"é": 1})
    assert stdout.getvalue() == 'ab\n{\n  "é": 1\n}\n'
    assert stderr.getvalue() == "n\n"
    assert not out.is_terminal


def test_json_refuses_what_json_has_no_word_for() -> None:
    with pytest.raises(ValueError, match="JSON"):
        Output(io.StringIO(), io.StringIO()).json(float("nan"))


def test_text_that_the_stream_cannot_encode_is_escaped_instead_of_failing() -> None:
    raw = io.BytesIO()
    out = Output(io.TextIOWrapper(raw, encoding="ascii"), io.StringIO())
    out.write("é\ud800")
    assert raw.getvalue() == rb"\xe9\ud800"


def test_a_note_that_nobody_reads_any_more_does_not_stop_the_work() -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError(text)

    Output(io.StringIO(), Closed()).note("n")
    with pytest.raises(BrokenPipeError):
        Output(Closed(), io.StringIO()).line("n")
