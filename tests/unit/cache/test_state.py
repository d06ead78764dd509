"""State tables against a memory in which a state is the tuple of all rows that led to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proa.arch.delta_blocks import BLOCK
from proa.cache import state_values
from proa.cache.pages import PagePool
from proa.cache.state import StateTables
from proa.cache.state_values import NONE, Replay, Snapshot, StateRoom, StateSpan
from proa.cache.tables import BlockTables
from proa.cache.transaction import CacheTransaction
from proa.errors import CacheExhausted
from proa.kernels import delta
from proa.units import DType

History = tuple[object, ...]
POLICIES = {"replay": 12, "states": 0}  # -> rows of kept inputs


class Memory:
    """Slots and kept rows, and the tables over them. A forward's row is any value."""

    def __init__(self, slots: int = 8, kept_rows: int = 12) -> None:
        self.slots: list[History | None] = [None] * slots
        self.kept: list[object] = [None] * kept_rows
        self.tables = StateTables(StateRoom(slots=slots, kept_rows=kept_rows), DType.F32, self.replay)
        self.replays: list[Replay] = []
        self.fails = False

    def forward(self, span: StateSpan, rows: Sequence[object]) -> None:
        history = self.read(span.source)
        assert len(span.targets) == len(span.kept) == len(rows)
        assert span.source == NONE or span.source not in span.targets[:-1]
        for row, target, kept in zip(rows, span.targets, span.kept, strict=True):
            history = (*history, row)
            if kept != NONE:
                self.kept[kept] = row
            if target != NONE:
                self.slots[target] = history

    def replay(self, replays: Sequence[Replay]) -> None:
        if self.fails:
            raise RuntimeError("the replay failed")
        self.replays += replays
        for one in replays:
            self.forward(
                StateSpan(
                    source=one.source,
                    targets=(*[NONE] * (len(one.kept) - 1), one.target),
                    kept=(NONE,) * len(one.kept),
                ),
                [self.kept[row] for row in one.kept],
            )

    def read(self, slot: int) -> History:
        history = () if slot == NONE else self.slots[slot]
        assert history is not None, "a slot that nobody wrote is read"
        return history

    def committed(self, request: int) -> History:
        return self.read(self.tables._states[request].slot) if self.tables.has(request) else ()

    def step(self, request: int, rows: Sequence[object], keep: int, *, is_revocable: bool) -> None:
        """One step of one request."""
        self.tables.mark()
        self.forward(self.tables.extend(request, len(rows), is_revocable=is_revocable), rows)
        self.tables.keep({request: keep})


def prompted(kept_rows: int = 12, rows: int = 3) -> Memory:
    """Request 1 has `rows` rows."""
    memory = Memory(kept_rows=kept_rows)
    memory.step(1, range(rows), rows, is_revocable=False)
    return memory


def test_no_slot_is_spelled_as_the_kernels_do() -> None:
    assert state_values.NONE == delta.NONE


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("accepted", range(6))
def test_any_number_of_verified_rows_may_stay(policy: str, accepted: int) -> None:
    memory = prompted(POLICIES[policy])
    memory.step(1, "abcde", accepted, is_revocable=True)
    assert memory.committed(1) == (0, 1, 2, *"abcde"[:accepted])
    assert memory.tables.length(1) == 3 + accepted
    assert len(memory.replays) == int(policy == "replay" and 0 < accepted < 5)
    assert memory.tables.free_slots == 7
    memory.tables.check()
    memory.step(1, "xy", 1, is_revocable=True)
    assert memory.committed(1) == (0, 1, 2, *"abcde"[:accepted], "x")


def test_a_request_alternates_between_two_slots_where_inputs_are_kept() -> None:
    memory = Memory(slots=2)
    for step in range(20):
        memory.step(1, range(5), step % 6, is_revocable=True)
        memory.step(1, "d", 1, is_revocable=False)
    assert memory.tables.length(1) == sum(step % 6 + 1 for step in range(20))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_that_is_undone_leaves_what_there_was(policy: str) -> None:
    memory = prompted(POLICIES[policy])
    tables = memory.tables
    tables.mark()
    for request, rows in ((1, "abcd"), (2, "efg")):
        memory.forward(tables.extend(request, len(rows), is_revocable=True), rows)
    tables.check()
    tables.undo()
    tables.check()
    assert memory.committed(1) == (0, 1, 2) and not tables.has(2)
    assert tables.free_slots == 7
    tables.undo()  # once more is no more
    assert memory.committed(1) == (0, 1, 2)


