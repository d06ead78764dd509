"""What a decode step costs besides its arithmetic: `python benchmarks/overhead.py`. Milliseconds per step.

A step is `outside` (scheduling, transaction, delivery), `sampling`, and the forward: `batch` (from rows to what the
native program reads), `dispatch` (the program over no rows: its calls, and its threads waiting for each other) and
`arithmetic`, which is all the rest of the program. The overhead is outside, batch and dispatch. Sampling is apart: its
work grows with the vocabulary.
"""

from __future__ import annotations

import argparse
import cProfile
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median

from inprocess import Steps, decode_steps, open_target
from record import RESULTS, save
from sides.protocol import prompts
from workload import model_path

PROMPT_TOKENS, NEW_TOKENS = 32, 64


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-bf16")
    parser.add_argument("--models", type=Path, default=Path("build/benchmarks/models"))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--profile", type=Path, help="also write a profile of steps of one request (for pstats)")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    opened = open_target(model_path(args.models, args.model, "proa"), args.threads, 0)
    document = {}
    for batch in args.batch:
        text = prompts(f"overhead/{batch}", batch, PROMPT_TOKENS)
        decode_steps(opened, text, 4)
        figures = summary([decode_steps(opened, text, NEW_TOKENS) for _ in range(args.rounds)])
        if not document:
            print(f"{'batch':>6}" + "".join(f"{name:>11}" for name in figures))
        document[str(batch)] = figures
        print(f"{batch:>6}" + "".join(f"{value:11.3f}" for value in figures.values()))
    if args.profile:
        profile(lambda: decode_steps(opened, prompts("overhead/1", 1, PROMPT_TOKENS), 4 * NEW_TOKENS), args.profile)
    facts = {"model": args.model, "threads": args.threads, "milliseconds_by_batch": document}
    print("raw values:", save(f"overhead-{args.model}", facts, args.results))
    return 0


def summary(runs: list[Steps]) -> dict[str, float]:
    def per_step(seconds: Callable[[Steps], float]) -> float:
        return median(1000 * seconds(run) / run.number for run in runs)

    return {
        "step": per_step(lambda run: run.seconds),
        "arithmetic": per_step(lambda run: run.program - run.dispatch),
        "sampling": per_step(lambda run: run.sampling),
        "outside": per_step(lambda run: run.seconds - run.forward - run.sampling),
        "batch": per_step(lambda run: run.forward - run.program),
        "dispatch": per_step(lambda run: run.dispatch),
        "overhead": per_step(lambda run: run.seconds - run.sampling - run.program + run.dispatch),
    }


def profile(work: object, path: Path) -> None:
    profiler = cProfile.Profile()
    profiler.runcall(work)
    profiler.dump_stats(path)


if __name__ == "__main__":
    sys.exit(main())
