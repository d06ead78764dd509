"""Recurrent states of one runner: which slot holds whose state, committed and tentative; snapshots. Torch-free.

Owns slot numbers and row counts, not the tensors (cache/kv.py). A state has no positions to cut, so nothing here writes
where a committed state lies: a step reads it and leaves new ones elsewhere. A request has one committed slot; what a
step wrote becomes that slot by `keep`, and nothing by `undo`.

Rollback to a row inside of a forward is by one of two ways, as the runner's plan says. `states`: every such row has a
slot of its own. `replay`: the inputs of the rows are kept, and those of accepted rows applied again, within `keep`. So
inputs live no longer than their step, no forward has to look for unfinished work, and should a replay fail, its source
is still there for `undo`. The price is one replay that nobody reads per request that finishes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from proa.arch.delta_blocks import BLOCK
from proa.cache.pages import PagePool
from proa.cache.state_values import NONE, Replay, Snapshot, StateRoom, StateSpan
from proa.errors import CacheExhausted
from proa.units import DType


@dataclass(slots=True)
class _Row:
    """A tentative row: the slot of the state after it, and the row of its inputs, where there are such."""

    slot: int
    kept: int


@dataclass(frozen=True, slots=True)
class _State:
    """Committed: the state after `rows` rows lies in `slot`."""

    rows: int
    slot: int


@dataclass(slots=True)
class _Step:
    """What the open transaction did to a request. Snapshots: number -> tentative rows before it."""

    before: _State | None
    rows: list[_Row] = field(default_factory=list[_Row])
    settled: int = 0
    snapshots: dict[int, int] = field(default_factory=dict[int, int])
    span: StateSpan | None = None

    @property
    def start(self) -> int:
        return self.before.rows if self.before else 0

    @property
    def slots(self) -> Iterator[int]:
        return (row.slot for row in self.rows if row.slot != NONE)


class StateTables:
    """A participant of the step's transaction, beside the runner's block tables: states become permanent by `keep`."""

    def __init__(self, room: StateRoom, dtype: DType, replay: Callable[[Sequence[Replay]], None]) -> None:
        """`replay` carries replays out. They read committed and tentative states, and write tentative ones."""
        self.pool = PagePool(room.slots)
        self.room = room
        self._dtype, self._replay = dtype, replay
        self._states: dict[int, _State] = {}
        self._snapshots: dict[int, tuple[Snapshot, int]] = {}
        self._steps: dict[int, _Step] = {}
        self._made: dict[int, list[Snapshot]] = {}  # by the last `keep`
        self._retired: list[int] = []  # given up by the last `keep`, and needed again if it is undone
        self._num_kept = 0
        self._next_snapshot = 0
        self._is_open = False

    # What stands where

    def has(self, request_id: int) -> bool:
        return request_id in self._states

    def length(self, request_id: int) -> int:
        """Committed rows; 0 for a request that has none yet."""
        state = self._states.get(request_id)
        return state.rows if state else 0

    def span(self, request_id: int) -> StateSpan:
        """The rows that the last `extend` of this transaction made room for."""
        step = self._steps.get(request_id)
        if not self._is_open or step is None or step.span is None:
            raise RuntimeError(f"request {request_id} was not extended in this transaction")
        return step.span

    def slots_for(self, rows: int, *, is_revocable: bool) -> int:
        """Slots that `rows` rows of one forward take at most, beside the committed one."""
        return rows if is_revocable and not self._keeps_inputs else 1

    @property
    def free_slots(self) -> int:
        freed = [slot for slot, times in Counter(self._retired).items() if self.pool.owners(slot) == times]
        return self.pool.num_free + len(freed)

    # The transaction

    def mark(self) -> None:
        if self._is_open:
            raise RuntimeError("these state tables are in a transaction already")
        self._forget_step()
        self._made.clear()
        self._is_open = True

    def extend(self, request_id: int, rows: int, *, is_revocable: bool, snapshots: Sequence[int] = ()) -> StateSpan:
        """Room for the request's next forward: `rows` rows after its last one, tentative or committed.

        `is_revocable`: any number of them may be kept, as of proposed tokens; else all or none. `snapshots` are counts
        of rows from the request's first one on: the states after them become snapshots by `keep` (`take_snapshots`).
        They lie among these rows, which must not be revocable, at multiples of the block of a prefill.
        Raises CacheExhausted, and changes nothing, when slots or rows for inputs are missing.
        """
        if not self._is_open or rows < 1:
            raise RuntimeError(f"request {request_id}: {rows} rows cannot be added, or not outside of a transaction")
        step = self._steps.get(request_id) or _Step(before=self._states.get(request_id))
        wanted = self._snapshot_rows(request_id, step, rows, snapshots, is_revocable=is_revocable)
        in_place = self._is_spare(step)
        with_state = self._rows_with_state(rows, wanted, is_revocable=is_revocable)
        source = self._source(step)
        slots = self._allocate(len(with_state) - in_place)
        slots += [source] if in_place else []
        kept = self._take_kept(rows if is_revocable and self._keeps_inputs else 0, slots[: len(slots) - in_place])
        if in_place:
            step.rows[-1].slot = NONE
        at = dict(zip(with_state, slots, strict=True))
        added = [_Row(at.get(row, NONE), kept[row] if kept else NONE) for row in range(rows)]
        for row in wanted:
            self.pool.share([at[row]])
            step.snapshots[self._next_snapshot] = len(step.rows) + row + 1
            self._next_snapshot += 1
        step.rows += added
        step.span = StateSpan(
            source=source, targets=tuple(row.slot for row in added), kept=tuple(row.kept for row in added)
        )
        self._steps[request_id] = step
        return step.span

    def settle(self, request_id: int, rows: int) -> None:
        """The first `rows` rows of this transaction are final: what `keep` counts starts after them; `undo` drops them.

        As cache/tables.py: BlockTables.settle, but they may be yet to come. No state before the last of them is kept.
        """
        if not self._is_open or rows < 0:
            raise RuntimeError(f"request {request_id}: {rows} rows cannot be settled, or not outside of a transaction")
        step = self._steps.setdefault(request_id, _Step(before=self._states.get(request_id)))
        step.settled += rows

    def keep(self, rows: Mapping[int, int]) -> None:
        """Commit the state after the first `rows[id]` tentative rows of each request, after all where it has fewer.

        Replays are carried out before anything changes.
        """
        if not self._is_open:
            raise RuntimeError("state tables can keep rows in a transaction only")
        if any(count < 0 for count in rows.values()):
            raise ValueError("a negative number of rows cannot be kept")
        counts = {request_id: self._kept_rows(request_id, rows.get(request_id, 0)) for request_id in self._steps}
        replays: list[Replay] = []
        after: dict[int, _State] = {}
        for request_id, count in counts.items():
            if count:
                step = self._steps[request_id]
                after[request_id] = _State(step.start + count, self._state_after(request_id, step, count, replays))
        if replays:
            self._replay(replays)
        for request_id, step in self._steps.items():
            self._commit(request_id, step, counts[request_id], after.get(request_id))
        self._num_kept = 0
        self._is_open = False

    def undo(self) -> None:
        """Return to the marked state, also after `keep` (when another participant could not keep its rows)."""
        for request_id, step in self._steps.items():
            if step.before is None:
                self._states.pop(request_id, None)
            else:
                self._states[request_id] = step.before
            self.pool.release(step.slots)
            for number, count in step.snapshots.items():
                self._snapshots.pop(number, None)
                self.pool.release([step.rows[count - 1].slot])
        self._made.clear()
        self._retired.clear()
        self._steps.clear()
        self._num_kept = 0
        self._is_open = False

    # Outside of a transaction

    def release(self, request_id: int) -> None:
        """Forget the request and give its slot back. An unknown request has none to give. Snapshots stay."""
        self._forbid_in_transaction(f"request {request_id}: its state cannot be released")
        state = self._states.pop(request_id, None)
        if state is not None:
            self.pool.release([state.slot])

    def take_snapshots(self, request_id: int) -> tuple[Snapshot, ...]:
        """Those that the last `keep` made of this request, by rows, once. They are the caller's from now on: `drop`
        them."""
        return tuple(self._made.pop(request_id, ()))

    def resume(self, request_id: int, snapshot: Snapshot) -> None:
        """Let a request that has no rows begin after those of the snapshot."""
        self._forbid_in_transaction(f"request {request_id} cannot resume from a snapshot")
        known = self._snapshots.get(snapshot.number)
        if known is None or known[0] != snapshot or snapshot.dtype is not self._dtype:
            raise ValueError(
                f"there is no {snapshot.dtype.value} snapshot {snapshot.number} of {snapshot.rows} rows here"
            )
        if request_id in self._states:
            raise ValueError(f"request {request_id} has {self.length(request_id)} rows already, and cannot resume")
        self.pool.share([known[1]])
        self._states[request_id] = _State(snapshot.rows, known[1])

    def drop(self, snapshot: Snapshot) -> None:
        """Forget a snapshot. Requests that resumed from it keep its state as long as they need it."""
        self._forbid_in_transaction(f"snapshot {snapshot.number} cannot be dropped")
        if snapshot.number not in self._snapshots:
            raise ValueError(f"there is no snapshot {snapshot.number} here")
        _, slot = self._snapshots.pop(snapshot.number)
        self.pool.release([slot])

    def check(self) -> None:
        """Raise RuntimeError unless every slot is owned as often as it is named, and free otherwise."""
        self.pool.check()
        named = Counter(state.slot for state in self._states.values())
        named.update(slot for _, slot in self._snapshots.values())
        named.update(self._retired)
        if self._is_open:
            for step in self._steps.values():
                named.update(step.slots)
                named.update(step.rows[count - 1].slot for count in step.snapshots.values())
        for slot in range(self.pool.num_pages):
            if self.pool.owners(slot) != named[slot]:
                raise RuntimeError(f"slot {slot} is owned {self.pool.owners(slot)} times and named {named[slot]} times")

    # Parts

    @property
    def _keeps_inputs(self) -> bool:
        return self.room.kept_rows > 0

    def _source(self, step: _Step) -> int:
        """The slot of the request's latest state."""
        if step.rows:
            return step.rows[-1].slot
        return step.before.slot if step.before else NONE

    def _is_spare(self, step: _Step) -> bool:
        """The latest state is tentative, and nobody will want it once the next rows have been applied to it: it can be
        overwritten."""
        if not step.rows or self.pool.owners(step.rows[-1].slot) > 1:
            return False
        return len(step.rows) < step.settled or step.rows[-1].kept != NONE

    def _rows_with_state(self, rows: int, wanted: Sequence[int], *, is_revocable: bool) -> list[int]:
        """The rows that get a slot, the last one always."""
        if is_revocable and not self._keeps_inputs:
            return list(range(rows))
        return sorted({rows - 1, *wanted})

    def _snapshot_rows(
        self, request_id: int, step: _Step, rows: int, snapshots: Sequence[int], *, is_revocable: bool
    ) -> list[int]:
        """Indices, among the new rows, of those after which a snapshot is wanted."""
        first = step.start + len(step.rows)
        wanted = [count - first - 1 for count in sorted(set(snapshots))]
        if any(not 0 <= row < rows for row in wanted) or any(count % BLOCK for count in snapshots):
            raise ValueError(
                f"request {request_id}: no snapshots after {list(snapshots)} of rows {first + 1} to {first + rows}"
            )
        if wanted and is_revocable:
            raise ValueError(f"request {request_id}: a snapshot of rows that may be taken back")
        return wanted

    def _allocate(self, count: int) -> list[int]:
        if count > self.pool.num_free:
            raise CacheExhausted(
                "cache/no-free-state",
                f"{count} state slots are needed and {self.pool.num_free} of {self.pool.num_pages} are free.",
                hint="give the cache more memory (--kv-memory), or run fewer requests at once (--max-num-seqs)",
            )
        return self.pool.allocate(count)

    def _take_kept(self, count: int, allocated: Sequence[int]) -> Sequence[int]:
        """Rows for `count` inputs. Where they are not there, `allocated` slots are given back."""
        first = self._num_kept
        if first + count > self.room.kept_rows and count:
            self.pool.release(allocated)
            raise CacheExhausted(
                "cache/no-free-state",
                f"inputs of {count} rows are to be kept, and of {self.room.kept_rows} rows for them "
                f"{self.room.kept_rows - first} are free.",
                hint="propose fewer tokens (--num-draft-tokens), or run fewer requests at once (--max-num-seqs)",
            )
        self._num_kept += count
        return range(first, first + count)

    def _kept_rows(self, request_id: int, wanted: int) -> int:
        step = self._steps[request_id]
        if step.settled > len(step.rows):
            raise RuntimeError(f"request {request_id} has {len(step.rows)} new rows, and {step.settled} were settled")
        return min(step.settled + wanted, len(step.rows))

    def _state_after(self, request_id: int, step: _Step, count: int, replays: list[Replay]) -> int:
        """The slot that holds the state after `count` tentative rows, or will once `replays` are carried out."""
        if step.rows[count - 1].slot != NONE:
            return step.rows[count - 1].slot
        known = next((row for row in range(count - 1, 0, -1) if step.rows[row - 1].slot != NONE), 0)
        source = step.rows[known - 1].slot if known else step.before.slot if step.before else NONE
        kept = tuple(row.kept for row in step.rows[known:count])
        target = step.rows[-1].slot  # of a state that is not kept
        if NONE in kept or self.pool.owners(target) > 1:
            raise RuntimeError(
                f"request {request_id}: the state after {count} of {len(step.rows)} rows is not to be had"
            )
        replays.append(Replay(source=source, kept=kept, target=target))
        return target

    def _commit(self, request_id: int, step: _Step, count: int, after: _State | None) -> None:
        """Make `after` the request's state. Whatever else the step used is retired: `undo` may want it back."""
        if after is None:
            self._retired += step.slots
        else:
            self._states[request_id] = after
            self._retired += [slot for slot in step.slots if slot != after.slot]
            self._retired += [step.before.slot] if step.before else []
        for number, rows in step.snapshots.items():
            slot = step.rows[rows - 1].slot
            if rows <= count:
                snapshot = Snapshot(number=number, rows=step.start + rows, dtype=self._dtype)
                self._snapshots[number] = (snapshot, slot)
                self._made.setdefault(request_id, []).append(snapshot)
            else:
                self._retired.append(slot)

    def _forbid_in_transaction(self, what: str) -> None:
        if self._is_open:
            raise RuntimeError(f"{what} in a transaction")
        self._forget_step()

    def _forget_step(self) -> None:
        """The last transaction stands: what it gave up is free."""
        self.pool.release(self._retired)
        self._retired.clear()
        self._steps.clear()
