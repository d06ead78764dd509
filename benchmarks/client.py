"""One engine in a process of its own, with the model loaded. Owns the process; sides/protocol.py is what it runs."""

from __future__ import annotations

import json
import subprocess
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryFile
from types import TracebackType
from typing import Any

from workload import Case

SIDES = Path(__file__).parent / "sides"
LAST_LINES = 15


class Side:
    """Ready when it exists; between requests its process sleeps. A context manager; leaving it ends the process.

    Raises RuntimeError with the end of what the engine said when it stops.
    """

    def __init__(self, name: str, script: str, python: Path, model: Path, threads: int) -> None:
        self.name = name
        with ExitStack() as stack:
            self._errors = stack.enter_context(TemporaryFile("w+"))
            self._resources = stack.pop_all()
        self._process = subprocess.Popen(
            [python, SIDES / script, model, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self.raw: list[dict[str, Any]] = []
        self.peak_bytes: int | None = None
        try:
            ready = self._reply()
        except BaseException:
            self.close()
            raise
        self.version: str = ready["version"]
        self.load_seconds: float = ready["load_seconds"]

    def rate(self, case: Case, seed: str) -> float:
        """Tokens per second of one measurement. Every reply is kept in `raw`."""
        if self._process.stdin is not None:
            self._process.stdin.write(json.dumps({**asdict(case), "seed": seed}) + "\n")
            self._process.stdin.flush()
        reply = self._reply()
        self.peak_bytes = reply["peak_bytes"]
        self.raw.append({"seed": seed, **reply})
        return reply["rate"]

    def describe(self) -> dict[str, Any]:
        return {
            "engine": self.name,
            "version": self.version,
            "load_seconds": self.load_seconds,
            "peak_bytes": self.peak_bytes,
            "replies": self.raw,
        }

    def _reply(self) -> dict[str, Any]:
        line = self._process.stdout.readline() if self._process.stdout else ""
        if line:
            return json.loads(line)
        self._process.wait()
        self._errors.seek(0)
        said = self._errors.read().strip().splitlines()[-LAST_LINES:]
        raise RuntimeError("\n".join([f"{self.name} ended with status {self._process.returncode}:", *said]))

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
        self._process.communicate()
        self._resources.close()

    def __enter__(self) -> Side:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
