"""The chat on a terminal: a prompt sign, Ctrl-C stops the answer and not the chat, Ctrl-D ends it."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.command_line import SOURCES

PATIENCE = 60.0  # seconds


class Terminal:
    """A process whose stdin, stdout and stderr are one terminal."""

    def __init__(self, *arguments: str) -> None:
        self._master, slave = pty.openpty()
        self._seen = ""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "proa", *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=take_terminal,
            env={"PYTHONPATH": str(SOURCES), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "TERM": "dumb"},
        )
        os.close(slave)

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def wait_for(self, text: str) -> str:
        """What came up to and with `text`."""
        deadline = time.monotonic() + PATIENCE
        while text not in self._seen:
            assert time.monotonic() < deadline, self._seen
            self._seen += os.read(self._master, 4096).decode(errors="replace")
        before, _, self._seen = self._seen.partition(text)
        return before + text

    def wait_for_more(self) -> None:
        while not self._seen:
            self._seen += os.read(self._master, 4096).decode(errors="replace")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._master)


def take_terminal() -> None:
    """Make stdin the controlling terminal, so that Ctrl-C reaches the process as a signal."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals are a Unix thing")
def test_ctrl_c_stops_the_answer_and_ctrl_d_ends_the_chat(tiny: Callable[..., Path]) -> None:
    endless = ("--ignore-eos", "--max-tokens", "none", "--dtype", "float32", "--threads", "1")
    terminal = Terminal("run", str(tiny("llama")), *endless)
    try:
        terminal.wait_for(">>> ")
        terminal.type("go\n")
        terminal.wait_for("\n")
        terminal.wait_for_more()  # it is answering
        terminal.type("\x03")
        terminal.wait_for("[stopped]")
        terminal.wait_for(">>> ")
        terminal.type("\x04")
        terminal.wait_for("ledger closed")
        assert terminal.process.wait(PATIENCE) == 0
    finally:
        terminal.close()
