from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proa.cache.pages import PagePool
from proa.cache.tables import BlockTables
from proa.errors import CacheExhausted


def tables(num_pages: int = 8, page_size: int = 4) -> BlockTables:
    return BlockTables(PagePool(num_pages), page_size)


def write(cache: BlockTables, keep: dict[int, int], reserve: dict[int, int] | None = None) -> None:
    cache.mark()
    for request_id, rows in (reserve or keep).items():
        cache.reserve(request_id, rows)
    cache.keep(keep)


def state(cache: BlockTables) -> dict[int, tuple[int, tuple[int, ...]]]:
    return {request_id: (cache.length(request_id), cache.pages(request_id)) for request_id in range(6)}


def test_kept_rows_are_committed_and_surplus_pages_are_free_again():
    cache = tables()
    write(cache, keep={1: 5}, reserve={1: 13})
    assert cache.length(1) == 5
    assert len(cache.pages(1)) == 2
    assert cache.free_rows == 6 * 4


def test_reserved_rows_are_not_committed_before_keep():
    cache = tables()
    cache.mark()
    cache.reserve(1, 5)
    assert cache.length(1) == 0
    assert len(cache.pages(1)) == 2


def test_rows_fill_the_last_page_before_a_new_one_is_taken():
    cache = tables()
    write(cache, keep={1: 3})
    first = cache.pages(1)
    write(cache, keep={1: 1})
    assert cache.pages(1) == first
    write(cache, keep={1: 1})
    assert cache.pages(1)[:1] == first
    assert len(cache.pages(1)) == 2


def test_a_request_without_an_entry_keeps_nothing_and_a_new_one_vanishes():
    cache = tables()
    write(cache, keep={1: 4})
    before = state(cache)
    write(cache, keep={}, reserve={1: 9, 2: 1})
    assert state(cache) == before
    assert not cache.has(2)


def test_an_entry_for_an_unknown_request_means_nothing():
    cache = tables()
    write(cache, keep={1: 4, 2: 7}, reserve={1: 4})
    assert cache.length(1) == 4
    assert not cache.has(2)


def test_keeping_more_than_was_reserved_keeps_what_there_is():
    cache = tables()
    write(cache, keep={1: 4}, reserve={1: 3})
    assert cache.length(1) == 3


def test_a_later_reserve_extends_an_earlier_one_and_never_shrinks_it():
    cache = tables()
    cache.mark()
    cache.reserve(1, 2)
    cache.reserve(1, 6)
    cache.reserve(1, 1)
    cache.keep({1: 6})
    assert cache.length(1) == 6


def test_settled_rows_count_before_what_is_kept():
    cache = tables()
    write(cache, keep={1: 3})
    cache.mark()
    cache.reserve(1, 4)
    cache.settle(1, 2)
    assert cache.length(1) == 5
    cache.keep({1: 1})
    assert cache.length(1) == 6


def test_undo_takes_settled_rows_back_too():
    cache = tables()
    write(cache, keep={1: 3})
    before = state(cache)
    cache.mark()
    cache.reserve(1, 9)
    cache.settle(1, 7)
    cache.undo()
    assert state(cache) == before


def test_discarded_rows_are_not_kept_and_settled_ones_are():
    cache = tables()
    write(cache, keep={1: 3})
    cache.mark()
    cache.reserve(1, 9)
    cache.settle(1, 4)
    cache.discard(1)
    cache.discard(5)  # unknown: it has none
    cache.keep({1: 9})
    assert cache.length(1) == 7
    assert len(cache.pages(1)) == 2
    assert cache.free_rows == 6 * 4
    cache.pool.check()


def test_a_request_of_which_all_is_discarded_vanishes_and_an_undo_still_works():
    cache = tables()
    write(cache, keep={1: 3})
    before = state(cache)
    cache.mark()
    cache.reserve(2, 5)
    cache.discard(2)
    cache.keep({2: 5})
    assert state(cache) == before
    cache.mark()
    cache.reserve(1, 6)
    cache.settle(1, 2)
    cache.discard(1)
    cache.undo()
    assert state(cache) == before
    cache.pool.check()


def test_rows_can_be_reserved_again_after_they_were_discarded():
    cache = tables()
    cache.mark()
    cache.reserve(1, 9)
    cache.discard(1)
    cache.reserve(1, 2)
    cache.keep({1: 9})
    assert cache.length(1) == 2


@pytest.mark.parametrize(("request_id", "rows"), [(1, 3), (1, -1), (2, 0)])
def test_only_tentative_rows_can_be_settled(request_id: int, rows: int):
    cache = tables()
    cache.mark()
    cache.reserve(1, 2)
    with pytest.raises(RuntimeError, match="tentative rows to settle"):
        cache.settle(request_id, rows)


def test_a_reserve_without_pages_changes_nothing():
    cache = tables(num_pages=2)
    write(cache, keep={1: 4})
    cache.mark()
    before = state(cache)
    with pytest.raises(CacheExhausted):
        cache.reserve(1, 5)
    with pytest.raises(CacheExhausted):
        cache.reserve(2, 5)
    assert state(cache) == before
    cache.keep({})
    assert state(cache) == before


def test_undo_after_keep_returns_to_the_mark():
    cache = tables()
    write(cache, keep={1: 5})
    before = state(cache)
    cache.mark()
    cache.reserve(1, 8)
    cache.reserve(2, 3)
    cache.keep({1: 6, 2: 3})
    cache.undo()
    assert state(cache) == before
    cache.pool.check()


