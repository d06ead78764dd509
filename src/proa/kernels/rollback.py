"""What undoing a proposal costs in linear attention: a measured value per case, and the file of them. No torch.

Measured, hence beside the plan and never in its digest. Owns no clock: kernels/probing/rollback.py measures.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import cast

from proa.arch.delta_blocks import DeltaSpec
from proa.kernels.cost import host_digest, write_json
from proa.units import DType


@dataclass(frozen=True, slots=True, kw_only=True)
class RollbackCosts:
    """Seconds that a step of speculation spends in linear attention with each way of undoing a recurrent state
    (units.py: Rollback): the mean over every count of accepted tokens, from none to all."""

    replay: float
    states: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RollbackCase:
    """What is measured: the delta `layers` of one runner with the kernels and types of its plan, and a proposal of
    `draft_tokens`, whose rows a draft computes one by one and a target verifies at once. Its text names it in the file.
    """

    decode: str
    verify: str
    dtype: DType
    state_dtype: DType
    layers: tuple[DeltaSpec, ...]
    draft_tokens: int
    is_draft: bool
    threads: int

    @property
    def cuts(self) -> tuple[int, ...]:
        """Rows of each forward. The anchor's is among them; a draft never computes that of its last token."""
        return (1,) * self.draft_tokens if self.is_draft else (1 + self.draft_tokens,)

    def kept(self, accepted: int) -> int:
        """Rows that stay where so many tokens were accepted, the anchor's included."""
        return min(1 + accepted, sum(self.cuts))

    def __str__(self) -> str:
        shapes = (f"{count} x {_shape(spec)}" for spec, count in Counter(self.layers).items())
        words = (
            *shapes,
            f"decode {self.decode}",
            f"verify {self.verify}",
            f"{self.dtype.value}, states {self.state_dtype.value}",
            f"{self.draft_tokens} tokens {'drafted' if self.is_draft else 'verified'}",
            f"threads {self.threads}",
        )
        return "; ".join(words)


def rollback_path(cache_dir: Path, root: Path = Path("/")) -> Path:
    """Where the costs of this machine lie, or would. The name covers the source of all kernels, torch and the CPU."""
    return cache_dir / "costs" / f"rollback-{host_digest((), root)}.json"


_UNMEASURED: Mapping[str, RollbackCosts] = MappingProxyType({})


def read_rollbacks(path: Path, note: Callable[[str], None]) -> Mapping[str, RollbackCosts]:
    """By the text of a RollbackCase, what `path` holds: `{TEXT: {"replay": 0.0012, "states": 0.0015}}`. Empty without
    such a file; a note names a file that holds something else."""
    try:
        given = cast("dict[str, dict[str, float]]", json.loads(path.read_bytes()))
        table = {case: RollbackCosts(**costs) for case, costs in given.items()}
        if not all(0 < cost < float("inf") for costs in table.values() for cost in (costs.replay, costs.states)):
            raise ValueError("seconds must be positive")
    except FileNotFoundError:
        return _UNMEASURED
    except (OSError, ValueError, TypeError, AttributeError) as error:
        note(f"{path}: no table of rollback costs ({type(error).__name__}: {error}); costs are measured anew")
        return _UNMEASURED
    return MappingProxyType(table)


def add_rollbacks(path: Path, measured: Mapping[str, RollbackCosts], note: Callable[[str], None]) -> None:
    """Keep what was measured beside what is there. Of two processes that do so at once one may measure again later."""
    known = read_rollbacks(path, note=lambda text: None)  # a damaged file was named when the plan read it
    write_json(path, {case: asdict(costs) for case, costs in {**known, **measured}.items()}, note)


def _shape(spec: DeltaSpec) -> str:
    """`keys 16x128, values 32x128, 4 taps, decay by head`: all that the work of a row depends on."""
    keys, values = f"keys {spec.key_heads}x{spec.key_dim}", f"values {spec.value_heads}x{spec.value_dim}"
    return f"{keys}, {values}, {spec.taps} taps, decay by {spec.decay.value}"
