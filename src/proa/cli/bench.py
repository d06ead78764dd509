"""`proa bench`: throughput, latency and accept length, in turns with transformers where that is installed."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from proa.cli.output import Output
from proa.config.intent import EngineConfig

if TYPE_CHECKING:
    from proa.bench.offline import Figure
    from proa.bench.peer import Peer
    from proa.llm import LLM

PROBED_BYTES = 2**28
"""More than any cache holds."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--peer", choices=("auto", "none", "transformers"), default="auto",
        help="measure this engine in turns with Proa; auto: transformers where it is installed",
    )  # fmt: skip
    parser.add_argument(
        "--rounds", type=int, default=3, metavar="N", help="repetitions; medians are printed (default 3)"
    )
    parser.add_argument("--prompt-tokens", type=int, default=256, metavar="N", help="prompt of the prefill figure")
    parser.add_argument("--new-tokens", type=int, default=48, metavar="N", help="answer of the decode figures")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8], metavar="B", help="batch sizes (default 1 8)")


def run(args: argparse.Namespace, config: EngineConfig | None, out: Output) -> int:
    from proa.bench.offline import as_json, measure, workloads
    from proa.bench.probe import Probe
    from proa.cli.loading import open_llm

    work = workloads(args.prompt_tokens, args.new_tokens, args.batch)
    with (
        open_llm(config, out, is_cold=True) as llm,
        open_peer(args.peer, llm, out) or nullcontext() as peer,
        Probe(llm.threads, PROBED_BYTES) as probe,
    ):
        figures = measure(llm, peer, work, args.rounds, probe)
        if args.json:
            out.json(as_json(llm, peer, figures))
        else:
            for line in table(llm, peer, figures):
                out.line(line)
    return 0


def open_peer(asked: str, llm: LLM, out: Output) -> Peer | None:
    from proa.bench.peer import Peer, is_installed

    if asked == "none" or (asked == "auto" and not is_installed("transformers")):
        return None
    target = llm.explain()["runners"]["target"]
    out.note("loading the same weights in transformers")
    return Peer("transformers", Path(target["checkpoint"]), dtype=target["dtype"], threads=llm.threads)


def table(llm: LLM, peer: Peer | None, figures: Sequence[Figure]) -> list[str]:
    from proa.bench.offline import roofline

    plan, speculation = llm.explain(), llm.stats()["speculative_decoding"]
    target, step_bytes = plan["runners"]["target"], plan["memory"]["step_bytes"]["target"]
    head = f"{'tok/s':14}{'proa':>10}" + (f"{peer.name:>16}{'ratio':>8}" if peer else "")
    lines = [f"{target['checkpoint']}  {target['dtype']}, {llm.threads} threads", head]
    for figure in figures:
        line = f"{figure.workload.name:14}{figure.proa:10.1f}"
        lines.append(line + (f"{figure.peer:16.1f}{figure.ratio:8.2f}" if figure.ratio is not None else ""))
        if figure.workload.new_tokens:
            lines.append(f"{'  per token':14}{1000 * figure.workload.batch / figure.proa:8.2f} ms")
        # A step that verifies proposals emits more than a token for the same weights.
        if not speculation and (roof := roofline(figure, step_bytes)):
            lines.append(f"{'  weights':14}{roof[0]:10.1f} GB/s, {roof[1]:.0%} of {figure.bandwidth:.1f} probed")
    if speculation:
        lines.append(f"accept length {speculation['mean_acceptance_length']:.2f}")
    return lines
