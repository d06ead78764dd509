"""Block tables of one runner: which pages hold which request's rows, committed and tentative. Torch-free.

Owns lengths and page lists, not the pages (cache/pages.py) and not the rows in them (cache/kv.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from proa.cache.pages import PagePool


@dataclass(slots=True)
class _Table:
    """`length` committed rows, then `tentative` ones of the open transaction, in `pages`."""

    length: int = 0
    tentative: int = 0
    pages: list[int] = field(default_factory=list[int])


class _Marked(NamedTuple):
    """What `undo` returns a table to. Pages are only ever appended within a transaction, so a count is enough."""

    length: int
    num_pages: int


class BlockTables:
    """A participant of the step's transaction: rows become permanent only by `keep`.

    Between `mark` and `keep` (or `undo`) a request's rows lie after its committed ones, at rows `length`,
    `length + 1`, ... of `pages`. Outside of it nothing can be reserved; inside of it nothing can be released, because
    another request could get the pages before an `undo` wants them back.
    """

    def __init__(self, pool: PagePool, page_size: int) -> None:
        if page_size < 1:
            raise ValueError(f"a page cannot have {page_size} rows")
        self.pool = pool
        self.page_size = page_size
        self._tables: dict[int, _Table] = {}
        self._marked: dict[int, _Marked | None] = {}
        self._is_open = False

    # What stands where

    def has(self, request_id: int) -> bool:
        return request_id in self._tables

    def length(self, request_id: int) -> int:
        """Committed rows; 0 for a request that has none yet."""
        table = self._tables.get(request_id)
        return table.length if table else 0

    def pages(self, request_id: int) -> tuple[int, ...]:
        """The request's pages in row order, tentative ones included: row r lies in pages[r // page_size]."""
        table = self._tables.get(request_id)
        return tuple(table.pages) if table else ()

    def num_pages(self, request_id: int) -> int:
        table = self._tables.get(request_id)
        return len(table.pages) if table else 0

    @property
    def free_rows(self) -> int:
        """Rows in pages that nobody owns."""
        return self.pool.num_free * self.page_size

    def pages_for(self, rows: int) -> int:
        """Pages that hold `rows` rows of one request."""
        return -(-rows // self.page_size)

    # The transaction

    def mark(self) -> None:
        if self._is_open:
            raise RuntimeError("these block tables are in a transaction already")
        self._marked.clear()
        self._is_open = True

    def reserve(self, request_id: int, rows: int) -> None:
        """Make room for `rows` tentative rows after the committed ones; a later call may ask for more.

        Reserve what will be written and no more: `keep` takes a reserved row for a written one.
        Raises CacheExhausted, and changes nothing, when the pages are not there.
        """
        if not self._is_open:
            raise RuntimeError(f"request {request_id}: rows can be reserved in a transaction only")
        known = self._tables.get(request_id)
        table = known or _Table()
        self._check_writable(request_id, table)
        missing = self.pages_for(table.length + rows) - len(table.pages)
        new_pages = self.pool.allocate(missing) if missing > 0 else ()  # most decode steps need none
        if request_id not in self._marked:
            self._marked[request_id] = _Marked(known.length, len(known.pages)) if known else None
        self._tables[request_id] = table
        table.pages += new_pages
        table.tentative = max(table.tentative, rows)

    def settle(self, request_id: int, rows: int) -> None:
        """Count the first `rows` tentative rows as committed for the rest of this transaction; `undo` still drops them.

        For rows of tokens that are already final, such as a drafter's catch-up: what `keep` counts starts after them.
        """
        table = self._tables.get(request_id)
        if not self._is_open or table is None or not 0 <= rows <= table.tentative:
            raise RuntimeError(f"request {request_id} has no {rows} tentative rows to settle")
        table.length += rows
        table.tentative -= rows

    def discard(self, request_id: int) -> None:
        """Forget the request's tentative rows, so that `keep` finds none of them; settled ones stay.

        For rows that were of use within this step only, such as those that a draft made from its own output.
        """
        if not self._is_open:
            raise RuntimeError(f"request {request_id}: rows can be discarded in a transaction only")
        if table := self._tables.get(request_id):
            table.tentative = 0

    def keep(self, rows: Mapping[int, int]) -> None:
        """Commit the first `rows[id]` tentative rows of each request, all of them where it has fewer; free the rest.

        Fewer is normal for a drafter, which never writes the row of its last proposed token.
        """
        if not self._is_open:
            raise RuntimeError("block tables can keep rows in a transaction only")
        if any(count < 0 for count in rows.values()):
            raise ValueError("a negative number of rows cannot be kept")
        for request_id in self._marked:
            table = self._tables[request_id]
            table.length += min(rows.get(request_id, 0), table.tentative)
            self._trim(request_id, self.pages_for(table.length))
        self._is_open = False

    def undo(self) -> None:
        """Return to the marked state, also after `keep` (when another participant could not keep its rows)."""
        for request_id, marked in self._marked.items():
            table = self._tables.get(request_id)
            if table is not None:
                table.length = marked.length if marked else 0
                self._trim(request_id, marked.num_pages if marked else 0)
        self._marked.clear()
        self._is_open = False

    def adopt(self, request_id: int, pages: Sequence[int]) -> None:
        """Let a request that has no rows begin with those in `pages`, all of them full, which others may own as well.

        Their rows are only read: what the request writes goes to the pages after them.
        """
        if self._is_open:
            raise RuntimeError(f"request {request_id}: pages cannot be adopted in a transaction")
        if self.has(request_id):
            raise ValueError(f"request {request_id} has {self.length(request_id)} rows already, and cannot adopt pages")
        self.pool.share(pages)
        if pages:
            self._tables[request_id] = _Table(length=len(pages) * self.page_size, pages=list(pages))

    def release(self, request_id: int) -> None:
        """Forget the request and give its pages back. An unknown request has none to give."""
        if self._is_open:
            raise RuntimeError(f"request {request_id}: pages cannot be released in a transaction")
        table = self._tables.pop(request_id, None)
        self._marked.pop(request_id, None)
        if table is not None:
            self.pool.release(table.pages)

    def _check_writable(self, request_id: int, table: _Table) -> None:
        """The next rows must not go where somebody else reads."""
        first = table.length // self.page_size
        if first < len(table.pages) and self.pool.owners(table.pages[first]) > 1:
            raise RuntimeError(f"request {request_id}: row {table.length} would be written to a shared page")

    def _trim(self, request_id: int, num_pages: int) -> None:
        """Drop tentative rows and the pages after the first `num_pages`; a table without rows goes."""
        table = self._tables[request_id]
        table.tentative = 0
        if len(table.pages) > num_pages:
            surplus = table.pages[num_pages:]
            del table.pages[num_pages:]
            self.pool.release(surplus)
        if not table.pages:
            del self._tables[request_id]
