"""Line budgets: no file over 400 lines, no folder over its budget. Growth is decided here, not by drift."""

from __future__ import annotations

import sys
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "src" / "proa"
FILE_LIMIT = 400
# What each folder has, with little room above it: more is a decision, made here.
FOLDERS = {
    "arch": 4300,
    "cache": 1600,
    "bench": 490,
    "checkpoint": 2600,
    "cli": 1300,
    "config": 700,
    "dist": 360,
    "engine": 3000,
    "evals": 250,
    "kernels": 6800,
    "layers": 2140,
    "loading": 1550,
    "observe": 240,
    "plan": 4500,
    "runner": 630,
    "sampling": 800,
    "speculative": 1800,
}


def count(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def main() -> int:
    problems: list[str] = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if (lines := count(path)) > FILE_LIMIT:
            problems.append(
                f"{path.relative_to(PACKAGE)}: {lines} lines, the limit is {FILE_LIMIT}: split it by purpose"
            )
    for folder in sorted(p.name for p in PACKAGE.iterdir() if p.is_dir() and p.name != "__pycache__"):
        total = sum(count(path) for path in (PACKAGE / folder).rglob("*.py"))
        if folder not in FOLDERS:
            problems.append(f"{folder}/: no budget: place it in ARCHITECTURE.md and here")
        elif total > FOLDERS[folder]:
            problems.append(f"{folder}/: {total} lines, the budget is {FOLDERS[folder]}")
    print("\n".join(problems) if problems else "tools/budget.py: every file and folder is within its budget")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
