"""Throughput and latency of one LLM, alone or in turns with a peer. Owns the workload and the statistics."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from proa.bench.peer import Peer
from proa.errors import ConfigError
from proa.llm import LLM
from proa.sampling.params import SamplingParams

Seconds = Callable[[Sequence[Sequence[int]], int], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """`batch` random prompts of `prompt_tokens` each. `new_tokens` 0: what is measured is the prompt's forward."""

    name: str
    batch: int
    prompt_tokens: int
    new_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """Tokens per second, medians over the rounds. `ratio`: median of Proa / peer within each round. `bandwidth`: GB/s
    that memory gave to a plain read beside them."""

    workload: Workload
    proa: float
    peer: float | None
    ratio: float | None
    bandwidth: float


def workloads(prompt_tokens: int, new_tokens: int, batches: Sequence[int]) -> tuple[Workload, ...]:
    prefill = Workload(name="prefill", batch=1, prompt_tokens=prompt_tokens, new_tokens=0)
    decode = (
        Workload(name=f"decode b{batch}", batch=batch, prompt_tokens=32, new_tokens=new_tokens) for batch in batches
    )
    return prefill, *decode


def measure(
    llm: LLM, peer: Peer | None, work: Sequence[Workload], rounds: int, probe: Callable[[], float]
) -> list[Figure]:
    """Every workload `rounds` times after a warm-up, Proa and the peer in turns, so that both meet the same host; then
    `probe` tells the memory's bandwidth in GB/s."""
    figures = []
    for workload in work:
        prompts = random_prompts(workload, llm.vocab_size)
        sides: list[Seconds] = [lambda p, n: generate_seconds(llm, p, n)]
        if peer is not None:
            sides.append(peer.seconds)
        for side in sides:
            side(prompts, 2)
        measured = [([rate(side, workload, prompts) for side in sides], probe()) for _ in range(rounds)]
        pairs = [pair for pair, _ in measured if min(pair) > 0]
        if not pairs:
            raise ConfigError(
                "bench/too-short",
                f"{workload.name}: the answers are too short to be timed on this host.",
                hint="more of them: --new-tokens, --rounds",
            )
        figures.append(
            Figure(
                workload=workload,
                proa=median(pair[0] for pair in pairs),
                peer=median(pair[1] for pair in pairs) if peer else None,
                ratio=median(pair[0] / pair[1] for pair in pairs) if peer else None,
                bandwidth=median(speed for _, speed in measured),
            )
        )
    return figures


def rate(seconds: Seconds, workload: Workload, prompts: Sequence[Sequence[int]]) -> float:
    """Tokens per second. Decoding is timed as the difference to an answer of one token, which leaves the prompt out;
    0 where noise hides that difference."""
    first = seconds(prompts, 1)
    if not workload.new_tokens:
        return workload.batch * workload.prompt_tokens / first
    later = seconds(prompts, workload.new_tokens + 1) - first
    return workload.batch * workload.new_tokens / later if later > 0 else 0.0


def generate_seconds(llm: LLM, prompts: Sequence[Sequence[int]], new_tokens: int) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    start = time.perf_counter()
    llm.generate([list(prompt) for prompt in prompts], params)
    return time.perf_counter() - start


def random_prompts(workload: Workload, vocab: int) -> list[list[int]]:
    """The same ids in every run: figures of two versions can be compared."""
    source = random.Random(workload.name)
    return [[source.randrange(10, vocab) for _ in range(workload.prompt_tokens)] for _ in range(workload.batch)]


def roofline(figure: Figure, step_bytes: int) -> tuple[float, float] | None:
    """GB/s of weights that plain decoding of one request reads, and which part of the bandwidth that is; None for other
    workloads."""
    if not figure.workload.new_tokens or figure.workload.batch > 1:
        return None
    read = figure.proa * step_bytes / 1e9
    return read, read / figure.bandwidth


def as_json(llm: LLM, peer: Peer | None, figures: Sequence[Figure]) -> dict[str, Any]:
    target = llm.explain()["runners"]["target"]
    return {
        "model": target["checkpoint"],
        "dtype": target["dtype"],
        "threads": llm.threads,
        "digest": llm.explain()["digest"],
        "peer": {"name": peer.name, "version": peer.version} if peer else None,
        "tokens_per_second": {
            figure.workload.name: {"proa": figure.proa, "peer": figure.peer, "ratio": figure.ratio}
            for figure in figures
        },
        "bandwidth": {figure.workload.name: figure.bandwidth for figure in figures},
        "step_bytes": llm.explain()["memory"]["step_bytes"]["target"],
        "speculative_decoding": llm.stats()["speculative_decoding"],
        "kernel_calls": llm.stats()["kernel_calls"],
    }
