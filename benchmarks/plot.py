"""Draw what peers.py has measured: `python benchmarks/plot.py --to peers.svg`. Needs matplotlib; measures nothing."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from record import RESULTS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--to", type=Path, default=RESULTS / "peers.svg")
    args = parser.parse_args()
    documents = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(args.results.glob("*.json"))]
    rows = [row for document in documents if "engines" in document for row in rows_of(document)]
    if not rows:
        raise SystemExit(f"{args.results} holds no results of peers.py")
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise SystemExit("plot.py needs matplotlib: pip install matplotlib") from error
    figure, axes = pyplot.subplots(figsize=(8, 1 + 0.28 * len(rows)), layout="constrained")
    labels, ratios, lows, highs = zip(*reversed(rows), strict=True)
    errors = [
        [r - low for r, low in zip(ratios, lows, strict=True)],
        [h - r for r, h in zip(ratios, highs, strict=True)],
    ]
    colours = ["tab:blue" if ratio >= 1 else "tab:orange" for ratio in ratios]
    axes.barh(labels, ratios, xerr=errors, color=colours, ecolor="0.4")
    axes.axvline(1, color="0.2", linewidth=1)
    axes.set_xlabel("tokens per second, Proa / peer: median of pairs, and their range")
    figure.savefig(args.to)
    print(args.to)
    return 0


def rows_of(document: dict[str, Any]) -> list[tuple[str, float, float, float]]:
    """(label, median ratio, lowest, highest) of each case with a kept pair."""
    peer = document["engines"][1]["engine"]
    return [
        (f"{document['model']}  {name}  {peer}", case["ratio"], case["lowest_ratio"], case["highest_ratio"])
        for name, case in document["cases"].items()
        if case["ratio"] is not None
    ]


if __name__ == "__main__":
    sys.exit(main())
