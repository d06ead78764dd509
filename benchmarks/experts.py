"""Expert bytes that a step reads, and those per emitted token, by verified rows: `python benchmarks/experts.py`.

Counted, not timed: slots that the reference router names in each layer of each step. Proposals are the plain answer,
so every row is emitted; with a draft that is right less often the bytes per token rise in proportion. A model of random
weights repeats itself, and rows that are alike choose alike: real text touches more experts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from inprocess import KnownAnswer, decode_steps, open_target
from record import RESULTS, save
from sides.protocol import prompts
from workload import model_path

from proa.kernels.seam import MoEOps, Routed

PROMPT_TOKENS, NEW_TOKENS = 32, 48
"""After the first token; every number of rows divides the second."""


class Counted:
    """`inner`, with the number of different slots of every call of its router."""

    def __init__(self, inner: MoEOps) -> None:
        self._inner = inner
        self.name = inner.name
        self.slots: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def route(self, *args: Any, **options: Any) -> Routed:
        routed = self._inner.route(*args, **options)
        self.slots.append(int(routed.slots.unique().numel()))
        return routed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-moe-1b-bf16")
    parser.add_argument("--models", type=Path, default=Path("build/benchmarks/models"))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    figures = measure(args)
    print(f"{args.model}; expert weights read")
    print(f"{'rows':>6}{'experts a layer':>17}{'MB a step':>11}{'MB a token':>12}")
    for rows, (slots, step) in figures.items():
        print(f"{rows:>6}{slots:>17.2f}{step / 1e6:>11.1f}{step / rows / 1e6:>12.1f}")
    document = {"model": args.model, "rows": {str(rows): {"slots": s, "bytes": b} for rows, (s, b) in figures.items()}}
    print("raw values:", save(f"experts-{args.model}", document, args.results))
    return 0


def measure(args: argparse.Namespace) -> dict[int, tuple[float, float]]:
    """By rows: different experts per layer and step, and their bytes over all layers of a step."""
    path = model_path(args.models, args.model, "proa")
    opened = open_target(path, args.threads, max(args.rows) - 1, moe_kernel="reference")
    kernels = opened.target._model.kernels
    spec = opened.resolved.target.spec
    text = prompts("verify", 1, PROMPT_TOKENS)
    (answer,) = decode_steps(opened, text, NEW_TOKENS + 1).tokens
    width = 3 * spec.moe_layers[0].ffn.width * spec.hidden * opened.resolved.target.plan.dtype.value.nbytes(1)
    figures: dict[int, tuple[float, float]] = {}
    for rows in args.rows:
        counted = kernels._moe_ops = Counted(kernels._moe_ops)
        drafter = KnownAnswer(answer, PROMPT_TOKENS, rows - 1) if rows > 1 else None
        decode_steps(opened, text, NEW_TOKENS + 1, drafter)
        kernels._moe_ops = counted._inner
        slots = mean(_decoding(counted.slots, len(spec.moe_layers), NEW_TOKENS // rows))
        figures[rows] = (slots, slots * width * len(spec.moe_layers))
    return figures


def _decoding(slots: Sequence[int], layers: int, steps: int) -> Sequence[int]:
    """Without those of the prompt, whose forward comes first."""
    return slots[-layers * steps :]


if __name__ == "__main__":
    sys.exit(main())
