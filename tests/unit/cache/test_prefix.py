"""The tree of prefixes: what is found, whose it is, what goes first. Pages here say which tokens they hold."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proa.cache.pages import PagePool
from proa.cache.prefix import Held, PrefixTree, Store
from proa.cache.state_values import Snapshot
from proa.units import DType

Tokens = Sequence[int]


class Side:
    """One runner: a pool, what its pages hold, and snapshots that are numbered and must not be lost."""

    def __init__(self, num_pages: int, page_size: int, *, has_states: bool = False, lookahead: int = 0) -> None:
        self.pool = PagePool(num_pages)
        self.page_size, self.has_states, self.lookahead = page_size, has_states, lookahead
        self.holds: dict[int, tuple[int, ...]] = {}
        self.snapshots: dict[int, tuple[int, ...]] = {}
        self.numbers = 0

    @property
    def store(self) -> Store:
        return Store(pool=self.pool, page_size=self.page_size, drop=self.drop if self.has_states else None)

    def drop(self, snapshot: Snapshot) -> None:
        del self.snapshots[snapshot.number]

    def write(self, tokens: Tokens, shared: Sequence[int] = ()) -> list[int]:
        """Full pages for as many tokens as a runner can know, the first ones those that it adopted."""
        count = max(0, len(tokens) - self.lookahead) // self.page_size
        self.pool.share(shared)
        new = self.pool.allocate(count - len(shared))
        for index, page in enumerate(new, start=len(shared)):
            self.holds[page] = tuple(tokens[: (index + 1) * self.page_size + self.lookahead])
        return [*shared, *new]

    def snapshot(self, tokens: Tokens, rows: int) -> Snapshot:
        self.numbers += 1
        self.snapshots[self.numbers] = tuple(tokens[:rows])
        return Snapshot(number=self.numbers, rows=rows, dtype=DType.F32)


def tree_of(*sides: Side) -> PrefixTree:
    return PrefixTree([side.store for side in sides], lookahead=max(side.lookahead for side in sides))


def put(tree: PrefixTree, tokens: Tokens, *sides: Side, after: Sequence[int] = ()) -> None:
    """A request that computes all of `tokens`, with snapshots after these rows, and is over."""
    held = []
    for side in sides:
        made = {rows: side.snapshot(tokens, rows) for rows in after} if side.has_states else {}
        held.append(Held(pages=side.write(tokens), snapshots=made))
    tree.insert(tokens, held)
    for side, one in zip(sides, held, strict=True):
        side.pool.release(one.pages)
    tree.check()


A, B, C = range(20), [*range(8), *range(50, 62)], range(80, 100)


def test_a_known_beginning_is_found_in_whole_pages() -> None:
    side = Side(20, 4)
    tree = tree_of(side)
    put(tree, range(14), side)
    for length, rows in [(3, 0), (4, 4), (7, 4), (11, 8), (12, 12), (13, 12), (40, 12)]:
        match = tree.find(range(length))
        assert match.rows(0, 100) == match.known(0) == rows
        assert [side.holds[page] for page in match.pages(0, rows)] == [
            tuple(range(end)) for end in range(4, rows + 1, 4)
        ]
    assert tree.find([1, *range(20)]).rows(0, 100) == 0


def test_no_more_is_found_than_is_of_use() -> None:
    side = Side(20, 4)
    tree = tree_of(side)
    put(tree, A, side)
    match = tree.find(A)
    assert [match.rows(0, most) for most in (0, 3, 4, 19, 20)] == [0, 0, 4, 16, 20]
    assert match.pages(0, 0) == []
    assert match.snapshot(0, 0) is None


def test_beginnings_that_part_share_what_they_have_in_common() -> None:
    side = Side(20, 4)
    tree = tree_of(side)
    put(tree, A, side)
    put(tree, B, side)
    assert tree.num_nodes == 5 + 3
    assert side.pool.num_idle == 8
    assert side.pool.num_free == 12
    first, second = (tree.find(tokens).pages(0, 20) for tokens in (A, B))
    assert first[:2] == second[:2]
    assert not set(first[2:]) & set(second[2:])


def test_with_two_page_sizes_both_runners_have_whole_pages() -> None:
    target, draft = Side(40, 4), Side(40, 6)
    tree = tree_of(target, draft)
    assert tree.unit == 12
    put(tree, range(30), target, draft)
    match = tree.find(range(30))
    assert (match.rows(0, 30), match.rows(1, 30)) == (24, 24)
    assert (len(match.pages(0, 24)), len(match.pages(1, 24))) == (6, 4)
    assert target.pool.num_idle == 6


def test_a_runner_that_has_less_can_go_on_from_less_and_is_filled_in_later() -> None:
    target, draft = Side(20, 4), Side(20, 4)
    tree = tree_of(target, draft)
    pages = target.write(A)
    tree.insert(A, [Held(pages=pages, snapshots={}), Held(pages=draft.write(range(9)), snapshots={})])
    tree.check()
    match = tree.find(A)
    assert (match.rows(0, 20), match.rows(1, 20)) == (20, 8)
    tree.insert(A, [Held(pages=(), snapshots={}), Held(pages=draft.write(A), snapshots={})])
    tree.check()
    assert tree.find(A).rows(1, 20) == 20
    assert tree.find(A).pages(0, 20) == pages


def test_with_a_lookahead_the_token_after_a_page_must_be_the_same() -> None:
    target, draft = Side(20, 4), Side(20, 4, lookahead=1)
    tree = tree_of(target, draft)
    put(tree, range(9), target, draft)
    assert tree.find(range(8)).rows(1, 100) == 4
    assert tree.find([*range(8), 99]).rows(1, 100) == 4
    assert tree.find(range(9)).rows(1, 100) == 8


def test_the_longest_unused_goes_first_and_a_page_after_those_that_follow_it() -> None:
    side = Side(15, 4)
    tree = tree_of(side)
    for tokens in (A, B, C):
        put(tree, tokens, side)
    tree.use(tree.find(A), 20)
    tree.make_room([15 - 13 + 3])  # all but the first two pages of B, which are those of A
    tree.check()
    assert [tree.find(tokens).rows(0, 100) for tokens in (A, B, C)] == [20, 8, 20]
    tree.make_room([15 - 13 + 3 + 2])
    assert [tree.find(tokens).rows(0, 100) for tokens in (A, B, C)] == [20, 8, 12]
    tree.make_room([15])
    assert (tree.num_nodes, side.pool.num_free) == (0, 15)
    side.pool.check()


def test_a_use_of_a_beginning_keeps_the_beginning() -> None:
    side = Side(10, 4)
    tree = tree_of(side)
    put(tree, A, side)
    put(tree, C, side)
    tree.use(tree.find(A), 8)
    tree.make_room([8])
    tree.check()
    assert [tree.find(tokens).rows(0, 100) for tokens in (A, C)] == [8, 0]


def test_what_somebody_uses_stays_while_anything_else_can_go() -> None:
    side = Side(10, 4)
    tree = tree_of(side)
    put(tree, A, side)
    pages = tree.find(A).pages(0, 20)
    side.pool.share(pages)
    put(tree, C, side)
    tree.make_room([5])
    tree.check()
    assert [tree.find(tokens).rows(0, 100) for tokens in (A, C)] == [20, 0]


def test_a_leaf_in_use_goes_where_only_the_pages_before_it_are_free() -> None:
    side = Side(8, 4)
    tree = tree_of(side)
    put(tree, A, side)
    last = tree.find(A).pages(0, 20)[4:]
    side.pool.share(last)
    tree.make_room([7])
    tree.check()
    assert tree.num_nodes == 0
    assert (side.pool.num_free, side.pool.num_idle) == (7, 0)
    side.pool.release(last)
    side.pool.check()


def test_room_that_is_not_to_be_had_is_no_error() -> None:
    side = Side(8, 4)
    tree = tree_of(side)
    put(tree, A, side)
    side.pool.allocate(1)
    tree.make_room([8])
    assert side.pool.num_free == 7


def test_a_second_copy_is_not_kept() -> None:
    side = Side(20, 4)
    tree = tree_of(side)
    put(tree, A, side)
    pages = tree.find(A).pages(0, 20)
    put(tree, A, side)
    assert tree.find(A).pages(0, 20) == pages
    assert side.pool.num_free == 15


def test_a_runner_with_states_goes_on_after_snapshots_only() -> None:
    side = Side(20, 4, has_states=True)
    tree = tree_of(side)
    put(tree, A, side, after=[8, 16])
    match = tree.find(A)
    assert [match.rows(0, most) for most in (20, 16, 15, 8, 7)] == [16, 16, 8, 8, 0]
    assert match.known(0) == 16
    snapshot = match.snapshot(0, 8)
    assert snapshot is not None
    assert side.snapshots[snapshot.number] == tuple(range(8))


def test_rows_after_the_last_snapshot_are_not_kept() -> None:
    side = Side(20, 4, has_states=True)
    tree = tree_of(side)
    put(tree, A, side, after=[8])
    put(tree, C, side)
    assert (tree.num_nodes, side.pool.num_free) == (2, 18)


def test_pages_and_snapshots_go_together() -> None:
    side = Side(20, 4, has_states=True)
    tree = tree_of(side)
    put(tree, A, side, after=[8, 20])
    put(tree, B, side, after=[20])
    tree.use(tree.find(B), 20)
    tree.make_room([13])
    tree.check()
    # The last page of A leaves those between the snapshots without use.
    assert [tree.find(tokens).rows(0, 100) for tokens in (A, B)] == [8, 20]
    assert sorted(map(len, side.snapshots.values())) == [8, 20]
    assert side.pool.num_free == 15


def test_a_snapshot_that_goes_takes_the_pages_along_that_are_of_no_use_without_it() -> None:
    side = Side(20, 4, has_states=True)
    tree = tree_of(side)
    put(tree, A, side, after=[8, 20])
    put(tree, C, side, after=[20])
    tree.keep_snapshots(0, 2)
    tree.check()
    assert [tree.find(tokens).rows(0, 100) for tokens in (A, C)] == [8, 20]
    assert tree.num_nodes == 2 + 5
    tree.keep_snapshots(0, 1)
    assert [tree.find(tokens).rows(0, 100) for tokens in (A, C)] == [0, 20]
    tree.keep_snapshots(0, -3)
    tree.check()
    assert (tree.num_nodes, tree.num_snapshots(0), side.snapshots) == (0, 0, {})


def test_a_snapshot_within_goes_alone() -> None:
    side = Side(20, 4, has_states=True)
    tree = tree_of(side)
    put(tree, A, side, after=[8, 20])
    tree.use(tree.find(A), 20)
    tree.use(tree.find(A), 20)
    put(tree, [*range(12), 77, 78, 79, 80], side, after=[16])
    tree.keep_snapshots(0, 2)
    tree.check()
    assert tree.num_snapshots(0) == 2


def test_a_draft_with_states_loses_its_snapshot_and_the_target_nothing() -> None:
    target, draft = Side(20, 4), Side(20, 4, has_states=True)
    tree = tree_of(target, draft)
    put(tree, A, target, draft, after=[12])
    match = tree.find(A)
    assert (match.rows(0, 20), match.rows(1, 20)) == (20, 12)
    tree.keep_snapshots(1, 0)
    tree.check()
    match = tree.find(A)
    assert (match.rows(0, 20), match.rows(1, 20), draft.snapshots) == (20, 0, {})


@pytest.mark.parametrize("rows", [0, 6, 24])
def test_a_snapshot_that_has_no_place_is_dropped(rows: int) -> None:
    side = Side(20, 4, has_states=True)
    tree = tree_of(side)
    made = {8: side.snapshot(A, 8), rows: side.snapshot(A, rows)}
    tree.insert(A, [Held(pages=side.write(A), snapshots=made)])
    tree.check()
    assert list(side.snapshots.values()) == [tuple(range(8))]


def test_a_snapshot_of_a_runner_without_states_is_refused() -> None:
    side = Side(20, 4)
    tree = tree_of(side)
    with pytest.raises(ValueError, match="has no states, and a snapshot of 6 rows"):
        tree.insert(A, [Held(pages=side.write(A), snapshots={6: side.snapshot(A, 6)})])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda tree, node: node.children.clear(), "nodes were counted"),
        (lambda tree, node: setattr(node, "depth", 3), "not its parent's child"),
        (lambda tree, node: setattr(node, "used", 99), "a leaf would never be evicted|does not follow"),
        (lambda tree, node: node.pages.__setitem__(0, None), "nothing of the first runner"),
        (lambda tree, node: node.snapshots.__setitem__(0, None), "accounted for|no state to go on from"),
        (lambda tree, node: tree._stores[0].pool.let_go(node.pages[0]), "not retained"),
        (lambda tree, node: setattr(node, "queued", -1), "a leaf would never be evicted"),
        (lambda tree, node: tree._with_snapshot[0].clear(), "not accounted for"),
    ],
)
def test_a_check_notices_a_tree_that_is_wrong(damage, message: str) -> None:
    side = Side(20, 4, has_states=True)
    tree = tree_of(side)
    put(tree, A, side, after=[4, 8])
    [top] = tree._root.children.values()
    [leaf] = top.children.values()
    damage(tree, top if "counted" in message else leaf)
    with pytest.raises(RuntimeError, match=message):
        tree.check()


sequences = st.lists(st.integers(0, 1), max_size=24)
operations = st.lists(
    st.tuples(
        st.sampled_from(["begin", "end", "room", "snapshots"]),
        sequences,
        st.integers(0, 40),
        st.sets(st.integers(1, 6)),
    ),
    max_size=40,
)


@settings(max_examples=300, deadline=None)
@given(
    operations=operations,
    sizes=st.sampled_from([(1,), (3,), (2, 2), (2, 3), (4, 2)]),
    target_states=st.booleans(),
    draft_states=st.booleans(),
    lookahead=st.integers(0, 1),
)
def test_whatever_comes_and_goes_what_is_found_is_what_was_asked_for(
    operations, sizes, target_states: bool, draft_states: bool, lookahead: int
) -> None:
    sides = [Side(60, sizes[0], has_states=target_states)]
    if len(sizes) > 1:
        sides.append(Side(60, sizes[1], has_states=draft_states, lookahead=lookahead))
    tree = tree_of(*sides)
    running: list[list[list[int]]] = []
    seen: list[list[int]] = []
    evicted = False
    for operation, tokens, number, ends in operations:
        if operation == "begin":
            match = tree.find(tokens)
            known = max((common(tokens, other) for other in seen), default=0)
            expected = max(0, known - tree._lookahead) // tree.unit * tree.unit
            assert evicted or target_states or match.rows(0, 100) == expected
            shared = [match.pages(runner, match.rows(runner, number)) for runner in range(len(sides))]
            for runner, side in enumerate(sides):
                check_found(side, tokens, match, runner, number)
            if any(s.pool.num_free < len(tokens) for s in sides):
                continue
            held = [side.write(tokens, pages) for side, pages in zip(sides, shared, strict=True)]
            tree.use(match, match.rows(0, number))
            rows = [end * tree.unit for end in ends if end * tree.unit <= len(tokens)]
            snapshots = [{r: side.snapshot(tokens, r) for r in rows} if side.has_states else {} for side in sides]
            tree.insert(tokens, [Held(pages=p, snapshots=s) for p, s in zip(held, snapshots, strict=True)])
            running.append(held)
            seen.append(list(tokens))
        elif operation == "end" and running:
            for side, pages in zip(sides, running.pop(number % len(running)), strict=True):
                side.pool.release(pages)
        elif operation == "room":
            evicted = True
            available = [side.pool.num_free + side.pool.num_idle for side in sides]
            wanted = [min(number, most) for most in available]
            tree.make_room(wanted)
            assert all(side.pool.num_free >= count for side, count in zip(sides, wanted, strict=True))
        elif operation == "snapshots":
            evicted = True
            for runner, side in enumerate(sides):
                if side.has_states:
                    tree.keep_snapshots(runner, number % 4)
                    assert tree.num_snapshots(runner) <= number % 4
        tree.check()
        for runner, side in enumerate(sides):
            side.pool.check()
            assert len(side.snapshots) == tree.num_snapshots(runner)
    for held in running:
        for side, pages in zip(sides, held, strict=True):
            side.pool.release(pages)
    tree.clear()
    assert tree.num_nodes == 0
    for side in sides:
        assert (side.pool.num_free, side.snapshots) == (60, {})


def check_found(side: Side, tokens: Tokens, match, runner: int, most: int) -> None:
    rows = match.rows(runner, most)
    assert rows <= most
    for index, page in enumerate(match.pages(runner, rows)):
        assert side.holds[page] == tuple(tokens[: (index + 1) * side.page_size + side.lookahead])
    snapshot = match.snapshot(runner, rows)
    if side.has_states and rows:
        assert side.snapshots[snapshot.number] == tuple(tokens[:rows])


def common(one: Tokens, other: Tokens) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
