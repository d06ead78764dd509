"""What a decode step costs besides its arithmetic: `python benchmarks/overhead.py`. Milliseconds per step.

Two numbers make the overhead. `outside`: the step without its forward and its sampling (scheduling, transaction, text).
`dispatch`: the forward of a model as deep as SmolLM2 in which a layer has next to nothing to compute, so that what
remains is building the batch, Python and the calls. Sampling is apart: its work grows with the vocabulary.
"""

from __future__ import annotations

import argparse
import cProfile
import sys
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
    parser.add_argument("--profile", type=Path, help="also write a profile of the narrow model's steps (for pstats)")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    real = open_target(model_path(args.models, args.model, "proa"), args.threads, 0)
    narrow = open_target(model_path(args.models, "narrow-bf16", "proa"), args.threads, 0)
    print(f"{'batch':>6}{'step':>9}{'forward':>9}{'sampling':>9}{'outside':>9}{'dispatch':>9}{'overhead':>9}")
    document = {}
    for batch in args.batch:
        text = prompts(f"overhead/{batch}", batch, PROMPT_TOKENS)
        decode_steps(real, text, 4), decode_steps(narrow, text, 4)
        runs = [
            (decode_steps(real, text, NEW_TOKENS), decode_steps(narrow, text, NEW_TOKENS)) for _ in range(args.rounds)
        ]
        figures = summary(runs)
        document[str(batch)] = figures
        print(f"{batch:>6}" + "".join(f"{value:9.3f}" for value in figures.values()))
    if args.profile:
        profile(lambda: decode_steps(narrow, prompts("overhead/1", 1, PROMPT_TOKENS), 4 * NEW_TOKENS), args.profile)
    facts = {"model": args.model, "threads": args.threads, "milliseconds_by_batch": document}
    print("raw values:", save(f"overhead-{args.model}", facts, args.results))
    return 0


def summary(runs: list[tuple[Steps, Steps]]) -> dict[str, float]:
    def per_step(seconds: list[float], steps: list[Steps]) -> float:
        return median(1000 * value / run.number for value, run in zip(seconds, steps, strict=True))

    real, narrow = [run[0] for run in runs], [run[1] for run in runs]
    outside = per_step([run.seconds - run.forward - run.sampling for run in real], real)
    dispatch = per_step([run.forward for run in narrow], narrow)
    return {
        "step": per_step([run.seconds for run in real], real),
        "forward": per_step([run.forward for run in real], real),
        "sampling": per_step([run.sampling for run in real], real),
        "outside": outside,
        "dispatch": dispatch,
        "overhead": outside + dispatch,
    }


def profile(work: object, path: Path) -> None:
    profiler = cProfile.Profile()
    profiler.runcall(work)
    profiler.dump_stats(path)


if __name__ == "__main__":
    sys.exit(main())
