"""A next-token layer small enough to be obvious: its rows say what they were made from, and it checks that they fit.

A target's hidden row of position i stands for tokens 0 to i. The layer remembers rows in its pages only; each forward
reads them back and raises where a row is not (hidden row of position i, token i + 1), or where a row made from the
layer's own output lies before one made from the target's: such a row was kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch

from proa.cache.pages import PagePool
from proa.cache.tables import BlockTables
from proa.kernels.reference.sample import ReferenceSample
from proa.runner.batch import ForwardOutput, RowSpan
from proa.speculative.protocol import HiddenRows
from proa.units import Phase

Tokens = tuple[int, ...]
TARGET, OWN = 0.0, 1.0


class Hidden:
    """Hidden rows [n, 2]: the number of the tokens that a row stands for, and whose it is."""

    def __init__(self) -> None:
        self._numbers: dict[Tokens, int] = {}
        self._tokens: list[Tokens] = []

    def row(self, tokens: Sequence[int], owner: float = TARGET) -> torch.Tensor:
        known = tuple(tokens)
        if known not in self._numbers:
            self._numbers[known] = len(self._tokens)
            self._tokens.append(known)
        return torch.tensor([float(self._numbers[known]), owner])

    def read(self, row: torch.Tensor) -> tuple[Tokens, float]:
        return self._tokens[int(row[0])], float(row[1])

    def rows(self, request_id: int, tokens: Sequence[int], start: int, stop: int) -> HiddenRows:
        """What a target gives for the positions [start, stop) of `tokens`."""
        rows = torch.stack([self.row(tokens[: position + 1]) for position in range(start, stop)])
        return HiddenRows(request_id=request_id, start=start, rows=rows)


class NextRunner:
    """Logits of row i are `logits(tokens 0 to i + 1, how many rows in a row are its own)`."""

    states = None
    kernels = ReferenceSample()

    def __init__(
        self,
        hidden: Hidden,
        logits: Callable[[Tokens, int], torch.Tensor],
        *,
        num_pages: int = 64,
        page_size: int = 3,
        gives_hidden: bool = True,
        fails_at: Sequence[int] = (),
    ) -> None:
        self.tables = BlockTables(PagePool(num_pages), page_size)
        self.forwards: list[list[RowSpan]] = []
        self.fails_at = fails_at
        self._hidden, self._logits, self._gives_hidden = hidden, logits, gives_hidden
        self._cache: dict[int, tuple[int, torch.Tensor]] = {}

    @property
    def participants(self) -> tuple[BlockTables, ...]:
        return (self.tables,)

    @property
    def rows_per_forward(self) -> list[int]:
        return [sum(len(span.tokens) for span in spans) for spans in self.forwards]

    def forward(self, spans: Sequence[RowSpan]) -> ForwardOutput:
        self.forwards.append(list(spans))
        phases = [span.phase for span in spans]
        assert phases == sorted(phases, key=lambda phase: phase is Phase.DECODE)
        used = Counter(page for span in spans for page in span.pages)
        assert all(self.tables.pool.owners(page) for page in used), "a page is used that nobody owns"
        written = {page for span in spans for page in span.pages[span.start // self.tables.page_size :]}
        assert all(used[page] == self.tables.pool.owners(page) == 1 for page in written), "a page has two owners"
        logits, own = [], []
        for span in spans:
            assert span.hidden is not None and span.hidden.shape == (len(span.tokens), 2)
            for row, entry in enumerate(zip(span.tokens, span.hidden, strict=True), start=span.start):
                self._cache[self._slot(span, row)] = entry
        if len(self.forwards) in self.fails_at:
            raise ArithmeticError(f"forward {len(self.forwards)}")
        for span in spans:
            found = [self._read(span, row) for row in range(span.start, span.end)]
            logits += [self._logits(*found[index]) for index in span.logits]
            own += [self._hidden.row(tokens, OWN) for tokens, _ in found]
        return ForwardOutput(
            logits=torch.stack(logits) if logits else torch.empty(0, 1),
            hidden=torch.stack(own) if self._gives_hidden else None,
        )

    def _slot(self, span: RowSpan, row: int) -> int:
        size = self.tables.page_size
        return span.pages[row // size] * size + row % size

    def _read(self, span: RowSpan, last: int) -> tuple[Tokens, int]:
        """Tokens 0 to `last` + 1, and how many of the rows up to `last` are the layer's own."""
        known: Tokens = ()
        own = 0
        for row in range(last + 1):
            token, hidden = self._cache[self._slot(span, row)]
            tokens, owner = self._hidden.read(hidden)
            assert len(tokens) == row + 1, f"row {row} joins the hidden row of position {len(tokens) - 1}"
            assert not known or tokens == known, f"row {row} does not follow the one before it"
            assert owner == OWN or not own, f"row {row - 1} was made from the draft's own output, and kept"
            own += owner == OWN
            known = (*tokens, token)
        return known, own
