"""What a step costs that verifies 4 or 8 rows, against a step of one row: `python benchmarks/verify.py`.

The proposals are the plain answer, so all are accepted and every step does all of its work.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from inprocess import KnownAnswer, decode_steps, open_target
from pairing import as_json, collect, measure_pair
from record import RESULTS, save
from sides.protocol import prompts
from workload import model_path

from proa.bench.probe import Probe

PROMPT_TOKENS = 32
NEW_TOKENS = 96
"""After the first token; every number of rows below divides it, so that all walk through the same context lengths."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-bf16")
    parser.add_argument("--models", type=Path, default=Path("build/benchmarks/models"))
    parser.add_argument("--rows", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    figures = measure(args)
    print(f"{args.model}, {args.threads} threads; milliseconds of a whole step")
    print(f"{'rows':>6}{'step':>9}{'one row':>9}{'ratio':>7}{'kept':>6}")
    for rows, figure in figures.items():
        kept = f"{figure['kept']}/{figure['kept'] + figure['dropped']}"
        values = "  every pair was dropped"
        if figure["ratio"] is not None:
            values = f"{figure['left']:9.2f}{figure['right']:9.2f}{figure['ratio']:7.2f}"
        print(f"{rows:>6}{values}{kept:>6}")
    document = {"model": args.model, "threads": args.threads, "rows": figures}
    print("raw values:", save(f"verify-{args.model}", document, args.results))
    return 0


def measure(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    opened = open_target(model_path(args.models, args.model, "proa"), args.threads, max(args.rows) - 1)
    text = prompts("verify", 1, PROMPT_TOKENS)
    (answer,) = decode_steps(opened, text, NEW_TOKENS + 1).tokens

    def step(rows: int) -> float:
        drafter = KnownAnswer(answer, PROMPT_TOKENS, rows - 1) if rows > 1 else None
        steps = decode_steps(opened, text, NEW_TOKENS + 1, drafter)
        if steps.number != NEW_TOKENS // rows:
            print(f"{rows} rows: {steps.number} steps, not {NEW_TOKENS // rows}: not all was accepted", file=sys.stderr)
        return steps.milliseconds

    with Probe(args.threads) as probe:
        return {
            str(rows): as_json(
                collect(
                    lambda _, rows=rows: measure_pair(lambda: step(rows), lambda: step(1), probe),
                    args.rounds,
                    2 * args.rounds,
                )
            )
            for rows in args.rows
        }


if __name__ == "__main__":
    sys.exit(main())
