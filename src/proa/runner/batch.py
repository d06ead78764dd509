"""From the rows that each request wants computed to one ForwardBatch. Everything a forward needs is made here, once."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch

from proa.cache.state_values import StateSpan
from proa.kernels.delta import StateSlots
from proa.kernels.seam import Segment, View
from proa.layers.base import ForwardBatch
from proa.units import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSpan:
    """The rows of one request in one forward: `tokens` go to absolute positions `start`, `start + 1`, ...

    `pages` is the request's block table in this runner's pool, long enough for `start + len(tokens)` rows.
    `logits` says which rows (indices into `tokens`) need logits. `hidden` [len(tokens), D] are the hidden rows that the
    rows of a draft begin with (arch/decoder.py: EntrySpec), None for other models. `state`: where the states of delta
    layers lie, None for models without such layers.
    """

    phase: Phase
    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    logits: Sequence[int]
    hidden: torch.Tensor | None = None
    state: StateSpan | None = None

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOutput:
    """`logits` [R, vocab] float32, in the order in which the spans asked for them. `hidden` [T, D]: every row after the
    final norm, in the compute dtype, of a runner that gives them."""

    logits: torch.Tensor
    hidden: torch.Tensor | None = None


def make_batch(
    spans: Sequence[RowSpan],
    *,
    page_size: int,
    windows: Collection[int | None],
    device: str,
    wants_hidden: bool = False,
) -> ForwardBatch:
    """The batch of all spans, in their order; `windows` are those of the model's layers.

    Neighbouring decode spans, and neighbouring verify spans, share a segment; a prefill span has one of its own,
    because prompts differ in length too much to be padded.
    """
    slots = [_slots(span, page_size) for span in spans]
    segments, states, first = [], [], 0
    for members in _runs(spans):
        part = [(spans[index], slots[index]) for index in members]
        states += _states([span for span, _ in part])
        segments.append(_segment(part, first, windows, device))
        first += segments[-1].num_rows
    firsts = np.cumsum([0] + [len(span.tokens) for span in spans])
    wanted = [int(begin) + row for begin, span in zip(firsts, spans, strict=False) for row in span.logits]
    return ForwardBatch(
        token_ids=_tensor(np.concatenate([np.asarray(span.tokens, dtype=np.int64) for span in spans]), device),
        positions=_tensor(np.concatenate([np.arange(span.start, span.end) for span in spans]), device),
        write_slots=_tensor(np.concatenate([s[span.start :] for span, s in zip(spans, slots, strict=True)]), device),
        segments=tuple(segments),
        logits_rows=None if wanted == list(range(first)) else _tensor(np.asarray(wanted, dtype=np.int64), device),
        states=tuple(states),
        hidden=_hidden(spans, device),
        wants_hidden=wants_hidden,
    )


def _hidden(spans: Sequence[RowSpan], device: str) -> torch.Tensor | None:
    parts = [span.hidden for span in spans if span.hidden is not None]
    if not parts:
        return None
    if [len(part) for part in parts] != [len(span.tokens) for span in spans]:
        raise ValueError("every row of a draft needs a hidden row, or none does")
    return torch.cat(parts).to(device)


def _states(spans: Sequence[RowSpan]) -> Iterator[StateSlots]:
    """One for the segment of these spans, where they have states."""
    given = [(span.state, len(span.tokens)) for span in spans if span.state is not None]
    if any(len(state.targets) != rows or len(state.kept) != rows for state, rows in given):
        raise ValueError("the states of a span do not match its rows")
    if given:
        yield StateSlots.of(
            [state.source for state, _ in given],
            [slot for state, _ in given for slot in state.targets],
            [row for state, _ in given for row in state.kept],
        )


def _slots(span: RowSpan, page_size: int) -> np.ndarray:
    """Cache rows of the request's positions 0 .. end - 1."""
    if not span.tokens or len(span.pages) * page_size < span.end:
        raise ValueError(f"{len(span.tokens)} rows from {span.start} on do not fit {len(span.pages)} pages")
    rows = np.asarray(span.pages, dtype=np.int64)[:, None] * page_size + np.arange(page_size)
    return rows.reshape(-1)[: span.end]


