"""What an engine says to the benchmark: JSON lines on stdin and stdout. Owns prompts, timing and peak memory.

A side is a script `X_side.py MODEL THREADS` that calls `serve` with a function which loads its engine. It runs in that
engine's own environment, so this file needs the standard library only.
"""

from __future__ import annotations

import json
import os
import random
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Protocol, TextIO

PREFILL_REPEATS = 3
LOWEST_ID, HIGHEST_ID = 10, 40000
"""Prompt ids lie between these: no special tokens, and within every benchmark model's vocabulary."""


class Engine(Protocol):
    """A loaded model. `version` is what a reader needs to get the same engine."""

    version: str

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> int:
        """Answer all prompts greedily in one batch, EOS ignored. Returns the number of tokens emitted, all together."""
        ...


def serve(load: Callable[[str, int], Engine]) -> None:
    """Load, say so, then answer one measurement per line until stdin ends."""
    replies = _own_stdout()
    start = time.perf_counter()
    engine = load(sys.argv[1], int(sys.argv[2]))
    _write(replies, {"version": engine.version, "load_seconds": time.perf_counter() - start})
    for line in sys.stdin:
        _write(replies, {**measure(engine, **json.loads(line)), "peak_bytes": peak_bytes()})


def measure(engine: Engine, *, batch: int, prompt_tokens: int, new_tokens: int, seed: str) -> dict[str, Any]:
    """Tokens per second of the prompt's forward, or of decoding.

    Decoding is the difference of a long answer and an answer of one token, which leaves the prompt out for every
    engine alike. Each answer has prompts of its own, so that no engine finds them in a prefix cache. Rate 0: the host
    was so unsteady that the long answer took no longer than the short one.
    """
    texts = [prompts(f"{seed}/{index}", batch, prompt_tokens) for index in range(PREFILL_REPEATS)]
    if not new_tokens:
        seconds = [timed(engine, text, 1) for text in texts]
        return {"rate": batch * prompt_tokens / median(seconds), "seconds": seconds}
    short, long = timed(engine, texts[0], 1), timed(engine, texts[1], new_tokens + 1)
    return {"rate": batch * new_tokens / (long - short) if long > short else 0.0, "seconds": [short, long]}


def timed(engine: Engine, text: Sequence[Sequence[int]], new_tokens: int) -> float:
    start = time.perf_counter()
    emitted = engine.generate(text, new_tokens)
    seconds = time.perf_counter() - start
    if emitted != len(text) * new_tokens:
        raise RuntimeError(f"{emitted} tokens were emitted instead of {len(text)} x {new_tokens}")
    return seconds


def prompts(seed: str, batch: int, length: int) -> list[list[int]]:
    """The same ids for the same seed in every Python."""
    source = random.Random(seed)
    return [[source.randrange(LOWEST_ID, HIGHEST_ID) for _ in range(length)] for _ in range(batch)]


def peak_bytes() -> int | None:
    """The most memory that this process and its children have held (VmHWM); None where the system does not say."""
    peaks = [_peak(pid) for pid in _family(os.getpid())]
    return sum(peaks) or None


def _family(pid: int) -> list[int]:
    """The process and its descendants: some engines compute in a process of their own."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    children = [int(child) for children in lists for child in children.read_text().split()]
    return [pid, *(one for child in children for one in _family(child))]


def _peak(pid: int) -> int:
    status = Path(f"/proc/{pid}/status")
    found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.exists() else None
    return int(found[1]) * 1024 if found else 0


def _own_stdout() -> TextIO:
    """Engines print as they like; what they print goes to stderr, and the replies have stdout for themselves."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return replies


def _write(replies: TextIO, entry: dict[str, Any]) -> None:
    replies.write(json.dumps(entry) + "\n")
    replies.flush()
