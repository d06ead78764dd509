"""make_batch: which rows lie where, who sees what, which logits are wanted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from proa.runner.batch import RowSpan, make_batch
from proa.units import Phase


def span(phase: Phase, start: int, count: int, pages: list[int], logits: tuple[int, ...] = ()) -> RowSpan:
    return RowSpan(phase=phase, tokens=list(range(count)), start=start, pages=pages, logits=logits)


def test_rows_are_written_to_the_pages_of_their_request() -> None:
    spans = [span(Phase.PREFILL, 0, 5, [7, 2]), span(Phase.DECODE, 6, 1, [1, 0])]
    batch = make_batch(spans, page_size=4, windows=(None,), device="cpu")
    assert batch.write_slots.tolist() == [28, 29, 30, 31, 8, 2]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 6]
    assert batch.token_ids.tolist() == [0, 1, 2, 3, 4, 0]


def test_prefill_spans_have_a_segment_each_and_neighbours_of_other_phases_share_one() -> None:
    phases = [Phase.PREFILL, Phase.PREFILL, Phase.DECODE, Phase.DECODE, Phase.VERIFY, Phase.VERIFY]
    spans = [span(phase, 3, 2, [i * 2, i * 2 + 1]) for i, phase in enumerate(phases)]
    batch = make_batch(spans, page_size=4, windows=(None,), device="cpu")
    shape = [(part.phase, part.first, part.num_rows, part.requests) for part in batch.segments]
    assert shape == [
        (Phase.PREFILL, 0, 2, 1), (Phase.PREFILL, 2, 2, 1), (Phase.DECODE, 4, 4, 2), (Phase.VERIFY, 8, 4, 2),
    ]  # fmt: skip


def test_requests_of_different_lengths_are_padded_with_their_own_rows() -> None:
    spans = [span(Phase.DECODE, 0, 1, [3]), span(Phase.DECODE, 5, 1, [1, 2])]
    (part,) = make_batch(spans, page_size=4, windows=(None,), device="cpu").segments
    view = part.views[None]
    assert view.slots.view(2, 6).tolist() == [[12, 12, 12, 12, 12, 12], [4, 5, 6, 7, 8, 9]]
    assert view.visible is not None and view.visible[:, 0].tolist() == [[True] + [False] * 5, [True] * 6]
    assert part.pad is None and part.unpad is None


def test_a_request_with_fewer_verify_rows_repeats_its_last_one() -> None:
    spans = [span(Phase.VERIFY, 4, 1, [0, 1]), span(Phase.VERIFY, 2, 3, [2, 3])]
    (part,) = make_batch(spans, page_size=4, windows=(None,), device="cpu").segments
    assert part.pad is not None and part.pad.tolist() == [0, 0, 0, 1, 2, 3]
    assert part.unpad is not None and part.unpad.tolist() == [0, 3, 4, 5]


def test_rows_before_the_window_are_not_gathered() -> None:
    spans = [span(Phase.DECODE, 9, 1, [0, 1, 2])]
    views = make_batch(spans, page_size=4, windows=(None, 3), device="cpu").segments[0].views
    assert views[3].slots.tolist() == [7, 8, 9] and views[3].visible is None
    assert views[None].slots.tolist() == list(range(10))


def test_a_lone_decode_row_needs_no_mask() -> None:
    (part,) = make_batch([span(Phase.DECODE, 9, 1, [0, 1, 2])], page_size=4, windows=(None,), device="cpu").segments
    assert part.views[None].visible is None


def test_logits_rows_follow_the_spans_and_are_none_when_all_are_wanted() -> None:
    spans = [
        span(Phase.PREFILL, 0, 3, [0], (2,)),
        span(Phase.PREFILL, 0, 2, [1]),
        span(Phase.VERIFY, 0, 2, [2], (1, 0)),
    ]
    rows = make_batch(spans, page_size=4, windows=(None,), device="cpu").logits_rows
    assert rows is not None and rows.tolist() == [2, 6, 5]
    every = [span(Phase.VERIFY, 0, 2, [0], (0, 1)), span(Phase.DECODE, 0, 1, [1], (0,))]
    assert make_batch(every, page_size=4, windows=(None,), device="cpu").logits_rows is None


@pytest.mark.parametrize(("start", "count", "pages"), [(3, 2, [0]), (0, 0, [0])])
def test_rows_without_room_in_the_block_table_are_refused(start: int, count: int, pages: list[int]) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        make_batch([span(Phase.PREFILL, start, count, pages)], page_size=4, windows=(None,), device="cpu")


def test_hidden_rows_come_in_the_order_of_the_spans() -> None:
    first, second = torch.ones(2, 4), torch.zeros(1, 4)
    spans = [
        replace(span(Phase.PREFILL, 0, 2, [0]), hidden=first),
        replace(span(Phase.DECODE, 6, 1, [1, 2]), hidden=second),
    ]
    batch = make_batch(spans, page_size=4, windows=(None,), device="cpu", wants_hidden=True)
    assert batch.hidden is not None and torch.equal(batch.hidden, torch.cat((first, second))) and batch.wants_hidden
    plain = make_batch([span(Phase.DECODE, 6, 1, [1, 2])], page_size=4, windows=(None,), device="cpu")
    assert plain.hidden is None and not plain.wants_hidden


@pytest.mark.parametrize("rows", [None, 3])
def test_a_row_without_its_hidden_row_is_refused(rows: int | None) -> None:
    spans = [
        replace(span(Phase.PREFILL, 0, 2, [0]), hidden=None if rows is None else torch.ones(rows, 4)),
        replace(span(Phase.DECODE, 6, 1, [1, 2]), hidden=torch.ones(1, 4)),
    ]
    with pytest.raises(ValueError, match="hidden row"):
        make_batch(spans, page_size=4, windows=(None,), device="cpu")
