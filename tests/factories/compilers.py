"""Stand-ins for a C++ compiler: scripts that answer `--version`, keep a log, and write what a test wants."""

from __future__ import annotations

from pathlib import Path

SCRIPT = """#!/bin/sh
if [ "$1" = --version ]; then echo "stand-in 1.0"; exit 0; fi
echo compiled >> {log}
while [ "$1" != -o ]; do shift; done
out=$2
{body}
"""


class StandIn:
    """`path` is the compiler; `body` is shell code in which `$out` names the file to write."""

    def __init__(self, folder: Path, body: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self._log = folder / "c++", folder / "log"
        self.path.write_text(SCRIPT.format(log=self._log, body=body))
        self.path.chmod(0o755)

    @property
    def compilations(self) -> int:
        return len(self._log.read_text().splitlines()) if self._log.exists() else 0


def copying(folder: Path, library: Path) -> StandIn:
    """A compiler whose result is a library that is there already."""
    return StandIn(folder, f"cp {library} $out")


def failing(folder: Path, message: str) -> StandIn:
    return StandIn(folder, f"echo '{message}' >&2; exit 1")
