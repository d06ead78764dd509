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
    assert one.health() == {"state": "healthy", "accept_length": 4.0, "best_accept_length": 4.0}
    for _ in range(200):
        one.record(verdict(1), pays=True)
    assert one.health() == {"state": "drifting", "accept_length": 1.0, "best_accept_length": 4.0}
    (note,) = notes
    # 64 steps: the mean falls below 1.3 with the 58th bad one, (6 x 4 + 58) / 64 = 1.28; then 458 tokens in 158 steps.
    assert note.startswith(
        "speculative/accept-drift: accept length 1.28 over the last 64 verify steps (2.90 over all 158)"
    )
    assert str(FLOOR) in note


def test_nothing_is_said_before_a_window_is_full() -> None:
    one, notes = watch()
    assert one.health() == {"state": "unknown", "accept_length": None, "best_accept_length": None}
    for _ in range(WINDOW - 1):
        one.record(verdict(1), pays=True)
    assert not notes
    assert one.health() == {"state": "unknown", "accept_length": 1.0, "best_accept_length": None}
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
    assert one.health() == {"state": "healthy", "accept_length": 3.0, "best_accept_length": 3.0}
    assert len(notes) == 1


def steps_of(one: AcceptWatch, lengths: list[int], times: int, *, proposed: int = 3) -> None:
    for step in range(times):
        one.record(verdict(lengths[step % len(lengths)], proposed=proposed), pays=True)


def test_a_fall_far_below_its_own_best_is_told_though_it_is_above_the_floor() -> None:
    one, notes = watch()
    steps_of(one, [4], WINDOW)
    steps_of(one, [1, 2], WINDOW - 1)
    assert not notes  # the last window has one good step yet, and nothing has been low for long
    steps_of(one, [2, 1], 2 * WINDOW)
    (note,) = notes
    assert note.startswith("speculative/accept-drift: accept length 1.50 over the last 64 verify steps")
    assert "after 4.00 at its best" in note and "does not fit its target any more" in note
    assert one.health() == {"state": "drifting", "accept_length": 1.5, "best_accept_length": 4.0}
    steps_of(one, [4], WINDOW)
    assert one.health()["state"] == "healthy"


def test_a_fall_is_told_when_it_has_lasted_for_a_window() -> None:
    one, notes = watch()
    steps_of(one, [4], WINDOW)
    # n steps of 1.5 leave 4 - 2.5 n / 64, below 1 + 3 / 4 from the 58th on.
    steps_of(one, [1, 2], 57 + WINDOW - 1)
    assert not notes and one.health()["state"] == "healthy"
    steps_of(one, [2, 1], 1)
    assert len(notes) == 1 and one.health()["state"] == "drifting"


def test_harder_text_is_no_fall() -> None:
    one, notes = watch()
    steps_of(one, [4], WINDOW)
    steps_of(one, [2], 5 * WINDOW)  # a third of the three tokens that it added before
    assert not notes and one.health()["state"] == "healthy"


def test_shorter_proposals_that_are_as_right_are_no_fall() -> None:
    """One token that is right in 7 of 10 steps adds less than a quarter of 2.98, and is a good draft's."""
    one, notes = watch()
    steps_of(one, [4], WINDOW)
    steps_of(one, [2, 2, 1, 2, 1, 2, 2, 1, 2, 2], 5 * WINDOW, proposed=1)
    assert not notes and one.health()["state"] == "healthy"


def test_longer_proposals_of_which_a_smaller_part_is_right_are_no_fall() -> None:
    one, notes = watch()
    steps_of(one, [2], WINDOW, proposed=1)
    steps_of(one, [4], 5 * WINDOW, proposed=16)
    assert not notes and one.health() == {"state": "healthy", "accept_length": 4.0, "best_accept_length": 4.0}


def test_a_collapse_after_a_fall_is_told_too_and_each_of_them_once() -> None:
    one, notes = watch()
    steps_of(one, [4], WINDOW)
    for _ in range(2):
        steps_of(one, [1, 2], 3 * WINDOW)
        steps_of(one, [1], 3 * WINDOW)
        steps_of(one, [4], WINDOW)
    assert [("at its best" in note, str(FLOOR) in note) for note in notes] == [(True, False), (False, True)]