def _runs(spans: Sequence[RowSpan]) -> Iterator[list[int]]:
    """Indices of the spans that form one segment."""
    for phase, members in groupby(range(len(spans)), key=lambda index: spans[index].phase):
        match phase:
            case Phase.PREFILL:
                yield from ([index] for index in members)
            case Phase.DECODE | Phase.VERIFY:
                yield list(members)


def _segment(
    part: Sequence[tuple[RowSpan, np.ndarray]], first: int, windows: Collection[int | None], device: str
) -> Segment:
    counts = np.array([len(span.tokens) for span, _ in part])
    queries, num_rows = int(counts.max()), int(counts.sum())
    query = np.minimum(np.arange(queries), counts[:, None] - 1)  # [B, Q], padded with the request's last row
    firsts = np.cumsum(counts) - counts
    is_ragged = num_rows != queries * len(part)
    pad = _tensor((firsts[:, None] + query).reshape(-1), device) if is_ragged else None
    real = np.flatnonzero((np.arange(queries) < counts[:, None]).reshape(-1))
    starts = np.array([span.start for span, _ in part])
    positions = starts[:, None] + query
    return Segment(
        phase=part[0][0].phase,
        first=first,
        num_rows=num_rows,
        requests=len(part),
        queries=queries,
        rows=np.stack((firsts, counts, starts), axis=1),
        tables=_tables([span.pages for span, _ in part]),
        pad=pad,
        unpad=_tensor(real, device) if is_ragged else None,
        views=_Views([slots for _, slots in part], positions, windows, device),
    )


def _tables(pages: Sequence[Sequence[int]]) -> np.ndarray:
    """[B, P] int32, each row padded with the request's own first page."""
    tables = np.empty((len(pages), max(map(len, pages))), dtype=np.int32)
    for row, own in zip(tables, pages, strict=True):
        row[: len(own)], row[len(own) :] = own, own[0]
    return tables


class _Views(Mapping[int | None, View]):
    """The views of a segment by window. Each is made when it is first read: not every backend gathers."""

    def __init__(
        self, slots: Sequence[np.ndarray], positions: np.ndarray, windows: Collection[int | None], device: str
    ) -> None:
        self._slots, self._positions, self._windows, self._device = slots, positions, windows, device
        self._made: dict[int | None, View] = {}

    def __getitem__(self, window: int | None) -> View:
        if window not in self._made:
            if window not in self._windows:
                raise KeyError(window)
            self._made[window] = _view(self._slots, self._positions, window, self._device)
        return self._made[window]

    def __iter__(self) -> Iterator[int | None]:
        return iter(self._windows)

    def __len__(self) -> int:
        return len(self._windows)


def _view(slots: Sequence[np.ndarray], positions: np.ndarray, window: int | None, device: str) -> View:
    """`slots` of each request's positions from 0 on; `positions` [B, Q] of the queries."""
    low = np.zeros(len(slots), dtype=np.int64) if window is None else np.maximum(positions[:, 0] - window + 1, 0)
    seen = [rows[begin:] for rows, begin in zip(slots, low, strict=True)]
    length = max(len(rows) for rows in seen)
    padded = np.empty((len(seen), length), dtype=np.int64)
    for row, rows in zip(padded, seen, strict=True):
        row[: len(rows)], row[len(rows) :] = rows, rows[0]
    keys = (low[:, None] + np.arange(length))[:, None, :]  # absolute positions [B, 1, L]
    visible = keys <= positions[:, :, None]
    if window is not None:
        visible &= keys > positions[:, :, None] - window
    return View(
        slots=_tensor(padded.reshape(-1), device),
        visible=None if visible.all() else _tensor(visible, device),
    )


def _tensor(array: np.ndarray, device: str) -> torch.Tensor:
    return torch.from_numpy(array).to(device)
