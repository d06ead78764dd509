"""Which beginnings of prompts are still in the cache: a tree over tokens for all runners together. Torch-free.

Owns what it retains of pages and snapshots, and the order in which they go. Does not own what a request holds of them,
nor when to look, to insert and to evict (engine/reuse.py).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import lcm

from proa.cache.pages import PagePool
from proa.cache.state_values import Snapshot

Key = tuple[int, ...]
EMPTY: Key = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """Where one runner's rows lie. `drop` forgets a snapshot, None for a runner without states: it can go on after any
    page, one with states only after a snapshot."""

    pool: PagePool
    page_size: int
    drop: Callable[[Snapshot], None] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What one runner holds of a request: full `pages` from row 0 on, and snapshots by the rows that they follow."""

    pages: Sequence[int]
    snapshots: Mapping[int, Snapshot]


@dataclass(slots=True, eq=False, kw_only=True)
class _Node:
    """The rows of one unit of tokens, after those of its parents. By runner: its pages, and the snapshot after it."""

    key: Key
    parent: _Node | None
    depth: int
    pages: list[Sequence[int] | None]
    snapshots: list[Snapshot | None]
    children: dict[Key, _Node] = field(default_factory=dict[Key, "_Node"])
    used: int = 0
    queued: int = -1
    """The `used` with which it stands in the queue of leaves."""
    is_gone: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """The longest known beginning of a request. Not valid any more once the tree has changed."""

    unit: int
    has_states: tuple[bool, ...]
    nodes: tuple[_Node, ...]

    def rows(self, runner: int, most: int) -> int:
        """After how many rows, `most` at most, the runner can go on."""
        depth = 0
        for node in self.nodes[: most // self.unit]:
            if node.pages[runner] is None:
                break
            depth += 1
        while depth and self.has_states[runner] and self.nodes[depth - 1].snapshots[runner] is None:
            depth -= 1
        return depth * self.unit

    def known(self, runner: int) -> int:
        """Rows in pages, whether the runner can go on after them or not."""
        covered = (node.pages[runner] is not None for node in self.nodes)
        return next((depth for depth, is_covered in enumerate(covered) if not is_covered), len(self.nodes)) * self.unit

    def pages(self, runner: int, rows: int) -> list[int]:
        return [page for node in self.nodes[: rows // self.unit] for page in node.pages[runner] or ()]

    def snapshot(self, runner: int, rows: int) -> Snapshot | None:
        return self.nodes[rows // self.unit - 1].snapshots[runner] if rows else None


class PrefixTree:
    """Every node stands for a unit of tokens (a whole number of pages of every runner) after those of its parents.

    The first runner's pages are there in every node; another's may be missing, from some node on. `lookahead` tokens
    after a unit belong to its key, because a draft's rows may be made from the token that follows. Of a first runner
    with states, rows after its last snapshot are of no use: every leaf has one. Leaves go first, the one that was not
    used for the longest time before the others; with a node go its pages and its snapshots.
    """

    def __init__(self, stores: Sequence[Store], *, lookahead: int) -> None:
        self.unit = lcm(*(store.page_size for store in stores))
        self._stores = tuple(stores)
        self._lookahead = lookahead
        self._root = _Node(key=EMPTY, parent=None, depth=0, pages=[], snapshots=[])
        self._leaves: list[tuple[int, int, _Node]] = []  # a heap; entries that no longer hold are skipped
        self._with_snapshot: tuple[dict[_Node, None], ...] = tuple({} for _ in stores)
        self._clock = self._entries = 0
        self.num_nodes = 0

    # What is known

    def find(self, tokens: Sequence[int]) -> Match:
        """The nodes that `tokens` begin with. Changes nothing."""
        nodes: list[_Node] = []
        node = self._root
        for key in self._keys(tokens):
            known = node.children.get(key)
            if known is None:
                break
            nodes.append(known)
            node = known
        return Match(unit=self.unit, has_states=self._has_states, nodes=tuple(nodes))

    def use(self, match: Match, rows: int) -> None:
        """These rows were useful now."""
        self._clock += 1
        self._touch(match.nodes[: rows // self.unit])

    def num_snapshots(self, runner: int) -> int:
        return len(self._with_snapshot[runner])

    # What is added

    def insert(self, tokens: Sequence[int], held: Sequence[Held]) -> None:
        """Retain what the runners hold of a request with these tokens, as far as it is not there. By runner.

        Every snapshot is the tree's from now on; those that it has no place or no need for are dropped.
        """
        self._clock += 1
        most = self._most_units(held)
        path: list[_Node] = []
        node = self._root
        for index, key in enumerate(self._keys(tokens)):
            child = node.children.get(key) or (self._add(node, key, held) if index < most else None)
            if child is None:
                break
            self._fill(child, held)
            path.append(child)
            node = child
        self._touch(path)
        for runner, one in enumerate(held):
            self._take_snapshots(runner, one.snapshots, path)
        if path and self._is_useless(path[-1]):
            self._remove(path[-1])

    def _most_units(self, held: Sequence[Held]) -> int:
        """As many new nodes as are of use to the first runner."""
        first = held[0]
        if self._has_states[0]:
            return max(first.snapshots, default=0) // self.unit
        return len(first.pages) * self._stores[0].page_size // self.unit

    def _add(self, parent: _Node, key: Key, held: Sequence[Held]) -> _Node | None:
        if self._pages_of(0, held[0], parent.depth) is None:
            return None
        count = len(self._stores)
        node = _Node(key=key, parent=parent, depth=parent.depth + 1, pages=[None] * count, snapshots=[None] * count)
        parent.children[key] = node
        self.num_nodes += 1
        return node

    def _fill(self, node: _Node, held: Sequence[Held]) -> None:
        for runner, one in enumerate(held):
            pages = self._pages_of(runner, one, node.depth - 1)
            if node.pages[runner] is None and pages is not None:
                self._stores[runner].pool.retain(pages)
                node.pages[runner] = pages

    def _pages_of(self, runner: int, held: Held, index: int) -> Sequence[int] | None:
        """The pages of unit `index`, if they are all there."""
        count = self.unit // self._stores[runner].page_size
        pages = tuple(held.pages[index * count : (index + 1) * count])
        return pages if len(pages) == count else None

    def _take_snapshots(self, runner: int, snapshots: Mapping[int, Snapshot], path: Sequence[_Node]) -> None:
        for rows, snapshot in snapshots.items():
            depth, rest = divmod(rows, self.unit)
            node = path[depth - 1] if not rest and 0 < depth <= len(path) else None
            if node is None or node.snapshots[runner] is not None:
                self._drop(runner, snapshot)
            else:
                node.snapshots[runner] = snapshot
                self._with_snapshot[runner][node] = None

    # What goes

    def make_room(self, wanted: Sequence[int]) -> None:
        """Evict until as many pages of each runner are free, by runner, or nothing is left.

        Leaves that somebody uses free nothing. They go only where nothing else can, because of what lies above them.
        """
        spared: list[_Node] = []
        while short := [runner for runner, count in enumerate(wanted) if self._stores[runner].pool.num_free < count]:
            leaf = self._next_leaf()
            if leaf is not None and not self._frees(leaf, short):
                spared.append(leaf)
            elif leaf is not None:
                self._remove(leaf)
            elif spared:
                self._remove(spared.pop(0))
            else:
                break
        for leaf in spared:
            self._queue(leaf)

    def keep_snapshots(self, runner: int, most: int) -> None:
        """Drop snapshots until the runner has at most so many, of equally old ones the longest first."""
        nodes = self._with_snapshot[runner]
        while len(nodes) > max(0, most):
            self._forget(runner, min(nodes, key=lambda node: (node.used, -node.depth)))

    def clear(self) -> None:
        while (leaf := self._next_leaf()) is not None:
            self._remove(leaf)

    def _frees(self, leaf: _Node, runners: Sequence[int]) -> bool:
        return any(not self._stores[runner].pool.users(page) for runner in runners for page in leaf.pages[runner] or ())

    def _remove(self, leaf: _Node) -> None:
        """And every parent that is of no use without it."""
        node = leaf
        while node.parent is not None and (node is leaf or self._is_useless(node)):
            parent = node.parent
            del parent.children[node.key]
            node.is_gone = True
            self.num_nodes -= 1
            for runner, store in enumerate(self._stores):
                store.pool.let_go(node.pages[runner] or ())
                if (snapshot := node.snapshots[runner]) is not None:
                    del self._with_snapshot[runner][node]
                    self._drop(runner, snapshot)
            node = parent
        self._queue(node)

    def _is_useless(self, node: _Node) -> bool:
        return self._has_states[0] and not node.children and node.snapshots[0] is None

    def _forget(self, runner: int, node: _Node) -> None:
        """The node without this snapshot, or nothing of it where that is what it was there for."""
        if runner == 0 and not node.children:
            self._remove(node)
            return
        snapshot = node.snapshots[runner]
        node.snapshots[runner] = None
        del self._with_snapshot[runner][node]
        if snapshot is not None:
            self._drop(runner, snapshot)

    def _drop(self, runner: int, snapshot: Snapshot) -> None:
        drop = self._stores[runner].drop
        if drop is None:
            raise ValueError(f"runner {runner} has no states, and a snapshot of {snapshot.rows} rows")
        drop(snapshot)

    # Parts

    @property
    def _has_states(self) -> tuple[bool, ...]:
        return tuple(store.drop is not None for store in self._stores)

    def _keys(self, tokens: Sequence[int]) -> Iterator[Key]:
        """Of every whole unit."""
        for start in range(0, len(tokens) - self.unit - self._lookahead + 1, self.unit):
            yield tuple(tokens[start : start + self.unit + self._lookahead])

    def _touch(self, path: Sequence[_Node]) -> None:
        for node in path:
            node.used = self._clock
        if path:
            self._queue(path[-1])

    def _queue(self, node: _Node) -> None:
        """If it is a leaf."""
        if node.children or node.is_gone or node.parent is None or node.queued == node.used:
            return
        if len(self._leaves) > 4 * self.num_nodes + 64:
            self._leaves = [entry for entry in self._leaves if entry[2].queued == entry[0] and not entry[2].is_gone]
            heapq.heapify(self._leaves)
        node.queued = node.used
        self._entries += 1
        heapq.heappush(self._leaves, (node.used, self._entries, node))

    def _next_leaf(self) -> _Node | None:
        """The one that was not used for the longest time, no longer in the queue."""
        while self._leaves:
            used, _, node = heapq.heappop(self._leaves)
            if node.queued != used:
                continue
            node.queued = -1
            if not node.is_gone and not node.children and node.used == used:
                return node
        return None

    def _nodes(self) -> Iterator[_Node]:
        waiting = list(self._root.children.values())
        while waiting:
            node = waiting.pop()
            yield node
            waiting += node.children.values()

    def check(self) -> None:
        """Raise RuntimeError unless every node is reachable, owns what it should, and will go in its turn."""
        nodes = list(self._nodes())
        if len(nodes) != self.num_nodes:
            raise RuntimeError(f"{self.num_nodes} nodes were counted, and {len(nodes)} are there")
        for node in nodes:
            self._check(node)
        for runner, store in enumerate(self._stores):
            pages = [page for node in nodes for page in node.pages[runner] or ()]
            if len(pages) != len(set(pages)) or any(store.pool.owners(p) == store.pool.users(p) for p in pages):
                raise RuntimeError(f"runner {runner}: a page is in two nodes, or not retained")
            if {node for node in nodes if node.snapshots[runner] is not None} != set(self._with_snapshot[runner]):
                raise RuntimeError(f"runner {runner}: a snapshot is not accounted for")

    def _check(self, node: _Node) -> None:
        parent = node.parent
        if parent is None or parent.children.get(node.key) is not node or node.depth != parent.depth + 1:
            raise RuntimeError("a node is not its parent's child")
        if parent is not self._root and (parent.used < node.used or self._continues(parent, node)):
            raise RuntimeError("a node does not follow its parent")
        if node.is_gone or node.pages[0] is None:
            raise RuntimeError("a node has nothing of the first runner")
        if not node.children and node.queued != node.used:
            raise RuntimeError("a leaf would never be evicted")
        if not node.children and self._has_states[0] and node.snapshots[0] is None:
            raise RuntimeError("a leaf has no state to go on from")

    def _continues(self, parent: _Node, node: _Node) -> bool:
        """Tokens of the parent's lookahead that are not the node's own, or rows of a runner after a gap."""
        ahead = parent.key[self.unit :]
        has_gap = any(mine and not other for mine, other in zip(node.pages, parent.pages, strict=True))
        return ahead != node.key[: len(ahead)] or has_gap
