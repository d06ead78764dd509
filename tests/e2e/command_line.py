"""Runs `proa` as a user does, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SOURCES = Path(__file__).parents[2] / "src"


def proa(*arguments: str | Path, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """One command line; `environment` adds variables."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PROA_")}
    path = os.pathsep.join(filter(None, [str(SOURCES), kept.get("PYTHONPATH", "")]))
    return subprocess.run(
        [sys.executable, "-m", "proa", *map(str, arguments)],
        input=stdin,
        text=True,
        capture_output=True,
        env={**kept, "PYTHONPATH": path, **environment},
        timeout=120,
    )
