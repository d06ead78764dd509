"""Facts in layers: what is made only when it is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest

from proa.conditions import Facts


class Counting(Mapping[str, int]):
    """Gives every name its length, and remembers which were asked for."""

    def __init__(self) -> None:
        self.read: list[str] = []

    def __getitem__(self, name: str) -> int:
        self.read.append(name)
        return len(name)

    def __iter__(self) -> Iterator[str]:
        return iter(("one", "three"))

    def __len__(self) -> int:
        return 2


def test_the_first_layer_that_has_a_name_answers_and_no_other_is_looked_at() -> None:
    host = Counting()
    facts = Facts({"one": 1}, host)
    assert facts["one"] == 1 and host.read == []
    assert facts["three"] == 5 and set(host.read) == {"three"}


def test_more_facts_go_before_and_leave_the_others_unread() -> None:
    host = Counting()
    facts = Facts(host) | {"three": 3}
    assert (facts["three"], host.read) == (3, [])
    assert set(facts) == {"one", "three"} and len(facts) == 2 and host.read == []


def test_a_layer_may_grow_while_it_is_one() -> None:
    made: dict[str, int] = {}
    facts = Facts({"a": 1}) | made
    with pytest.raises(KeyError, match="b"):
        facts["b"]
    made["b"] = 2
    assert facts["b"] == 2
