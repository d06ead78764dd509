"""Proofs by enumeration: over a vocabulary of 5, what the kernels emit is distributed exactly as the target samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from proa.speculative.verify import acceptance, coupled, rejection, residual, tree
from tests.speculative.worlds import Choose, World, error_of

V, K = 5, 2
EXACT = 1e-12

worlds = pytest.mark.parametrize("seed", range(4))
holes = pytest.mark.parametrize("holes", [False, True])


def chain(choose: Choose, source: World, length: int) -> tuple[int, ...]:
    tokens: tuple[int, ...] = ()
    for _ in range(length):
        tokens = (*tokens, choose(source.after(tokens).tolist()))
    return tokens


def by_rejection(target: World, draft: World | None, proposed: Sequence[int] | None, kernel=rejection):
    """Verify `proposed`, or what the draft draws, with the draft's q; a point mass where there is no draft."""

    def emit(choose: Choose) -> list[int]:
        tokens = tuple(proposed) if proposed is not None else chain(choose, draft, K)
        return kernel(
            tokens,
            lambda index: target.after(tokens[:index]),
            lambda index: draft.after(tokens[:index]) if draft else None,
            lambda _, probability: choose([1 - probability, probability]) == 1,
            lambda _, weights: choose(weights.tolist()),
        )

    return emit


@worlds
@holes
def test_rejection_of_a_chain_is_exact(seed: int, holes: bool) -> None:
    target, draft = World(seed, V, holes=holes), World(seed + 100, V, holes=holes)
    assert error_of(by_rejection(target, draft, None), target, K + 1) < EXACT


@worlds
def test_rejection_with_a_draft_equal_to_the_target_accepts_everything(seed: int) -> None:
    target = World(seed, V, holes=True)
    verify = by_rejection(target, target, None)
    lengths: set[int] = set()

    def emit(choose: Choose) -> list[int]:
        tokens = verify(choose)
        lengths.add(len(tokens))
        return tokens

    assert error_of(emit, target, K + 1) < EXACT
    assert lengths == {K + 1}


@worlds
@holes
@pytest.mark.parametrize("proposed", [(), (3,), (0, 0), (4, 1), (2, 3)])
def test_rejection_of_a_point_mass_is_exact(seed: int, holes: bool, proposed: tuple[int, ...]) -> None:
    target = World(seed, V, holes=holes)
    assert error_of(by_rejection(target, None, proposed), target, K + 1) < EXACT


@worlds
@pytest.mark.parametrize("proposed", [(), (3,), (0, 0), (4, 1)])
def test_a_coupled_chain_is_exact_whatever_is_proposed(seed: int, proposed: tuple[int, ...]) -> None:
    target = World(seed, V, holes=True)

    def emit(choose: Choose) -> list[int]:
        return coupled([proposed], lambda asked: [choose(target.after(proposed[:i]).tolist()) for _, i in asked])[0]

    assert error_of(emit, target, K + 1) < EXACT


@pytest.mark.parametrize("proposed", [(), (3,), (0, 0), (4, 1), (1, 2), (4, 4, 4)])
@worlds
def test_greedy_emits_a_head_of_what_greedy_decoding_gives(seed: int, proposed: tuple[int, ...]) -> None:
    target = World(seed, V, holes=False)
    plain: tuple[int, ...] = ()
    for _ in range(4):
        plain = (*plain, int(target.after(plain).argmax()))
    for tokens in (proposed, plain[:2], (*plain[:2], (plain[2] + 1) % V)):
        emitted = coupled(
            [tokens], lambda asked, tokens=tokens: [int(target.after(tokens[:index]).argmax()) for _, index in asked]
        )[0]
        right = next((index for index, token in enumerate(tokens) if token != plain[index]), len(tokens))
        assert tuple(emitted) == plain[: right + 1]


TREES = [
    ((), ()),
    ((2,), (-1,)),
    ((0, 3, 4), (-1, -1, -1)),
    ((0, 3, 1, 2, 0), (-1, -1, 0, 0, 1)),
    ((1, 1, 1), (-1, 0, 1)),
]


def by_tree(target: World, tokens: Sequence[int], parents: Sequence[int], kernel=tree):
    def prefix(node: int) -> tuple[int, ...]:
        return () if node < 0 else (*prefix(parents[node]), tokens[node])

    return lambda choose: kernel(tokens, parents, lambda node: choose(target.after(prefix(node)).tolist()))[0]


@worlds
@pytest.mark.parametrize(("tokens", "parents"), TREES)
def test_a_tree_is_exact(seed: int, tokens: tuple[int, ...], parents: tuple[int, ...]) -> None:
    target = World(seed, V, holes=True)
    assert error_of(by_tree(target, tokens, parents), target, 3) < EXACT


def test_a_tree_walks_to_the_child_that_the_target_drew() -> None:
    drawn = {-1: 3, 1: 0, 4: 2}
    assert tree((0, 3, 1, 2, 0), (-1, -1, 0, 0, 1), drawn.__getitem__) == ([3, 0, 2], [1, 4])


# Reverse tests: broken rules, judged by the very function that finds nothing wrong above.


def without_residual(proposed, target, drafted, flip, pick) -> list[int]:
    return rejection(proposed, target, drafted, flip, lambda index, _: pick(index, target(index)))


def always_accepting(proposed, target, drafted, flip, pick) -> list[int]:
    return rejection(proposed, target, drafted, lambda *_: True, pick)


def with_the_draft_as_point_mass(proposed, target, drafted, flip, pick) -> list[int]:
    return rejection(proposed, target, lambda _: None, flip, lambda index, weights: pick(index, target(index)))


@pytest.mark.parametrize("broken", [without_residual, always_accepting, with_the_draft_as_point_mass])
def test_a_broken_rejection_rule_is_noticed(broken: Callable) -> None:
    target, draft = World(1, V, holes=False), World(101, V, holes=False)
    assert error_of(by_rejection(target, draft, None, broken), target, K + 1) > 0.01
    assert error_of(by_rejection(target, None, (2, 3), broken), target, K + 1) > 0.01


def test_a_tree_that_gives_each_child_a_chance_of_its_own_is_noticed() -> None:
    def broken(tokens, parents, target):
        for node, parent in enumerate(parents):
            if parent == -1 and target(-1) == tokens[node]:
                return [tokens[node]], [node]
        return [target(-1)], []

    target = World(1, V, holes=False)
    assert error_of(by_tree(target, *TREES[2], broken), target, 1) > 0.01


def test_a_chain_that_emits_past_its_first_mistake_is_noticed() -> None:
    target, proposed = World(1, V, holes=False), (4, 1)

    def emit(choose: Choose) -> list[int]:
        return [choose(target.after(proposed[:index]).tolist()) for index in range(3)]

    assert error_of(emit, target, K + 1) > 0.01


def test_acceptance_and_residual_at_their_edges() -> None:
    p = torch.tensor([0.5, 0.5, 0.0, 0.0, 0.0], dtype=torch.float64)
    q = torch.tensor([0.25, 0.0, 0.75, 0.0, 0.0], dtype=torch.float64)
    assert [acceptance(p, q, token) for token in range(5)] == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert [acceptance(p, None, token) for token in (0, 2)] == [0.5, 0.0]
    assert residual(p, q, 2).tolist() == [1 / 3, 2 / 3, 0, 0, 0]
    assert residual(p, None, 0).tolist() == [0, 1, 0, 0, 0]
    assert torch.equal(residual(p, p, 0), p)
    one = torch.tensor([0.0, 1.0], dtype=torch.float64)
    assert torch.equal(residual(one, None, 1), one)