class Refusing:
    """A participant that cannot keep its rows."""

    def mark(self) -> None: ...

    def keep(self, rows: object) -> None:
        raise RuntimeError("another participant failed")

    def undo(self) -> None: ...


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("accepted", [0, 2, 4])
def test_a_commit_that_fails_elsewhere_is_undone_here(policy: str, first: bool, accepted: int) -> None:
    memory = prompted(POLICIES[policy])
    tables = memory.tables
    participants = [tables, Refusing()] if first else [Refusing(), tables]
    with pytest.raises(RuntimeError, match="another participant"), CacheTransaction(participants) as transaction:
        memory.forward(tables.extend(1, 4, is_revocable=True), "abcd")
        memory.forward(tables.extend(2, BLOCK, is_revocable=False, snapshots=[BLOCK]), range(BLOCK))
        transaction.commit({1: accepted, 2: BLOCK})
    tables.check()
    assert memory.committed(1) == (0, 1, 2) and not tables.has(2)
    assert tables.free_slots == 7 and not tables.take_snapshots(2)
    memory.step(1, "abcd", 3, is_revocable=True)
    assert memory.committed(1) == (0, 1, 2, *"abc")


def test_a_replay_that_fails_undoes_the_step_in_every_participant() -> None:
    memory = prompted()
    pages = BlockTables(PagePool(8), 4)
    memory.fails = True
    with pytest.raises(RuntimeError, match="replay failed"), CacheTransaction([pages, memory.tables]) as transaction:
        pages.reserve(1, 4)
        memory.forward(memory.tables.extend(1, 4, is_revocable=True), "abcd")
        transaction.commit({1: 2})
    assert memory.committed(1) == (0, 1, 2) and pages.length(1) == 0
    memory.tables.check()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kept", range(1, 6))
def test_a_chain_of_forwards_in_one_step_rolls_back_to_any_row(policy: str, kept: int) -> None:
    """As a drafter works: rows that are final, then the anchor and one proposed token after the other."""
    memory = prompted(POLICIES[policy])
    tables = memory.tables
    tables.mark()
    tables.settle(1, 2)
    memory.forward(tables.extend(1, 2, is_revocable=False), "AB")
    for token in "vwxyz"[:4]:
        memory.forward(tables.extend(1, 1, is_revocable=True), token)
    tables.check()
    assert policy == "states" or 8 - tables.free_slots == 3  # committed, settled, and the chain in one
    tables.keep({1: kept})
    assert memory.committed(1) == (0, 1, 2, "A", "B", *"vwxyz"[: min(kept, 4)])
    tables.check()


def test_final_rows_in_several_forwards_take_one_slot() -> None:
    memory = Memory(slots=1)
    tables = memory.tables
    tables.mark()
    tables.settle(1, 12)
    for part in ("abcd", "efgh", "ijkl"):
        memory.forward(tables.extend(1, 4, is_revocable=False), part)
    tables.keep({})
    assert memory.committed(1) == tuple("abcdefghijkl")


def test_rows_that_cannot_be_taken_back_one_by_one_stay_whole() -> None:
    memory = prompted()
    memory.tables.mark()
    memory.forward(memory.tables.extend(1, 4, is_revocable=False), "abcd")
    with pytest.raises(RuntimeError, match="state after 3 of 4 rows is not to be had"):
        memory.tables.keep({1: 3})
    memory.tables.undo()
    assert memory.committed(1) == (0, 1, 2)


def test_a_request_without_an_entry_keeps_nothing_and_more_than_there_is_keeps_all() -> None:
    memory = prompted()
    memory.tables.mark()
    for request in (1, 2, 3):
        memory.forward(memory.tables.extend(request, 2, is_revocable=True), "ab")
    memory.tables.keep({1: 9, 3: 0, 7: 5})
    assert memory.committed(1) == (0, 1, 2, "a", "b")
    assert not memory.tables.has(2) and not memory.tables.has(3) and not memory.tables.has(7)
    assert memory.tables.free_slots == 7


def test_slots_and_kept_rows_run_out_by_name_and_change_nothing() -> None:
    memory = Memory(slots=3, kept_rows=5)
    tables = memory.tables
    tables.mark()
    tables.extend(1, 4, is_revocable=True)
    with pytest.raises(CacheExhausted, match="inputs of 2 rows") as caught:
        tables.extend(2, 2, is_revocable=True)
    assert caught.value.slug == "cache/no-free-state"
    tables.check()
    tables.extend(2, 2, is_revocable=False)
    tables.extend(3, 1, is_revocable=True)
    with pytest.raises(CacheExhausted, match="1 state slots are needed and 0 of 3 are free"):
        tables.extend(4, 1, is_revocable=False)
    tables.undo()
    assert tables.free_slots == 3


def test_slots_for_counts_what_an_extension_takes() -> None:
    replay, states = Memory().tables, Memory(kept_rows=0).tables
    assert [tables.slots_for(5, is_revocable=True) for tables in (replay, states)] == [1, 5]
    assert [tables.slots_for(5, is_revocable=False) for tables in (replay, states)] == [1, 1]


