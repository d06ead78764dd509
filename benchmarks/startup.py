"""From the start of the process to the first token on its stdout: `python benchmarks/startup.py`. Seconds, peak memory.

`first`: empty cache directory (kernels are compiled, nothing is known of this host) and the model's pages dropped from
the page cache. `cold pages`: caches are there, the model's pages are not. `warm`: both are.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory, TemporaryFile

from record import RESULTS, save
from workload import model_path


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    seconds: float
    peak_bytes: int


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["smollm2-q4_0", "smollm2-bf16", "qwen3-0.6b-bf16"])
    parser.add_argument("--models", type=Path, default=Path("build/benchmarks/models"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    document = {}
    print(f"{'model':>18}{'first':>9}{'cold pages':>12}{'warm':>9}{'peak MB':>9}")
    for model in args.model:
        path = model_path(args.models, model, "proa")
        with TemporaryDirectory() as cache:
            drop_pages(path)
            first = start(path, args.threads, cache)
            drop_pages(path)
            cold = start(path, args.threads, cache)
            warm = [start(path, args.threads, cache) for _ in range(args.rounds)]
        document[model] = {"first": asdict(first), "cold_pages": asdict(cold), "warm": [asdict(one) for one in warm]}
        peak = max(one.peak_bytes for one in (first, cold, *warm)) / 1e6
        seconds = median(one.seconds for one in warm)
        print(f"{model:>18}{first.seconds:9.2f}{cold.seconds:12.2f}{seconds:9.2f}{peak:9.0f}", flush=True)
    facts = {"threads": args.threads, "starts": document}
    print("raw values:", save("startup", facts, args.results))
    return 0


def start(path: Path, threads: int, cache: str) -> Start:
    options = ["--raw", "--temperature", "0", "--max-tokens", "1", "--threads", str(threads)]
    command = [sys.executable, "-m", "proa", "run", str(path), "The capital of France is", *options]
    began = time.perf_counter()
    environ = {**os.environ, "PROA_CACHE_DIR": cache}
    with TemporaryFile() as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=environ)
        token = process.stdout.read(1) if process.stdout else b""
        seconds = time.perf_counter() - began
        # Not communicate(): only wait4 tells what this one process has used.
        _, status, usage = os.wait4(process.pid, 0)
        errors.seek(0)
        if not token or status:
            raise SystemExit(f"proa run {path} ended with status {status}: {errors.read().decode()[-600:]}")
    unit = 1 if sys.platform == "darwin" else 1024
    return Start(seconds=seconds, peak_bytes=usage.ru_maxrss * unit)


def drop_pages(path: Path) -> None:
    """Ask the system to forget the file's pages; only clean ones go, and it may refuse without saying so."""
    for file in path.iterdir() if path.is_dir() else (path,):
        handle = os.open(file, os.O_RDONLY)
        try:
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


if __name__ == "__main__":
    sys.exit(main())
