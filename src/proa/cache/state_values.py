"""What passes between state tables (cache/state.py), the runner and who schedules for it. Values only. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from proa.units import DType

NONE = -1
"""No slot, no row of kept inputs: as in kernels/delta.py."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRoom:
    """What there is for the states of one runner: `slots`, and `kept_rows` of inputs, 0 where each row that may be
    rolled back to has a slot of its own."""

    slots: int
    kept_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpan:
    """Where the state before a request's rows of one forward lies, where those after each row go, and their inputs."""

    source: int
    targets: tuple[int, ...]
    kept: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Apply the inputs in rows `kept` again to the state in `source`; the state after the last goes to `target`."""

    source: int
    kept: tuple[int, ...]
    target: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A state after `rows` rows that outlives its request. `dtype`: of the runner that computed it."""

    number: int
    rows: int
    dtype: DType
