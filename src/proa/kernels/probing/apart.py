"""Runs self-tests in a process of their own: a kernel that crashes or hangs there costs a verdict, nothing else.

Owns the process and what is made of its end. The tests are probe.py's, called by worker.py and
device.py. No torch here.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from signal import Signals

from proa.kernels.verdicts import FAILED

SECONDS = 300.0  # an unhurried host takes three; whatever waits that long will not come to an end
LIBRARY_WORKER = "proa.kernels.probing.worker"
# The path is handed over: what this process imports, also from a directory that only it knows, the other finds too.
_START = (
    "import importlib, json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "importlib.import_module(sys.argv[2]).main(sys.argv[3:])"
)


def judge_apart(
    judged: Path | str, parts: Sequence[str], seconds: float = SECONDS, worker: str = LIBRARY_WORKER
) -> dict[str, str]:
    """Verdicts by part (of verdicts.PARTS, for a library). A part whose test ends its process has failed, and the
    others go on in a new one. `worker` is the module that tests; it is handed what is judged, and the parts.

    Raises OSError where no process can be started."""
    verdicts: dict[str, str] = {}
    while left := [part for part in parts if part not in verdicts]:
        told, ending = _run(worker, judged, left, seconds)
        verdicts |= told if len(told) == len(left) else {**told, left[len(told)]: FAILED + ending}
    return verdicts


def _run(worker: str, judged: Path | str, parts: Sequence[str], seconds: float) -> tuple[dict[str, str], str]:
    """The verdicts of one process, in the order of `parts`, and how it ended."""
    command = [sys.executable, "-c", _START, json.dumps(sys.path), worker, str(judged), *parts]
    try:
        done = subprocess.run(command, capture_output=True, check=False, timeout=seconds)
    except subprocess.TimeoutExpired as error:
        return _told(error.stdout or b""), f"the self-test did not end within {seconds:g} s"
    return _told(done.stdout), _ending(done.returncode, done.stderr)


def _told(output: bytes) -> dict[str, str]:
    return dict(json.loads(line) for line in output.splitlines())


def _ending(code: int, errors: bytes) -> str:
    """In one line, as verdicts are kept."""
    if code < 0:
        return f"the self-test died of {_signal_name(-code)}"
    said = errors.decode(errors="replace").strip().splitlines()
    return f"the self-test ended with exit code {code}" + (f": {said[-1]}" if said else "")


def _signal_name(number: int) -> str:
    try:
        return Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