def snapshot_after(memory: Memory, request: int, rows: int, counts: Sequence[int]) -> tuple[Snapshot, ...]:
    memory.tables.mark()
    span = memory.tables.extend(request, rows, is_revocable=False, snapshots=counts)
    assert memory.tables.span(request) is span
    memory.forward(span, range(rows))
    memory.tables.keep({request: rows})
    return memory.tables.take_snapshots(request)


def test_a_snapshot_outlives_its_request_and_is_never_written_again() -> None:
    memory = Memory()
    tables = memory.tables
    made = snapshot_after(memory, 1, 2 * BLOCK, [BLOCK, 2 * BLOCK])
    assert [(one.rows, one.dtype) for one in made] == [(BLOCK, DType.F32), (2 * BLOCK, DType.F32)]
    assert tables.free_slots == 6  # the later one is the request's own state too
    memory.step(1, "ab", 2, is_revocable=True)
    tables.release(1)
    for request, snapshot in ((2, made[0]), (3, made[0]), (4, made[1])):
        tables.resume(request, snapshot)
        assert tables.length(request) == snapshot.rows
        memory.step(request, "xyz", request - 1, is_revocable=True)
        assert memory.committed(request) == (*range(snapshot.rows), *"xyz"[: request - 1])
    tables.check()
    for one in made:
        tables.drop(one)
    for request in (2, 3, 4):
        tables.release(request)
    assert tables.free_slots == 8
    tables.check()


def test_a_request_keeps_the_state_of_a_snapshot_that_was_dropped() -> None:
    memory = Memory()
    (made,) = snapshot_after(memory, 1, BLOCK, [BLOCK])
    memory.tables.resume(2, made)
    memory.tables.release(1)
    memory.tables.drop(made)
    assert memory.committed(2) == tuple(range(BLOCK))
    memory.tables.check()
    assert memory.tables.free_slots == 7


def test_snapshots_of_an_undone_step_do_not_exist() -> None:
    memory = Memory()
    memory.tables.mark()
    memory.forward(memory.tables.extend(1, BLOCK + 1, is_revocable=False, snapshots=[BLOCK]), range(BLOCK + 1))
    memory.tables.keep({})
    assert memory.tables.take_snapshots(1) == () and memory.tables.free_slots == 8


@pytest.mark.parametrize("counts", [[BLOCK - 1], [0], [2 * BLOCK], [-BLOCK]])
def test_snapshots_lie_on_boundaries_among_the_rows(counts: list[int]) -> None:
    tables = Memory().tables
    tables.mark()
    with pytest.raises(ValueError, match="no snapshots after"):
        tables.extend(1, BLOCK + 9, is_revocable=False, snapshots=counts)
    tables.undo()
    tables.check()


def test_what_may_be_taken_back_makes_no_snapshot() -> None:
    tables = Memory(kept_rows=0, slots=BLOCK).tables
    tables.mark()
    with pytest.raises(ValueError, match="may be taken back"):
        tables.extend(1, BLOCK, is_revocable=True, snapshots=[BLOCK])


def test_a_snapshot_of_other_tables_types_or_times_is_refused() -> None:
    memory = Memory()
    (made,) = snapshot_after(memory, 1, BLOCK, [BLOCK])
    tables = memory.tables
    for other in (replace(made, number=9), replace(made, rows=2 * BLOCK), replace(made, dtype=DType.BF16)):
        with pytest.raises(ValueError, match="there is no"):
            tables.resume(2, other)
    with pytest.raises(ValueError, match="has 64 rows already"):
        tables.resume(1, made)
    tables.drop(made)
    for refused in (lambda: tables.resume(2, made), lambda: tables.drop(made)):
        with pytest.raises(ValueError, match="there is no"):
            refused()


def test_a_state_dtype_is_the_tag_of_the_snapshots_of_its_tables() -> None:
    tables = StateTables(StateRoom(slots=4, kept_rows=0), DType.BF16, lambda replays: None)
    tables.mark()
    tables.extend(1, BLOCK, is_revocable=False, snapshots=[BLOCK])
    tables.keep({1: BLOCK})
    assert [one.dtype for one in tables.take_snapshots(1)] == [DType.BF16]