def test_release_gives_all_pages_back_and_an_unknown_request_has_none():
    cache = tables()
    write(cache, keep={1: 5, 2: 9})
    cache.release(1)
    cache.release(2)
    cache.release(3)
    assert cache.pool.num_free == 8
    assert not cache.has(1)


def test_rows_move_in_a_transaction_only_and_pages_are_released_outside_of_it():
    cache = tables()
    with pytest.raises(RuntimeError, match="in a transaction only"):
        cache.reserve(1, 1)
    with pytest.raises(RuntimeError, match="in a transaction only"):
        cache.discard(1)
    with pytest.raises(RuntimeError, match="in a transaction only"):
        cache.keep({})
    cache.mark()
    with pytest.raises(RuntimeError, match="already"):
        cache.mark()
    with pytest.raises(RuntimeError, match="cannot be released"):
        cache.release(1)


def test_a_negative_count_is_refused_before_anything_is_kept():
    cache = tables()
    cache.mark()
    cache.reserve(1, 2)
    with pytest.raises(ValueError, match="negative"):
        cache.keep({1: 2, 2: -1})
    assert cache.length(1) == 0


def test_a_request_begins_with_adopted_pages_and_writes_after_them():
    cache = tables()
    write(cache, keep={1: 9})
    shared = cache.pages(1)[:2]
    cache.adopt(2, shared)
    assert (cache.length(2), cache.pages(2), cache.num_pages(2)) == (8, shared, 2)
    write(cache, keep={2: 3})
    assert cache.pages(2)[:2] == shared
    assert cache.pages(2)[2] not in cache.pages(1)
    cache.release(1)
    assert [cache.pool.owners(page) for page in shared] == [1, 1]
    cache.release(2)
    assert cache.pool.num_free == 8


def test_rows_after_adopted_pages_are_undone_and_the_pages_stay():
    cache = tables()
    write(cache, keep={1: 8})
    cache.adopt(2, cache.pages(1))
    before = state(cache)
    cache.mark()
    cache.reserve(2, 6)
    cache.undo()
    assert state(cache) == before
    cache.mark()
    cache.reserve(2, 6)
    cache.keep({})
    assert state(cache) == before
    cache.pool.check()


def test_adopting_no_pages_is_beginning_with_nothing():
    cache = tables()
    cache.adopt(1, [])
    assert not cache.has(1)
    assert cache.num_pages(1) == 0


def test_pages_are_adopted_by_a_request_without_rows_and_outside_of_a_transaction_only():
    cache = tables()
    write(cache, keep={1: 4, 2: 1})
    with pytest.raises(ValueError, match="request 2 has 1 rows already"):
        cache.adopt(2, cache.pages(1))
    with pytest.raises(ValueError, match="cannot be shared"):
        cache.adopt(3, [7])
    cache.mark()
    with pytest.raises(RuntimeError, match="cannot be adopted in a transaction"):
        cache.adopt(3, cache.pages(1))
    assert [cache.pool.owners(page) for page in cache.pages(1)] == [1]


@pytest.mark.parametrize("share", ["share", "retain"])
def test_a_row_is_never_written_to_a_page_that_others_read(share: str):
    cache = tables()
    write(cache, keep={1: 6})
    full, partly = cache.pages(1)
    getattr(cache.pool, share)([full])
    write(cache, keep={1: 1})
    getattr(cache.pool, share)([partly])
    cache.mark()
    with pytest.raises(RuntimeError, match="request 1: row 7 would be written to a shared page"):
        cache.reserve(1, 1)
    assert cache.length(1) == 7


def test_a_page_needs_a_row():
    with pytest.raises(ValueError, match="0 rows"):
        BlockTables(PagePool(1), 0)


steps = st.lists(
    st.tuples(
        st.dictionaries(st.integers(0, 4), st.integers(1, 9), max_size=4),
        st.dictionaries(st.integers(0, 5), st.integers(0, 10), max_size=5),
        st.sets(st.integers(0, 5), max_size=2),
        st.sampled_from(["keep", "undo", "keep then undo"]),
        st.sets(st.integers(0, 5), max_size=1),
    ),
    max_size=12,
)


@settings(max_examples=200)
@given(steps, st.integers(1, 5))
def test_lengths_follow_a_plain_count_and_pages_are_conserved(steps, page_size: int):
    cache = tables(num_pages=24, page_size=page_size)
    lengths: dict[int, int] = {}
    for reserve, keep, discard, end, leave in steps:
        before = state(cache)
        cache.mark()
        reserved = {}
        for request_id, rows in reserve.items():
            try:
                cache.reserve(request_id, rows)
                reserved[request_id] = rows
            except CacheExhausted:
                assert cache.pool.num_free < cache.pages_for(lengths.get(request_id, 0) + rows)
        for request_id in discard:
            cache.discard(request_id)
            reserved.pop(request_id, None)
        if end == "undo":
            cache.undo()
        else:
            cache.keep(keep)
        if end == "keep":
            for request_id, rows in reserved.items():
                lengths[request_id] = lengths.get(request_id, 0) + min(rows, keep.get(request_id, 0))
        else:
            cache.undo()
            assert state(cache) == before
        for request_id in leave:
            cache.release(request_id)
            lengths.pop(request_id, None)
        cache.pool.check()
        assert all(cache.length(request_id) == lengths.get(request_id, 0) for request_id in range(6))
        owned = [page for request_id in range(6) for page in cache.pages(request_id)]
        assert len(owned) == len(set(owned)) == cache.pool.num_pages - cache.pool.num_free
        assert all(len(cache.pages(i)) == cache.pages_for(cache.length(i)) for i in range(6))
