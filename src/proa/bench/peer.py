"""Another engine to measure against, in a process of its own. Owns the process and its lines, no figures."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

from proa.errors import ConfigError

PEERS = ("transformers",)


def is_installed(name: str) -> bool:
    return find_spec(name) is not None


class Peer:
    """One running peer with the model loaded. A context manager; leaving it ends the process.

    Raises ConfigError when the peer cannot load the model, with the last line that it said.
    """

    def __init__(self, name: str, model: Path, *, dtype: str, threads: int) -> None:
        if not is_installed(name):
            raise ConfigError("bench/no-peer", f"{name} is not installed here.", hint="pip install 'proa[oracle]'")
        self.name = name
        text = (files("proa.bench") / "peers" / f"{name}_decode.py.txt").read_text(encoding="utf-8")
        self._process = subprocess.Popen(
            [sys.executable, "-c", text, str(model), dtype, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            self.version: str = self._reply()["version"]
        except BaseException:
            self.close()
            raise

    def seconds(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> float:
        """Wall seconds for a greedy answer of exactly `new_tokens` tokens to each of the prompts, in one batch."""
        item = {"prompts": [list(prompt) for prompt in prompts], "new_tokens": new_tokens}
        if self._process.stdin is not None:
            self._process.stdin.write(json.dumps(item) + "\n")
            self._process.stdin.flush()
        return self._reply()["seconds"]

    def _reply(self) -> dict[str, Any]:
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            _, errors = self._process.communicate()
            last = errors.strip().splitlines()[-1:] or ["it said nothing"]
            raise ConfigError("bench/peer-failed", f"{self.name} ended before it answered.", facts=last)
        return json.loads(line)

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
        self._process.communicate()

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
