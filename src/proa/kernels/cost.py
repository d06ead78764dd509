"""What a forward costs by its number of rows: one measured value per runner, and the file that keeps it. No torch.

Measured, hence beside the plan and never in its digest. Owns no clock: speculative/costs.py measures.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, cast

from proa.kernels import host

KERNELS = Path(__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTable:
    """Seconds of one forward at decode-like contexts, by rows: `rows` ascend, `seconds` never fall.

    Between two entries the cost is interpolated, after the last it goes on as between the last two.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.rows or len(self.rows) != len(self.seconds):
            raise ValueError("a cost table needs as many seconds as rows, and one of each at least")
        if self.rows[0] < 1 or any(later <= row for row, later in zip(self.rows, self.rows[1:], strict=False)):
            raise ValueError("the rows of a cost table must be positive and ascend")
        rises = all(cost <= later for cost, later in zip(self.seconds, self.seconds[1:], strict=False))
        if not rises or not 0 < self.seconds[0] <= self.seconds[-1] < float("inf"):
            raise ValueError("the seconds of a cost table must be positive and never fall")

    @classmethod
    def measured(cls, samples: Sequence[tuple[int, float]]) -> CostTable:
        """From (rows, seconds) in ascending rows. Fewer rows cost no more: what seems to was disturbed, and noise only
        ever adds time."""
        seconds = [min(cost for _, cost in samples[index:]) for index in range(len(samples))]
        return cls(rows=tuple(rows for rows, _ in samples), seconds=tuple(seconds))

    def of(self, rows: int) -> float:
        """Seconds of a forward with that many rows; 0 rows cost nothing."""
        if rows <= self.rows[0]:
            return self.seconds[0] if rows > 0 else 0.0
        if len(self.rows) == 1:
            return self.seconds[0] * rows / self.rows[0]
        right = min(bisect_left(self.rows, rows), len(self.rows) - 1)
        left = right - 1
        slope = (self.seconds[right] - self.seconds[left]) / (self.rows[right] - self.rows[left])
        return self.seconds[left] + slope * (rows - self.rows[left])

    @property
    def digest(self) -> str:
        text = json.dumps([self.rows, self.seconds])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_json(self) -> dict[str, Any]:
        return {"rows": list(self.rows), "seconds": list(self.seconds), "digest": self.digest}

    def __str__(self) -> str:
        """`1 row 4.10 ms, 2 x1.03, 4 x1.10, 8 x1.31 (costs 1a2b3c4d)`."""
        base = self.seconds[0]
        first = f"{self.rows[0]} row{'s' if self.rows[0] > 1 else ''} {1000 * base:.3g} ms"
        later = (f"{row} x{cost / base:.2f}" for row, cost in zip(self.rows[1:], self.seconds[1:], strict=True))
        return f"{', '.join([first, *later])} (costs {self.digest[:8]})"


def cost_path(cache_dir: Path, plan_digest: str, threads: int, root: Path = Path("/")) -> Path:
    """Where the table of this runner on this machine lies, or would.

    The name covers model and decisions (the plan's digest), threads, the source of all kernels, torch and the CPU.
    """
    return cache_dir / "costs" / f"{host_digest((plan_digest, str(threads)), root)}.json"


def host_digest(words: Sequence[str], root: Path) -> str:
    """Of `words`, the source of all kernels, torch and the CPU: what a time that was measured here depends on."""
    digest = hashlib.sha256()
    for word in (*words, _version("torch"), host.platform_name(), _cpu(root), *host.isa_flags(root)):
        digest.update(word.encode() + b"\0")
    for source in sorted(path for path in KERNELS.rglob("*") if path.suffix in (".py", ".cpp", ".h", ".hpp")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:24]


def read_costs(path: Path, note: Callable[[str], None]) -> CostTable | None:
    """The table in that file; None, with a note that names the file, where it holds something else."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        note(f"{path}: not readable: {error.strerror}; costs are measured anew")
        return None
    try:
        return _parsed(json.loads(text))
    except (ValueError, TypeError, KeyError) as error:
        note(f"{path}: not a cost table ({type(error).__name__}: {error}); costs are measured anew")
        return None


def write_costs(path: Path, table: CostTable, note: Callable[[str], None]) -> None:
    """Keep the table for the next start."""
    write_json(path, table.to_json(), note)


def write_json(path: Path, document: Mapping[str, Any], note: Callable[[str], None]) -> None:
    """Replace the file whole. A directory that cannot be written to costs time, nothing else."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        with os.fdopen(handle, "w") as file:
            json.dump(document, file)
        Path(name).replace(path)
    except OSError as error:
        note(f"{path}: what was measured could not be kept: {error.strerror}")


def _parsed(data: object) -> CostTable:
    given = cast("dict[str, Any]", data)
    rows, seconds = tuple(given["rows"]), tuple(given["seconds"])
    if not all(type(row) is int for row in rows) or not all(type(cost) is float for cost in seconds):
        raise ValueError("rows must be whole numbers and seconds fractions")
    table = CostTable(rows=rows, seconds=seconds)
    if given["digest"] != table.digest:
        raise ValueError(f"its digest is {table.digest}, not {given['digest']!r}")
    return table


def _cpu(root: Path) -> str:
    """The processor's name and how many cores of it are ours."""
    try:
        lines = (root / "proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    names = sorted({line.partition(":")[2].strip() for line in lines if line.startswith("model name")})
    return f"{names} {host.usable_cores(root)}"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"
