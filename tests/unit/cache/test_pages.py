from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from proa.cache.pages import PagePool
from proa.errors import CacheExhausted


def test_a_pool_hands_out_every_page_exactly_once():
    pool = PagePool(7)
    pages = pool.allocate(3) + pool.allocate(4)
    assert sorted(pages) == list(range(7))
    assert pool.num_free == 0
    pool.check()


def test_an_allocation_that_does_not_fit_is_refused_whole_and_says_how_many_pages_there_are():
    pool = PagePool(4)
    pool.allocate(1)
    with pytest.raises(CacheExhausted, match="5 cache pages are needed and 3 of 4 are free") as caught:
        pool.allocate(5)
    assert caught.value.slug == "cache/no-free-page"
    assert pool.num_free == 3
    pool.check()


def test_a_shared_page_is_free_only_after_its_last_owner_let_go():
    pool = PagePool(2)
    [page] = pool.allocate(1)
    pool.share([page])
    pool.share([page])
    for owners in (2, 1):
        pool.release([page])
        assert pool.owners(page) == owners
        assert pool.num_free == 1
    pool.release([page])
    assert pool.num_free == 2
    pool.check()


@pytest.mark.parametrize("pages", [[0, 0], [0, 1], [2], [-1]], ids=["twice", "a free one", "unknown", "negative"])
def test_a_release_that_does_not_match_an_owner_changes_nothing(pages: list[int]):
    pool = PagePool(2)
    assert pool.allocate(1) == [0]
    with pytest.raises(ValueError, match="released more often"):
        pool.release(pages)
    assert (pool.owners(0), pool.num_free) == (1, 1)
    pool.check()


@pytest.mark.parametrize("pages", [[0, 1], [5], [-1]])
def test_only_owned_pages_can_be_shared(pages: list[int]):
    pool = PagePool(2)
    pool.allocate(1)
    with pytest.raises(ValueError, match="cannot be shared"):
        pool.share(pages)
    assert pool.owners(0) == 1


def test_negative_counts_are_refused():
    with pytest.raises(ValueError, match="-1 pages"):
        PagePool(-1)
    with pytest.raises(ValueError, match="-1 pages"):
        PagePool(1).allocate(-1)


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (lambda pool: pool._free.append(pool._free[0]), "free twice"),
        (lambda pool: pool._free.append(0), "page 0 has 1 owners and is free"),
        (lambda pool: pool._free.remove(2), "page 2 has 0 owners and is not free"),
        (lambda pool: pool._free.append(9), "unknown page"),
    ],
)
def test_check_names_what_is_broken(break_it, said: str):
    pool = PagePool(3)
    assert pool.allocate(1) == [0]
    break_it(pool)
    with pytest.raises(RuntimeError, match=said):
        pool.check()


@given(st.integers(0, 20), st.data())
def test_pages_that_come_back_can_be_handed_out_again(num_pages: int, data: st.DataObject):
    pool = PagePool(num_pages)
    count = data.draw(st.integers(0, num_pages))
    pages = pool.allocate(count)
    pool.release(data.draw(st.permutations(pages)))
    assert sorted(pool.allocate(num_pages)) == list(range(num_pages))


def test_a_retained_page_stays_without_users_and_is_idle_until_it_is_used_again():
    pool = PagePool(3)
    [page, other] = pool.allocate(2)
    pool.retain([page])
    assert (pool.owners(page), pool.users(page), pool.num_idle) == (2, 1, 0)
    pool.release([page, other])
    assert (pool.owners(page), pool.users(page), pool.num_idle, pool.num_free) == (1, 0, 1, 2)
    pool.share([page])
    assert (pool.users(page), pool.num_idle) == (1, 0)
    pool.let_go([page])
    assert (pool.owners(page), pool.num_free) == (1, 2)
    pool.release([page])
    assert (pool.num_free, pool.num_idle) == (3, 0)
    pool.check()


def test_a_retained_page_without_users_is_free_once_it_is_let_go():
    pool = PagePool(1)
    pool.retain(pool.allocate(1))
    pool.release([0])
    pool.let_go([0])
    assert (pool.num_free, pool.num_idle) == (1, 0)
    pool.check()


def test_a_user_cannot_release_what_is_retained():
    pool = PagePool(1)
    pool.retain(pool.allocate(1))
    with pytest.raises(ValueError, match="released more often"):
        pool.release([0, 0])
    pool.release([0])
    with pytest.raises(ValueError, match="released more often"):
        pool.release([0])
    assert pool.num_idle == 1


@pytest.mark.parametrize("pages", [[1], [0, 0], [2], [-1]], ids=["free", "twice", "unknown", "negative"])
def test_only_owned_pages_can_be_retained_and_only_once(pages: list[int]):
    pool = PagePool(2)
    pool.allocate(1)
    with pytest.raises(ValueError, match="cannot be retained"):
        pool.retain(pages)
    with pytest.raises(ValueError, match="is not retained"):
        pool.let_go(pages)
    pool.retain([0])
    with pytest.raises(ValueError, match="cannot be retained"):
        pool.retain([0])
    assert pool.owners(0) == 2
    pool.check()


@pytest.mark.parametrize("damage", [lambda pool: setattr(pool, "_num_idle", 1), lambda pool: pool._is_retained.clear()])
def test_a_check_notices_retained_pages_that_were_miscounted(damage):
    pool = PagePool(2)
    pool.retain(pool.allocate(1))
    damage(pool)
    with pytest.raises((RuntimeError, IndexError)):
        pool.check()


class PoolAgainstAModel(RuleBasedStateMachine):
    """The model is a plain mapping from page to number of owners, and the pages that are retained."""

    NUM_PAGES = 6

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(self.NUM_PAGES)
        self.owners: dict[int, int] = {}
        self.retained: set[int] = set()

    @rule(count=st.integers(0, NUM_PAGES + 1))
    def allocate(self, count: int) -> None:
        if count > self.NUM_PAGES - len(self.owners):
            with pytest.raises(CacheExhausted):
                self.pool.allocate(count)
            return
        pages = self.pool.allocate(count)
        assert len(set(pages)) == count
        assert not set(pages) & set(self.owners)
        self.owners |= dict.fromkeys(pages, 1)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.owners)))
        self.pool.share([page])
        self.owners[page] += 1

    @precondition(lambda self: set(self.owners) - self.retained)
    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(set(self.owners) - self.retained)))
        self.pool.retain([page])
        self.owners[page] += 1
        self.retained.add(page)

    @precondition(lambda self: self.retained)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.retained)))
        self.pool.let_go([page])
        self.retained.remove(page)
        self.owners[page] -= 1
        if not self.owners[page]:
            del self.owners[page]

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.owners)))
        if page in self.retained and self.owners[page] == 1:
            with pytest.raises(ValueError, match="released more often"):
                self.pool.release([page])
            return
        self.pool.release([page])
        self.owners[page] -= 1
        if not self.owners[page]:
            del self.owners[page]

    @invariant()
    def the_pool_agrees(self) -> None:
        self.pool.check()
        assert self.pool.num_free == self.NUM_PAGES - len(self.owners)
        assert [self.pool.owners(page) for page in range(self.NUM_PAGES)] == [
            self.owners.get(page, 0) for page in range(self.NUM_PAGES)
        ]
        assert self.pool.num_idle == sum(self.owners[page] == 1 for page in self.retained)


TestPoolAgainstAModel = PoolAgainstAModel.TestCase
