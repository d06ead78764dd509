"""A draft that stops being right is noticed: once, with numbers, and not where its policy knows already."""

from __future__ import annotations

from proa.speculative.drift import FLOOR, WINDOW, AcceptWatch
from proa.speculative.protocol import RequestVerdict, Verdict


def verdict(*emitted: int, proposed: int = 3) -> Verdict:
    """One request per entry, which emitted so many tokens."""
    return Verdict(
        requests=tuple(
            RequestVerdict(
                request_id=number,
                proposed=proposed,
                accepted=count - 1,
                emitted=(0,) * count,
                keep=count,
                finished=False,
                logprobs=(),
            )
            for number, count in enumerate(emitted)
        )
    )


def watch() -> tuple[AcceptWatch, list[str]]:
    notes: list[str] = []
    return AcceptWatch(notes.append), notes


def test_a_collapse_is_told_once_with_the_lengths_now_and_over_all() -> None:
    one, notes = watch()
    for _ in range(100):
        one.record(verdict(4), pays=True)
    assert one.health() == {"state": "healthy", "accept_length": 4.0}
    for _ in range(200):
        one.record(verdict(1), pays=True)
    assert one.health() == {"state": "drifting", "accept_length": 1.0}
    (note,) = notes
    # 64 steps: the mean falls below 1.3 with the 58th bad one, (6 x 4 + 58) / 64 = 1.28; then 458 tokens in 158 steps.
    assert note.startswith(
        "speculative/accept-drift: accept length 1.28 over the last 64 verify steps (2.90 over all 158)"
    )
    assert str(FLOOR) in note


def test_nothing_is_said_before_a_window_is_full() -> None:
    one, notes = watch()
    assert one.health() == {"state": "unknown", "accept_length": None}
    for _ in range(WINDOW - 1):
        one.record(verdict(1), pays=True)
    assert not notes
    assert one.health() == {"state": "unknown", "accept_length": 1.0}
    one.record(verdict(1), pays=True)
    assert len(notes) == 1


def test_requests_of_one_step_count_one_by_one_and_plain_ones_not_at_all() -> None:
    one, notes = watch()
    for _ in range(WINDOW // 4):
        one.record(verdict(1, 1, 1, 1), pays=True)
    assert len(notes) == 1
    other, notes = watch()
    for _ in range(2 * WINDOW):
        other.record(verdict(1, proposed=0), pays=True)
    assert not notes and other.health()["state"] == "unknown"


def test_a_policy_that_has_found_that_it_does_not_pay_is_not_told_again() -> None:
    one, notes = watch()
    for _ in range(2 * WINDOW):
        one.record(verdict(1), pays=False)
    assert not notes
    assert one.health()["state"] == "drifting"
    one.record(verdict(1), pays=True)
    assert len(notes) == 1


def test_a_draft_at_the_floor_is_not_drifting_and_one_that_recovers_is_healthy_again() -> None:
    one, notes = watch()
    for step in range(10 * WINDOW):
        one.record(verdict(2 if step % 3 == 0 else 1), pays=True)  # 1.33 or 1.34
    assert not notes and one.health()["state"] == "healthy"
    for length in (1, 3):
        for _ in range(WINDOW):
            one.record(verdict(length), pays=True)
    assert one.health() == {"state": "healthy", "accept_length": 3.0}
    assert len(notes) == 1
