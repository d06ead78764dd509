"""Prefix reuse: what a new request need not compute, and what is kept of requests for those to come. Torch-free.

Owns when to look and to keep, not the tree (cache/prefix.py) and not what requests hold (cache/tables.py, state.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Protocol

from proa.arch.delta_blocks import BLOCK
from proa.cache.prefix import Held, Match, PrefixTree, Store
from proa.cache.state import StateTables
from proa.cache.state_values import Snapshot
from proa.cache.tables import BlockTables
from proa.engine.request import Request, Status


class CachedRunner(Protocol):
    """What scheduling needs of a runner: who holds what of its cache. `states`: of a model with delta layers."""

    @property
    def tables(self) -> BlockTables: ...

    @property
    def states(self) -> StateTables | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """Known beginnings of a request. `rows`, by runner: where it goes on. `snapshots`: where states are worth keeping,
    in rows."""

    match: Match
    rows: tuple[int, ...]
    snapshots: tuple[int, ...]

    def pages(self, runner: int) -> list[int]:
        return self.match.pages(runner, self.rows[runner])


class PrefixReuse:
    """For the target, the first of `runners`, and with it for a draft that has a runner.

    `is_bound`: the draft lives on hidden rows of the target (speculative/drafters/nextn.py), which nobody keeps. So a
    request that may be drafted for resumes where both runners can. Any other draft computes what it lacks.
    """

    def __init__(self, runners: Sequence[CachedRunner], *, is_bound: bool) -> None:
        self._runners = tuple(runners)
        self._is_bound = is_bound and len(runners) > 1
        stores = [
            Store(
                pool=runner.tables.pool,
                page_size=runner.tables.page_size,
                drop=None if runner.states is None else runner.states.drop,
            )
            for runner in runners
        ]
        # Row i of such a draft joins the hidden row of position i and token i + 1.
        self._tree = PrefixTree(stores, lookahead=int(self._is_bound))
        self._has_states = any(runner.states is not None for runner in runners)
        self._step = lcm(self._tree.unit, BLOCK)
        self._wanted: dict[int, tuple[int, ...]] = {}
        self._finished: dict[int, int] = {}  # how many runners have the whole prompt
        self._limits = [0] * len(self._runners)
        self._num_prompt_tokens = self._num_cached_tokens = 0

    def stats(self) -> dict[str, int]:
        """Prompt tokens of all requests that were admitted, how many of them were in the cache, and what is there."""
        return {
            "num_prompt_tokens": self._num_prompt_tokens,
            "num_cached_tokens": self._num_cached_tokens,
            "num_tokens_kept": self._tree.num_nodes * self._tree.unit,
            "num_snapshots": self._tree.num_snapshots(0),
        }

    # Admission

    def find(self, request: Request) -> Hit:
        """The longest known beginning. One row at least is computed, for its logits; all, where all are wanted."""
        match = self._tree.find(request.tokens(0, request.num_tokens))
        most = 0 if request.wants_prompt_logprobs else request.prefill_rows - 1
        if self._runners[0].states is not None:
            # Generated rows were recurrent, whoever has computed them by blocks since (kernels/delta.py).
            most = min(most, len(request.prompt))
        rows = [match.rows(0, most)]
        if len(self._runners) > 1:
            rows.append(match.rows(1, rows[0]) if request.sampling.params.speculative else 0)
        while self._is_bound and request.sampling.params.speculative and rows[0] != rows[1]:
            rows[0] = match.rows(0, rows[1])
            rows[1] = match.rows(1, rows[0])
        return Hit(match=match, rows=tuple(rows), snapshots=self._snapshots(request, match))

    def _snapshots(self, request: Request, match: Match) -> tuple[int, ...]:
        """After the last block of the prompt, for whoever goes on from it; and where it leaves what is known, for the
        next one that begins like these two."""
        if not self._has_states:
            return ()
        last = len(request.prompt) - 1
        ends = (min(match.known(0), last), last)
        return tuple(sorted({end // self._step * self._step for end in ends} - {0}))

    def adopt(self, request: Request, hit: Hit) -> None:
        """Let the request, which has no rows yet, begin with what was found."""
        for index, runner in enumerate(self._runners):
            runner.tables.adopt(request.request_id, hit.pages(index))
            snapshot = hit.match.snapshot(index, hit.rows[index])
            if runner.states is not None and snapshot is not None:
                runner.states.resume(request.request_id, snapshot)
        self._tree.use(hit.match, hit.rows[0])
        self._wanted[request.request_id] = hit.snapshots
        if request.status is Status.WAITING:
            request.num_cached_tokens = hit.rows[0]
            self._num_prompt_tokens += len(request.prompt)
            self._num_cached_tokens += hit.rows[0]

    # Steps

    def fit(self, limits: Sequence[int]) -> None:
        """Of each runner, this many state slots may hold snapshots until the next call."""
        self._limits = list(limits)
        for index, limit in enumerate(limits):
            self._tree.keep_snapshots(index, limit)

    def snapshots(self, runner: int, request_id: int, rows: range) -> tuple[int, ...]:
        """After how many rows, of `rows` that are about to be computed, a snapshot is to be made. Makes room for it."""
        if self._runners[runner].states is None:
            return ()
        wanted = [end for end in self._wanted.get(request_id, ()) if rows.start < end <= rows.stop]
        wanted = wanted[max(0, len(wanted) - self._limits[runner]) :]
        self._limits[runner] -= len(wanted)
        self._tree.keep_snapshots(runner, self._limits[runner])
        return tuple(wanted)

    def make_room(self, pages: Sequence[int]) -> None:
        """Evict until as many pages of each runner are free."""
        self._tree.make_room(pages)

    def collect(self, requests: Iterable[Request]) -> None:
        """Keep the snapshots that the last transaction made of these requests. After each one, or they are lost."""
        if not self._has_states:
            return
        for request in requests:
            made = [
                () if runner.states is None else runner.states.take_snapshots(request.request_id)
                for runner in self._runners
            ]
            if any(made):
                self._insert(request, made)

    def keep_prompts(self, requests: Iterable[Request]) -> None:
        """Keep the prompts of which a runner has just computed the last row."""
        for request in requests:
            lengths = (runner.tables.length(request.request_id) for runner in self._runners)
            finished = sum(length >= len(request.prompt) for length in lengths)
            if finished > self._finished.get(request.request_id, 0):
                self._finished[request.request_id] = finished
                self.keep(request)

    def keep(self, request: Request) -> None:
        """Keep what the runners have of a request, in full pages."""
        if self._runners[0].tables.length(request.request_id):
            self._insert(request, [()] * len(self._runners))

    def _insert(self, request: Request, snapshots: Sequence[Sequence[Snapshot]]) -> None:
        held = [
            Held(pages=_full_pages(runner.tables, request.request_id), snapshots={one.rows: one for one in made})
            for runner, made in zip(self._runners, snapshots, strict=True)
        ]
        self._tree.insert(request.tokens(0, request.num_tokens), held)

    def forget(self, request_id: int) -> None:
        """The request is over, or begins anew."""
        self._wanted.pop(request_id, None)
        self._finished.pop(request_id, None)


def _full_pages(tables: BlockTables, request_id: int) -> Sequence[int]:
    return tables.pages(request_id)[: tables.length(request_id) // tables.page_size]
