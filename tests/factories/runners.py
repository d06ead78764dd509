"""Built runners of tiny checkpoints, and forwards over them without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from proa.cache.state_values import NONE, StateRoom, StateSpan
from proa.loading.build import build
from proa.loading.progress import Silent
from proa.plan.planned import Planned
from proa.runner.batch import RowSpan
from proa.runner.runner import Runner
from proa.units import Phase, Rollback
from tests.factories.headers import planned

NUM_PAGES = 256


def room_of(plan: Planned) -> StateRoom | None:
    """Slots for many requests, and rows of inputs where the plan keeps them."""
    if not plan.spec.delta_layers:
        return None
    return StateRoom(slots=48, kept_rows=64 if plan.plan.rollback.value is Rollback.REPLAY else 0)


def built_runner(plan: Planned, num_pages: int = NUM_PAGES, *, gives_hidden: bool = False) -> Runner:
    built = build(plan, Silent(), None, None)
    return Runner(
        plan.plan, plan.spec, built.model, built.ledger, num_pages, gives_hidden=gives_hidden, room=room_of(plan)
    )


def runner_of(path: Path, **asks: Any) -> Runner:
    """The target runner of a checkpoint, on the CPU."""
    return built_runner(planned(path, **asks).target)


class Rows:
    """Requests of a runner by number, each with a shuffled block table and two state slots of its own, fed by hand."""

    def __init__(self, runner: Runner, requests: int, rows: int) -> None:
        self.runner = runner
        size = runner.plan.page_size.value
        per_request = -(-rows // size)
        order = torch.randperm(requests * per_request, generator=torch.Generator().manual_seed(0)).tolist()
        self.pages = [order[i * per_request : (i + 1) * per_request] for i in range(requests)]
        self.lengths = [0] * requests
        self._fed = [0] * requests

    def span(self, request: int, phase: Phase, tokens: Sequence[int], logits: Sequence[int] | None = None) -> RowSpan:
        """The next rows of a request; logits of all of them unless said otherwise."""
        start = self.lengths[request]
        self.lengths[request] += len(tokens)
        wanted = range(len(tokens)) if logits is None else logits
        state = None if self.runner.states is None else self._state(request, start, len(tokens))
        return RowSpan(phase=phase, tokens=tokens, start=start, pages=self.pages[request], logits=wanted, state=state)

    def _state(self, request: int, start: int, rows: int) -> StateSpan:
        """From the request's one slot to its other one."""
        source, target = 2 * request + self._fed[request] % 2, 2 * request + (self._fed[request] + 1) % 2
        self._fed[request] += 1
        targets = (*[NONE] * (rows - 1), target)
        return StateSpan(source=source if start else NONE, targets=targets, kept=(NONE,) * rows)

    def prefill(self, request: int, tokens: Sequence[int]) -> torch.Tensor:
        """Logits of all `tokens`, in one chunk."""
        return self.runner.forward([self.span(request, Phase.PREFILL, tokens)]).logits

    def decode(self, tokens: Sequence[int]) -> torch.Tensor:
        """One more token of every request, in one batch."""
        spans = [self.span(request, Phase.DECODE, [token]) for request, token in enumerate(tokens)]
        return self.runner.forward(spans).logits