MISUSES: dict[str, Callable[[StateTables, Snapshot], object]] = {
    "mark": lambda tables, made: tables.mark(),
    "release": lambda tables, made: tables.release(1),
    "resume": lambda tables, made: tables.resume(2, made),
    "drop": lambda tables, made: tables.drop(made),
    "no rows": lambda tables, made: tables.extend(1, 0, is_revocable=False),
    "settled and never written": lambda tables, made: (tables.settle(1, 2), tables.keep({})),
    "span of another": lambda tables, made: tables.span(5),
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_what_belongs_outside_of_a_transaction_is_refused_inside(misuse: str) -> None:
    memory = Memory()
    (made,) = snapshot_after(memory, 1, BLOCK, [BLOCK])
    memory.tables.mark()
    with pytest.raises(RuntimeError):
        MISUSES[misuse](memory.tables, made)
    memory.tables.undo()
    memory.tables.check()
    assert memory.committed(1) == tuple(range(BLOCK))


def test_what_belongs_in_a_transaction_is_refused_outside() -> None:
    tables = Memory().tables
    for misuse in (
        lambda: tables.extend(1, 1, is_revocable=False),
        lambda: tables.settle(1, 1),
        lambda: tables.keep({}),
        lambda: tables.span(1),
    ):
        with pytest.raises(RuntimeError):
            misuse()
    tables.mark()
    with pytest.raises(ValueError, match="negative"):
        tables.keep({1: -1})


def test_the_check_finds_a_slot_that_is_owned_and_not_named() -> None:
    memory = prompted()
    memory.tables.pool.allocate(1)
    with pytest.raises(RuntimeError, match="owned 1 times and named 0 times"):
        memory.tables.check()


KINDS = ("verify", "chain", "prefill", "catch up", "release", "resume")
ACTION = st.tuples(st.integers(1, 3), st.sampled_from(KINDS), st.integers(1, 4), st.integers(0, 4))
STEPS = st.lists(st.lists(ACTION, max_size=3, unique_by=lambda action: action[0]), min_size=1, max_size=12)
"""In each step, requests with what is done to them: kind, rows, and how many of these are kept."""


@given(steps=STEPS, kept_rows=st.sampled_from([16, 0]), fate=st.lists(st.sampled_from(["commit", "fail", "undo"])))
@settings(max_examples=150, deadline=None)
def test_states_are_those_of_the_rows_that_were_kept_whatever_happens(
    steps: list[list[tuple[int, str, int, int]]], kept_rows: int, fate: list[str]
) -> None:
    memory, expected = Memory(slots=30, kept_rows=kept_rows), dict[int, History]()
    (made,) = snapshot_after(memory, 99, BLOCK, [BLOCK])
    memory.tables.release(99)
    for number, step in enumerate(steps):
        decided = fate[number] if number < len(fate) else "commit"
        _run(memory, expected, step, decided, made)
        memory.tables.check()
        assert {r: memory.committed(r) for r in (1, 2, 3)} == {r: expected.get(r, ()) for r in (1, 2, 3)}
        assert all(memory.tables.length(r) == len(expected.get(r, ())) for r in (1, 2, 3))
    for request in (1, 2, 3):
        memory.tables.release(request)
    memory.tables.drop(made)
    assert memory.tables.free_slots == 30


def _run(
    memory: Memory, expected: dict[int, History], step: list[tuple[int, str, int, int]], fate: str, made: Snapshot
) -> None:
    tables = memory.tables
    for request, kind, _, _ in step:
        if kind == "release":
            tables.release(request)
            expected.pop(request, None)
        if kind == "resume" and request not in expected:
            tables.resume(request, made)
            expected[request] = tuple(range(BLOCK))
    after, keep = dict(expected), dict[int, int]()
    try:
        with CacheTransaction([tables, *([Refusing()] if fate == "fail" else [])]) as transaction:
            for request, kind, rows, kept in step:
                if kind in ("verify", "chain", "prefill", "catch up"):
                    keep[request] = _extend(memory, after, request, kind, rows, kept)
            if fate == "undo":
                transaction.rollback()
            else:
                transaction.commit(keep)
    except RuntimeError as error:
        assert fate == "fail" and "another participant" in str(error)
    if fate == "commit":
        expected.clear()
        expected.update({request: history for request, history in after.items() if history})


def _extend(memory: Memory, after: dict[int, History], request: int, kind: str, rows: int, kept: int) -> int:
    """Write the rows of one request; return how many are kept."""
    tables, new = memory.tables, [object() for _ in range(rows)]
    before = after.get(request, ())
    if kind == "prefill":
        memory.forward(tables.extend(request, rows, is_revocable=False), new)
        after[request] = (*before, *new)
        return rows
    if kind == "catch up":
        final = [object() for _ in range(rows)]
        tables.settle(request, rows)
        for row in final:
            memory.forward(tables.extend(request, 1, is_revocable=False), [row])
        before = (*before, *final)
    for part in [new] if kind == "verify" else [[row] for row in new]:
        memory.forward(tables.extend(request, len(part), is_revocable=True), part)
    after[request] = (*before, *new[: min(kept, rows)])
    return kept
