"""Print the shell block of README.md that follows the marker `<!-- command: NAME -->`, so CI runs what users read."""

from __future__ import annotations

import re
import sys
from pathlib import Path


def command(text: str, name: str) -> str:
    """The body of the first ```bash block after the marker. Raises SystemExit when there is none."""
    match = re.search(rf"<!-- command: {re.escape(name)} -->\s*```bash\n(.*?)```", text, re.DOTALL)
    if match is None:
        raise SystemExit(f"README.md has no block marked <!-- command: {name} -->")
    return match[1]


if __name__ == "__main__":
    sys.stdout.write(command((Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8"), sys.argv[1]))
