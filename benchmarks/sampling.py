"""Time of drawing tokens, native against reference: `python benchmarks/sampling.py`.

Rows are about as peaked as a language model's: the n-th best of the ids has probability n^-1.5 (`--exponent`) at
temperature 1, 0.4 for the best. Both kernels draw the same tokens; they take turns, and the least time of each counts.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from types import MappingProxyType

import torch
from record import RESULTS, save

from proa.env import read_environment
from proa.kernels import backends
from proa.kernels.caps import read_caps
from proa.kernels.probing.probe import probe
from proa.kernels.seam import Draw, SampleOps

KINDS: Mapping[str, Draw] = MappingProxyType(
    {
        "greedy": Draw(0, 0, 0, 0.0, 1.0, -math.inf),
        "temperature": Draw(0, 0, 0, 0.8, 1.0, -math.inf),
        "top_k": Draw(0, 0, 40, 0.8, 1.0, -math.inf),
        "top_p": Draw(0, 0, 0, 0.8, 0.95, -math.inf),
        "min_p": Draw(0, 0, 0, 0.8, 1.0, math.log(0.05)),
        "top_k+top_p": Draw(0, 0, 20, 0.6, 0.95, -math.inf),
    }
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, nargs="+", default=[49152, 151936])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--exponent", type=float, default=1.5)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    library = probe(read_caps("cpu"), read_environment().cache_dir, print).library
    both = {name: backends.SAMPLING[name](library) for name in ("native", "reference")}
    figures: list[dict[str, object]] = []
    print(f"{'vocab':>7}{'rows':>6}{'threads':>9}  {'draw':12}{'native µs/row':>15}{'reference':>11}{'faster':>8}")
    for vocab in args.vocab:
        for rows in args.rows:
            logits = zipf(rows, vocab, args.exponent)
            for threads in args.threads:
                torch.set_num_threads(threads)
                for name, one in KINDS.items():
                    best = least(both, logits, one, args.rounds)
                    figures.append({"vocab": vocab, "rows": rows, "threads": threads, "draw": name, "us_per_row": best})
                    native, reference = best["native"], best["reference"]
                    print(
                        f"{vocab:>7}{rows:>6}{threads:>9}  {name:12}{native:>15.1f}{reference:>11.1f}"
                        f"{reference / native:>8.1f}",
                        flush=True,
                    )
    print("raw values:", save("sampling", {"figures": figures}, args.results))
    return 0


def zipf(rows: int, vocab: int, exponent: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    ranks = torch.stack([torch.randperm(vocab, generator=generator) for _ in range(rows)])
    return -exponent * (ranks + 1).float().log()


def least(both: Mapping[str, SampleOps], logits: torch.Tensor, one: Draw, rounds: int) -> dict[str, float]:
    """By kernel, microseconds a row. Every round has other keys; the two must agree on its tokens."""
    best = dict.fromkeys(both, math.inf)
    for turn in range(rounds):
        draws = [one._replace(row=row, key=(turn << 32) + row * 7919) for row in range(len(logits))]
        tokens = []
        for name, kernel in both.items():
            start = perf_counter()
            tokens.append(kernel.sample(logits, draws))
            best[name] = min(best[name], (perf_counter() - start) / len(logits) * 1e6)
        if tokens[0] != tokens[1]:
            raise RuntimeError(f"{list(both)} drew {tokens}")
    return best


if __name__ == "__main__":
    sys.exit(main())
