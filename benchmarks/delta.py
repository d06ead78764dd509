"""A decode step of linear attention, native against torch: `python benchmarks/delta.py`. Tokens per second, one layer.

Two opponents. `matmul`: the rule alone by torch's matrix products, on contiguous states and in place; it does no
convolution, gate, norm or slot, all of which are in the native figure. `torch`: the kernel of that name, which does all
of it. What is timed is a sweep over so many layers that no cache holds their states, as in a model; the native one is
recorded, as a model's is.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from itertools import cycle
from math import prod
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from pairing import Pair, as_json, collect, measure_pair
from record import RESULTS, save

from proa.arch.blocks import NormSpec
from proa.arch.delta_blocks import Decay, DeltaSpec, OutputGate
from proa.bench.probe import Probe
from proa.env import read_environment
from proa.kernels.caps import read_caps
from proa.kernels.delta import DeltaRows, DeltaState, DeltaWeights, StateSlots
from proa.kernels.memory import empty
from proa.kernels.native.abi import load_library
from proa.kernels.native.delta import NativeDelta, state_rows
from proa.kernels.native.sink import Program, Recorder
from proa.kernels.probing.probe import probe
from proa.kernels.reference.delta import Operands, TorchDelta, matmul_step, prepare
from proa.kernels.seam import Segment
from proa.units import Phase

KINDS = {"gdn": Decay.HEAD, "kda": Decay.CHANNEL}
HEADS, HEAD_DIM, TAPS = 32, 128, 4
COLD_BYTES = 192 << 20
"""States that a sweep reads: several times the last cache of a desktop or of a share of a server."""
SECONDS = 0.3
"""Of one measurement, about."""
ATTEMPTS_PER_ROUND = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A decode step of `batch` requests in each of some layers. A layer's state has two slots per request: states go
    from one to the other and back."""

    spec: DeltaSpec
    batch: int
    rows: DeltaRows
    weights: DeltaWeights
    layers: tuple[DeltaState, ...]
    segment: Segment
    slots: tuple[StateSlots, StateSlots]

    @property
    def tokens(self) -> int:
        """Of a sweep: one for each layer and request."""
        return self.batch * len(self.layers)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=tuple(KINDS), default=list(KINDS))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--rounds", type=int, default=7, help="pairs to keep per line")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    library = native_library()
    heads = f"{'':>5}{'batch':>6}{'against':>8}{'native':>10}{'other':>10}{'ratio':>7}"
    print(f"{heads}{'from - to':>14}{'kept':>6}{'states':>16}")
    document: dict[str, Any] = {}
    with Probe(args.threads) as roof:
        for kind in args.kinds:
            for batch in args.batch:
                work = make(KINDS[kind], batch)
                native = native_sweep(library, work)
                for name, sweep in {"matmul": matmul_sweep(work), "torch": torch_sweep(work)}.items():
                    figures = as_json(measure(native, sweep, work.tokens, roof, args.rounds))
                    document[f"{kind}/{batch}/{name}"] = figures
                    print(line(kind, batch, name, figures, 2 * 4 * prod(work.spec.state_shape)), flush=True)
    facts = {"heads": HEADS, "head_dim": HEAD_DIM, "threads": args.threads, "torch": torch.__version__}
    print("raw values:", save("delta-decode", {**facts, "cases": document}, args.results))
    return 0


def native_library() -> ctypes.CDLL:
    library = probe(read_caps("cpu"), read_environment().cache_dir, print).library
    if library is None:
        raise SystemExit("the native kernels do not compile here: proa doctor says why")
    return load_library(library)


