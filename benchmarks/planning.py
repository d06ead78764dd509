"""What `proa explain` and `proa inspect` of large public models cost: `python -m benchmarks.planning`.

Seconds from the start of the process to its end, those of them on a processor, and its peak memory (VmHWM). The models
are headers without weights, written from tests/golden; `explain` plans for a host with 96 cores and room for them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from benchmarks.record import RESULTS, save
from proa.kernels.caps import caps_to_json
from tests.golden.moe_models import CPU, write_model
from tests.golden.sources import MODELS

# Not os.wait4: what it says of a child's peak begins with what the parent has in memory.
_CHILD = """
import sys, time
from proa.cli.main import main
code = main(sys.argv[1:])
with open("/proc/self/status") as status:
    peak = next(line for line in status if line.startswith("VmHWM"))
print(peak.split()[1], time.process_time(), file=sys.stderr)
sys.exit(code)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    seconds: float
    cpu_seconds: float
    peak_mib: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=[model.name for model in MODELS])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    document: dict[str, dict[str, list[dict[str, float]]]] = {}
    heads = "".join(f"{f'{verb} s':>10}{'cpu':>7}{'MiB':>6}" for verb in ("explain", "inspect"))
    print(f"{'model':>18}{'draft':>7}{heads}")
    for model in MODELS:
        if args.model is not None and model.name not in args.model:
            continue
        with tempfile.TemporaryDirectory() as root:
            path = write_model(Path(root), model)
            caps = Path(root) / "caps.json"
            caps.write_text(json.dumps(caps_to_json(CPU)), encoding="utf-8")
            for draft in ("", "nextn") if model.has_draft else ("",):
                costs = measure(path, caps, draft, args.rounds)
                document[f"{model.name} {draft}".strip()] = {v: [asdict(c) for c in each] for v, each in costs.items()}
                print(f"{model.name:>18}{draft:>7}{''.join(map(cells, costs.values()))}", flush=True)
    print("raw values:", save("planning", {"rounds": args.rounds, "costs": document}, args.results))
    return 0


def measure(model: Path, caps: Path, draft: str, rounds: int) -> dict[str, list[Cost]]:
    """By verb, every round."""
    asks = ["--speculative", draft] if draft else []
    verbs = {
        "explain": ["explain", str(model), "--caps", str(caps), *asks],
        "inspect": ["inspect", str(model), "--weights", "--layers", *asks],
    }
    return {verb: [run(command) for _ in range(rounds)] for verb, command in verbs.items()}


def run(command: list[str]) -> Cost:
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, *command], capture_output=True, text=True, env=dict(os.environ), check=False
    )
    seconds = time.perf_counter() - began
    if not done.stdout:
        raise SystemExit(f"proa {' '.join(command)} ended with status {done.returncode}: {done.stderr[-600:]}")
    peak, cpu = done.stderr.split()[-2:]
    return Cost(seconds=seconds, cpu_seconds=float(cpu), peak_mib=int(peak) / 1024)


def cells(costs: list[Cost]) -> str:
    seconds, cpu = median(one.seconds for one in costs), median(one.cpu_seconds for one in costs)
    return f"{seconds:10.2f}{cpu:7.2f}{max(one.peak_mib for one in costs):6.0f}"


if __name__ == "__main__":
    sys.exit(main())
