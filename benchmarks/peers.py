"""Proa against one peer, in turns: `python benchmarks/peers.py --peer llama.cpp --model smollm2-bf16`.

Both engines stay loaded, each in its own process and environment; one sleeps while the other is measured. What a pair
is worth is pairing.py's; see README.md for the protocol.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from client import Side
from install import PEERS, install, python_of
from models import read_manifest
from pairing import Pair, as_json, collect, measure_pair
from record import RESULTS, save
from workload import CASES, model_path

from proa.bench.probe import Probe

ROOT = Path("build/benchmarks")
ATTEMPTS_PER_ROUND = 2
WARM_UPS = 1


def main() -> int:
    args = arguments()
    if args.install:
        install(args.install, (args.into or ROOT / "peers" / args.install).resolve(), args.source)
        return 0
    if not args.peer:
        raise SystemExit("--peer or --install: which one?")
    document = run(args)
    print("\n".join(table(document)))
    print("raw values:", save(f"{args.model}-{args.peer}", document, args.results))
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", choices=tuple(PEERS), help="measure against this engine")
    parser.add_argument("--python", type=Path, help="the peer's interpreter (default: its environment in build/)")
    parser.add_argument("--model", default="smollm2-bf16", help="NAME-DTYPE: smollm2 or qwen3-0.6b, bf16, q8_0 or q4_0")
    parser.add_argument("--models", type=Path, default=ROOT / "models", help="where models.py put them")
    parser.add_argument("--cases", default=",".join(CASES), help="comma list of " + ", ".join(CASES))
    parser.add_argument("--rounds", type=int, default=5, help="pairs to keep per case")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--install", choices=tuple(PEERS), help="create this peer's environment, and nothing else")
    parser.add_argument("--into", type=Path, help="directory of the environment (default build/benchmarks/peers/PEER)")
    parser.add_argument("--source", type=Path, help="ik_llama.cpp: an existing clone")
    return parser.parse_args()


def run(args: argparse.Namespace) -> dict[str, Any]:
    cases = args.cases.split(",")
    if unknown := set(cases) - set(CASES):
        raise SystemExit(f"no such case: {', '.join(sorted(unknown))}; cases: {', '.join(CASES)}")
    python = args.python or python_of(ROOT / "peers" / args.peer)
    with ExitStack() as stack:
        probe = stack.enter_context(Probe(args.threads))
        ours = Side(
            "proa", "proa_side.py", Path(sys.executable), model_path(args.models, args.model, "proa"), args.threads
        )
        stack.enter_context(ours)
        path = model_path(args.models, args.model, args.peer)
        theirs = stack.enter_context(Side(args.peer, PEERS[args.peer].script, python, path, args.threads))
        figures = {case: as_json(measure_case(ours, theirs, probe, case, args.rounds)) for case in cases}
        return {
            "model": args.model,
            "threads": args.threads,
            "bytes_per_token": read_manifest(args.models, args.model),
            "cases": figures,
            "engines": [ours.describe(), theirs.describe()],
        }


def measure_case(ours: Side, theirs: Side, probe: Probe, case: str, rounds: int) -> list[Pair]:
    work = CASES[case]
    for side in (ours, theirs):
        for index in range(WARM_UPS):
            side.rate(work, f"{case}/warm-up {index}")

    def measure(index: int) -> Pair:
        seed = f"{case}/{index}"
        pair = measure_pair(partial(ours.rate, work, seed), partial(theirs.rate, work, seed), probe)
        print(f"{case:>10}  {progress(pair)}", file=sys.stderr, flush=True)
        return pair

    return collect(measure, rounds, ATTEMPTS_PER_ROUND * rounds)


def progress(pair: Pair) -> str:
    if not pair.is_measured:
        return "dropped: a long answer took no longer than a short one"
    note = "" if pair.is_steady else f"   dropped: the probes differ by {pair.spread:.0%}"
    return f"{pair.left:9.1f} {pair.right:9.1f}  {pair.ratio:5.2f}{note}"


def table(document: dict[str, Any]) -> list[str]:
    ours, theirs = document["engines"]
    lines = [f"{document['model']}, {document['threads']} threads"]
    for engine in (ours, theirs):
        peak = f", peak {engine['peak_bytes'] / 1e6:.0f} MB" if engine["peak_bytes"] else ""
        lines.append(f"{engine['engine']}: {engine['version']}; loaded in {engine['load_seconds']:.1f} s{peak}")
    lines.append(
        f"{'tok/s':>10}{'proa':>10}{theirs['engine']:>14}{'ratio':>7}{'from - to':>14}{'kept':>6}{'bandwidth':>16}"
    )
    return lines + [case_line(name, case, document["bytes_per_token"]) for name, case in document["cases"].items()]


def case_line(name: str, case: dict[str, Any], nbytes: int) -> str:
    """The last column, at batch 1 only: weight bytes per second, and its part of the bandwidth probed beside it."""
    kept = f"{case['kept']}/{case['kept'] + case['dropped']}"
    if case["ratio"] is None:
        return f"{name:>10}  every pair was dropped ({kept} kept): the host is not steady enough"
    spread = f"{case['lowest_ratio']:.2f} - {case['highest_ratio']:.2f}"
    moved = case["left"] * nbytes / 1e9
    roof = f"{moved:.0f} GB/s {moved / case['probe']:.0%}" if name == "b1" else f"probe {case['probe']:.0f} GB/s"
    return f"{name:>10}{case['left']:10.1f}{case['right']:14.1f}{case['ratio']:7.2f}{spread:>14}{kept:>6}{roof:>16}"


if __name__ == "__main__":
    sys.exit(main())
