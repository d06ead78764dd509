"""From the rows that each request wants computed to one ForwardBatch. Everything a forward needs is made here, once."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

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
    tokens, positions, slots, wanted = list[int](), list[int](), list[int](), list[int]()
    for span in spans:
        _check_room(span, page_size)
        pages, rows = span.pages, range(span.start, span.end)
        wanted += [len(tokens) + row for row in span.logits]
        tokens += span.tokens
        positions += rows
        slots += [pages[row // page_size] * page_size + row % page_size for row in rows]
    segments, states = [], []
    for first, part in _parts(spans):
        segments.append(_segment(part, first, page_size, windows, device))
        states += _states(part)
    # One array and not three: a step of one row is made of small calls, and these are among them.
    of_rows = np.array((tokens, positions, slots), dtype=np.int64)
    return ForwardBatch(
        token_ids=_tensor(of_rows[0], device),
        positions=_tensor(of_rows[1], device),
        write_slots=_tensor(of_rows[2], device),
        segments=tuple(segments),
        logits_rows=None if wanted == list(range(len(tokens))) else _tensor(np.array(wanted, dtype=np.int64), device),
        states=tuple(states),
        hidden=_hidden(spans, device),
        wants_hidden=wants_hidden,
    )


def _check_room(span: RowSpan, page_size: int) -> None:
    if not span.tokens or len(span.pages) * page_size < span.end:
        raise ValueError(f"{len(span.tokens)} rows from {span.start} on do not fit {len(span.pages)} pages")


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


def _parts(spans: Sequence[RowSpan]) -> Iterator[tuple[int, list[RowSpan]]]:
    """The spans that form one segment, and the batch row of the first one's first row."""
    first = 0
    for phase, members in groupby(spans, key=lambda span: span.phase):
        for part in ([span] for span in members) if phase is Phase.PREFILL else [list(members)]:
            yield first, part
            first += sum(len(span.tokens) for span in part)


def _segment(
    part: Sequence[RowSpan], first: int, page_size: int, windows: Collection[int | None], device: str
) -> Segment:
    counts = [len(span.tokens) for span in part]
    queries, num_rows = max(counts), sum(counts)
    starts = [span.start for span in part]
    rows = np.array([*zip(accumulate(counts, initial=0), counts, starts, strict=False)], dtype=np.int64)
    pad, unpad = (None, None) if num_rows == queries * len(part) else _padding(rows, queries, device)
    return Segment(
        phase=part[0].phase,
        first=first,
        num_rows=num_rows,
        requests=len(part),
        queries=queries,
        rows=rows,
        tables=_tables([span.pages for span in part]),
        pad=pad,
        unpad=unpad,
        views=_Views(part, rows, queries, page_size, windows, device),
    )


def _tables(pages: Sequence[Sequence[int]]) -> np.ndarray:
    """[B, P] int32, each row padded with the request's own first page."""
    longest = max(map(len, pages))
    return np.array([(*own, *[own[0]] * (longest - len(own))) for own in pages], dtype=np.int32)


def _queries(rows: np.ndarray, queries: int) -> np.ndarray:
    """[B, Q]: of each request the number of the row that is its query, padded with its last row."""
    return np.minimum(np.arange(queries), rows[:, 1:2] - 1)


def _padding(rows: np.ndarray, queries: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Segment.pad and unpad."""
    is_row = np.arange(queries) < rows[:, 1:2]
    pad = rows[:, :1] + _queries(rows, queries)
    return _tensor(pad.reshape(-1), device), _tensor(np.flatnonzero(is_row), device)


class _Views(Mapping[int | None, View]):
    """The views of a segment by window. Each is made when it is first read: not every backend gathers."""

    def __init__(
        self,
        part: Sequence[RowSpan],
        rows: np.ndarray,
        queries: int,
        page_size: int,
        windows: Collection[int | None],
        device: str,
    ) -> None:
        self._part, self._rows, self._queries = part, rows, queries
        self._page_size, self._windows, self._device = page_size, windows, device
        self._made: dict[int | None, View] = {}

    def __getitem__(self, window: int | None) -> View:
        if window not in self._made:
            if window not in self._windows:
                raise KeyError(window)
            positions = self._rows[:, 2:] + _queries(self._rows, self._queries)
            slots = [_slots(span, self._page_size) for span in self._part]
            self._made[window] = _view(slots, positions, window, self._device)
        return self._made[window]

    def __iter__(self) -> Iterator[int | None]:
        return iter(self._windows)

    def __len__(self) -> int:
        return len(self._windows)


def _slots(span: RowSpan, page_size: int) -> np.ndarray:
    """Cache rows of the request's positions 0 .. end - 1."""
    rows = np.asarray(span.pages, dtype=np.int64)[:, None] * page_size + np.arange(page_size)
    return rows.reshape(-1)[: span.end]


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