def make(decay: Decay, batch: int) -> Work:
    """GDN with two value heads to a key head, or KDA; bf16 rows, random but for the first states, which are zero."""
    is_head = decay is Decay.HEAD
    spec = DeltaSpec(
        key_heads=HEADS // 2 if is_head else HEADS,
        value_heads=HEADS,
        key_dim=HEAD_DIM,
        value_dim=HEAD_DIM,
        taps=TAPS,
        decay=decay,
        gate=OutputGate.SILU if is_head else OutputGate.SIGMOID,
        norm=NormSpec(eps=1e-6),
        rank=None if is_head else HEAD_DIM,
    )
    source = torch.Generator().manual_seed(0)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=source)

    width = spec.channels + spec.value_heads + spec.decays + spec.values
    here, there = list(range(batch)), list(range(batch, 2 * batch))
    layers = max(2, COLD_BYTES // (batch * 4 * prod(spec.state_shape)))
    return Work(
        spec=spec,
        batch=batch,
        rows=DeltaRows.merged(values(batch, width).bfloat16(), spec),
        weights=DeltaWeights(
            conv=values(TAPS, spec.channels) / 2,
            rate=values(HEADS).exp(),
            bias=values(spec.decays),
            norm=values(HEAD_DIM),
        ),
        layers=tuple(state_of(spec, 2 * batch) for _ in range(layers)),
        segment=decode_segment(batch),
        slots=(StateSlots.of(here, there), StateSlots.of(there, here)),
    )


def state_of(spec: DeltaSpec, slots: int) -> DeltaState:
    """Zeros, in such memory as a runner's states have."""
    conv = empty((slots, *spec.conv_shape), torch.bfloat16).zero_()
    return DeltaState(conv=conv, delta=empty((slots, *spec.state_shape), torch.float32).zero_(), kept=None)


def decode_segment(batch: int) -> Segment:
    return Segment(
        phase=Phase.DECODE,
        first=0,
        num_rows=batch,
        requests=batch,
        queries=1,
        rows=np.array([[index, 1, 200] for index in range(batch)]),
        tables=np.zeros((batch, 1), dtype=np.int32),
        pad=None,
        unpad=None,
        views={},
    )


def native_sweep(library: ctypes.CDLL, work: Work) -> Callable[[], None]:
    recorder = Recorder(work.batch)
    ops = NativeDelta(recorder)
    for state in work.layers:
        ops.delta(work.rows, work.weights, work.spec, state, work.segment, work.slots[0])
    program = Program(library, recorder, {})
    counts = np.ones(work.batch, dtype=np.int64)
    turns = cycle([(slots, state_rows(counts, slots)) for slots in work.slots])
    return lambda: program.run(work.batch, {"states": next(turns)[1]})


def torch_sweep(work: Work) -> Callable[[], None]:
    ops, turns = TorchDelta(), cycle(work.slots)

    def sweep() -> None:
        slots = next(turns)
        for state in work.layers:
            ops.delta(work.rows, work.weights, work.spec, state, work.segment, slots)

    return sweep


def matmul_sweep(work: Work) -> Callable[[], None]:
    """The rule alone by matrix products, on states [B, Hv, dk, dv]; its operands are ready before the clock starts."""
    state = state_of(work.spec, 2 * work.batch)
    ones = np.ones(work.batch, dtype=np.int64)
    made = prepare(work.rows.mixed, work.rows.decay, work.weights, work.spec, state, ones, work.slots[0])
    row = Operands(**{part.name: getattr(made, part.name).contiguous() for part in fields(Operands)})

    def sweep() -> None:
        for layer in work.layers:
            matmul_step(layer.delta[: work.batch], row)

    return sweep


def measure(ours: Callable[[], None], theirs: Callable[[], None], tokens: int, roof: Probe, rounds: int) -> list[Pair]:
    left, right = (partial(rate, sweep, tokens, number(sweep)) for sweep in (ours, theirs))
    return collect(lambda _: measure_pair(left, right, roof), rounds, ATTEMPTS_PER_ROUND * rounds)


def number(sweep: Callable[[], None]) -> int:
    """Sweeps that take about SECONDS; two, so that states have been both ways, come before the count."""
    rate(sweep, 1, 2)
    return max(2, round(SECONDS * rate(sweep, 1, 2)))


def rate(sweep: Callable[[], None], tokens: int, count: int) -> float:
    start = perf_counter()
    for _ in range(count):
        sweep()
    return count * tokens / (perf_counter() - start)


def line(kind: str, batch: int, name: str, figures: dict[str, Any], nbytes: float) -> str:
    """The last column: bytes of states moved per second, and their part of the bandwidth probed beside them."""
    kept = f"{figures['kept']}/{figures['kept'] + figures['dropped']}"
    head = f"{kind:>5}{batch:>6}{name:>8}"
    if figures["ratio"] is None:
        return f"{head}  every pair was dropped ({kept} kept): the host is not steady enough"
    moved = figures["left"] * nbytes / 1e9
    spread = f"{figures['lowest_ratio']:.1f} - {figures['highest_ratio']:.1f}"
    numbers = f"{figures['left']:10.0f}{figures['right']:10.0f}{figures['ratio']:7.1f}{spread:>14}{kept:>6}"
    roof = f"{moved:.1f} GB/s {moved / figures['probe']:.0%}"
    return f"{head}{numbers}{roof:>16}"


if __name__ == "__main__":
    sys.exit(main())
