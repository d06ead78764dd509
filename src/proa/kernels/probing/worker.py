"""The other side of apart.py: judges parts of a library in this process, and tells each verdict when it is known."""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Sequence
from pathlib import Path

from proa.kernels.probing.probe import self_test


def main(arguments: Sequence[str]) -> None:
    """`LIBRARY PART...` -> a line `["part", "verdict"]` for each on stdout."""
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, most))  # a crash is an answer here, nothing to look into
    for part in arguments[1:]:
        sys.stdout.write(json.dumps([part, self_test(Path(arguments[0]), part)]) + "\n")
        sys.stdout.flush()
