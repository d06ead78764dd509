"""Results as files: the host, the time, every raw value. Owns the form of benchmarks/results/*.json."""

from __future__ import annotations

import json
import platform
import re
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def save(name: str, document: dict[str, Any], folder: Path = RESULTS) -> Path:
    """Write `document` with the facts of this host. An older file of the same name is replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{re.sub(r'[^a-z0-9.]+', '-', name.lower())}.json"
    entry = {"made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "host": host(), **document}
    path.write_text(json.dumps(entry, indent=1) + "\n", encoding="utf-8")
    return path


def host() -> dict[str, Any]:
    return {"cpu": _cpu(), "system": platform.platform(terse=True), "python": platform.python_version()}


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8") if info.exists() else ""
    facts = [re.search(rf"{key}\s*:\s*(.+)", text) for key in ("model name", "cpu family", "model")]
    return ", ".join(found[1] for found in facts if found) or platform.processor() or platform.machine()
