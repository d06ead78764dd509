"""Runners of tiny hybrids, and requests fed through their tables in transactions, as an engine does it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from proa.cache.state_values import Snapshot, StateRoom
from proa.cache.transaction import CacheTransaction
from proa.kernels.delta import DeltaState
from proa.loading.build import build
from proa.loading.progress import Silent
from proa.plan.planned import Planned
from proa.runner.batch import RowSpan
from proa.runner.runner import Runner
from proa.units import Phase, Rollback
from tests.factories.headers import planned
from tests.factories.hybrid_checkpoints import write_hybrid
from tests.factories.native import native_plan, probed

WIDE_VALUES = {"linear_value_head_dim": 32}  # whole vectors of native kernels
KEPT_ROWS, SLOTS, PAGES, VOCAB = 64, 40, 128, 512


def write_tiny_hybrid(family: str, path: Path, **overrides: Any) -> Path:
    """As tests.factories.hybrid_checkpoints, in sizes that native kernels have code for."""
    wide = {} if family == "kimi_linear" else WIDE_VALUES
    return path if path.exists() else write_hybrid(family, path, **wide, **overrides)


def hybrid_plan(path: Path, backend: str, **asks: Any) -> Planned:
    """`backend`: of linear attention; `native` is native throughout, others leave the rest to the reference."""
    if backend == "native":
        return native_plan(path, probed(), matmul_kernel="native", **asks)
    return planned(path, linear_attention=backend, **asks).target


def hybrid_runner(plan: Planned, rollback: Rollback, *, gives_hidden: bool = False) -> Runner:
    """As planned, but for how proposals are undone."""
    chosen = replace(plan.plan, rollback=replace(plan.plan.rollback, value=rollback))
    built = build(plan, Silent(), probed().library, None)
    room = StateRoom(slots=SLOTS, kept_rows=KEPT_ROWS if rollback is Rollback.REPLAY else 0)
    return Runner(chosen, plan.spec, built.model, built.ledger, PAGES, gives_hidden=gives_hidden, room=room)


@dataclass(frozen=True, kw_only=True)
class Rows:
    """What one request does in a step; None keeps all rows. `snapshots` as in StateTables.extend."""

    phase: Phase
    tokens: Sequence[int]
    keep: int | None = None
    snapshots: Sequence[int] = ()


class Served:
    """Requests of one runner by number."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        assert runner.states is not None
        self.tables, self.states = runner.tables, runner.states

    def step(
        self, wanted: Mapping[int, Rows], *, before_commit: Callable[[], None] = lambda: None
    ) -> list[torch.Tensor]:
        """All requests in one forward: the logits of all rows of each."""
        with CacheTransaction(self.runner.participants) as transaction:
            spans = [self._span(request, rows) for request, rows in wanted.items()]
            logits = self.runner.forward(spans).logits
            before_commit()
            transaction.commit({r: len(w.tokens) if w.keep is None else w.keep for r, w in wanted.items()})
        self.states.check()
        return list(logits.split([len(rows.tokens) for rows in wanted.values()]))

    def _span(self, request: int, rows: Rows) -> RowSpan:
        self.tables.reserve(request, len(rows.tokens))
        is_revocable = rows.phase is Phase.VERIFY
        state = self.states.extend(request, len(rows.tokens), is_revocable=is_revocable, snapshots=rows.snapshots)
        assert self.tables.length(request) == self.states.length(request)
        return RowSpan(
            phase=rows.phase,
            tokens=rows.tokens,
            start=self.tables.length(request),
            pages=self.tables.pages(request),
            logits=range(len(rows.tokens)),
            state=state,
        )

    def prefill(self, request: int, tokens: Sequence[int], snapshots: Sequence[int] = ()) -> torch.Tensor:
        return self.step({request: Rows(phase=Phase.PREFILL, tokens=tokens, snapshots=snapshots)})[0]

    def decode(self, request: int, tokens: Sequence[int]) -> torch.Tensor:
        """One by one."""
        logits = [self.step({request: Rows(phase=Phase.DECODE, tokens=[token])})[0] for token in tokens]
        return torch.cat([torch.empty(0, VOCAB), *logits])

    def verify(self, request: int, tokens: Sequence[int], keep: int) -> torch.Tensor:
        return self.step({request: Rows(phase=Phase.VERIFY, tokens=tokens, keep=keep)})[0]

    def resume(self, request: int, like: int, snapshot: Snapshot) -> None:
        """Begin with the rows of another request up to a snapshot of its state, its pages shared."""
        self.tables.adopt(request, self.tables.pages(like)[: self.tables.pages_for(snapshot.rows)])
        self.states.resume(request, snapshot)

    def release(self, request: int) -> None:
        self.tables.release(request)
        self.states.release(request)

    def state(self, request: int) -> list[torch.Tensor]:
        """Copies of the request's committed states, layer by layer."""
        slot = self.states._states[request].slot
        layers = [layer for layer in self.runner._kv.layers if isinstance(layer, DeltaState)]
        return [part[slot].clone() for layer in layers for part in (layer.conv, layer.delta)]

    def spoil_unowned(self) -> None:
        """Fill what nobody owns with NaN: nothing may read it."""
        for layer in self.runner._kv.states():
            for slot in range(self.states.pool.num_pages):
                if not self.states.pool.owners(slot):
                    layer.conv[slot], layer.delta[slot] = float("nan"), float("nan")
            if layer.kept is not None:
                layer.kept.fill_(float("nan"))


def same(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    """Bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
