from __future__ import annotations

from collections.abc import Mapping

import pytest

from proa.cache.pages import PagePool
from proa.cache.tables import BlockTables
from proa.cache.transaction import CacheTransaction


class Recorder:
    """A participant that writes down what it was told, and fails where it is asked to."""

    def __init__(self, name: str, log: list[str], fails: str = "") -> None:
        self.name, self.log, self.fails = name, log, fails

    def _told(self, what: str) -> None:
        self.log.append(f"{self.name} {what}")
        if what == self.fails:
            raise ArithmeticError(f"{self.name} cannot {what}")

    def mark(self) -> None:
        self._told("mark")

    def keep(self, rows: Mapping[int, int]) -> None:
        self._told("keep")

    def undo(self) -> None:
        self._told("undo")


def test_commit_keeps_in_every_participant():
    log: list[str] = []
    with CacheTransaction([Recorder("a", log), Recorder("b", log)]) as transaction:
        transaction.commit({})
    assert log == ["a mark", "b mark", "a keep", "b keep"]


def test_a_participant_that_cannot_keep_undoes_all():
    log: list[str] = []
    with (
        pytest.raises(ArithmeticError, match="b cannot keep"),
        CacheTransaction([Recorder("a", log), Recorder("b", log, fails="keep"), Recorder("c", log)]) as transaction,
    ):
        transaction.commit({})
    assert sorted(log[5:]) == ["a undo", "b undo", "c undo"]


def test_a_participant_that_cannot_keep_leaves_the_tables_as_marked():
    tables = BlockTables(PagePool(4), 2)
    with CacheTransaction([tables]) as transaction:
        tables.reserve(1, 3)
        transaction.commit({1: 3})
    before = (tables.length(1), tables.pages(1), tables.free_rows)
    with (
        pytest.raises(ArithmeticError),
        CacheTransaction([tables, Recorder("b", [], fails="keep")]) as transaction,
    ):
        tables.reserve(1, 2)
        tables.reserve(2, 2)
        transaction.commit({1: 2, 2: 2})
    assert (tables.length(1), tables.pages(1), tables.free_rows) == before
    assert not tables.has(2)


def test_an_exception_inside_undoes():
    log: list[str] = []
    with pytest.raises(KeyError), CacheTransaction([Recorder("a", log)]):
        raise KeyError
    assert log == ["a mark", "a undo"]


def test_leaving_it_undecided_is_an_error_and_undoes():
    log: list[str] = []
    with pytest.raises(RuntimeError, match="without commit or rollback"), CacheTransaction([Recorder("a", log)]):
        pass
    assert log == ["a mark", "a undo"]


def test_an_explicit_rollback_undoes_once():
    log: list[str] = []
    with CacheTransaction([Recorder("a", log)]) as transaction:
        transaction.rollback()
    assert log == ["a mark", "a undo"]


def test_it_is_decided_once():
    with CacheTransaction([]) as transaction:
        transaction.commit({})
        with pytest.raises(RuntimeError, match="decided twice"):
            transaction.commit({})
        with pytest.raises(RuntimeError, match="decided twice"):
            transaction.rollback()


def test_a_participant_that_cannot_mark_leaves_none_marked():
    log: list[str] = []
    with pytest.raises(ArithmeticError), CacheTransaction([Recorder("a", log), Recorder("b", log, fails="mark")]):
        pass
    assert log == ["a mark", "b mark", "a undo"]


def test_one_that_cannot_undo_does_not_stop_the_others():
    log: list[str] = []
    with (
        pytest.raises(ArithmeticError, match="b cannot undo"),
        CacheTransaction([Recorder("a", log), Recorder("b", log, fails="undo"), Recorder("c", log)]) as transaction,
    ):
        transaction.rollback()
    assert log[3:] == ["c undo", "b undo", "a undo"]
