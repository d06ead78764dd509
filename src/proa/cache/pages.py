"""The page ids of one runner's KV cache: who may write where. Owns no tensors and no rows. Torch-free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from proa.errors import CacheExhausted


class PagePool:
    """Hands out page ids 0 .. num_pages - 1, each with a count of its owners.

    A page is free exactly when nobody owns it. Every call checks its arguments before it changes anything, so a refused
    call leaves the pool as it was.

    One owner may be the tree of prefixes (cache/prefix.py), which keeps pages for requests to come and lets go of them
    when their room is needed: the others are the page's users, and a page without users is as good as free.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 0:
            raise ValueError(f"a pool cannot have {num_pages} pages")
        self._owners = [0] * num_pages
        self._is_retained = [False] * num_pages
        self._num_idle = 0
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_pages(self) -> int:
        return len(self._owners)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_idle(self) -> int:
        """Retained pages without users."""
        return self._num_idle

    def owners(self, page: int) -> int:
        """How many tables (or other holders) share the page; 0 when it is free."""
        return self._owners[page]

    def users(self, page: int) -> int:
        """Its owners, but for the one that retains it."""
        return self._owners[page] - self._is_retained[page]

    def allocate(self, count: int) -> list[int]:
        """Return `count` free pages, now owned once. All or nothing: CacheExhausted when fewer are free."""
        if count < 0:
            raise ValueError(f"cannot allocate {count} pages")
        if count > len(self._free):
            raise CacheExhausted(
                "cache/no-free-page",
                f"{count} cache pages are needed and {len(self._free)} of {self.num_pages} are free.",
                hint="give the cache more memory (--kv-memory), or run fewer requests at once (--max-num-seqs)",
            )
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._owners[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add one owner to each page. Only an owned page can be shared."""
        pages = list(pages)
        for page in pages:
            if not self._is_owned(page):
                raise ValueError(f"page {page} is free or unknown and cannot be shared")
        for page in pages:
            self._num_idle -= self._is_idle(page)
            self._owners[page] += 1

    def retain(self, pages: Iterable[int]) -> None:
        """Own pages for requests to come. Only an owned page can be retained, and only once."""
        pages = list(pages)
        for page, times in Counter(pages).items():
            if not self._is_owned(page) or self._is_retained[page] or times > 1:
                raise ValueError(f"page {page} is free, unknown or retained, and cannot be retained")
        for page in pages:
            self._is_retained[page] = True
            self._owners[page] += 1

    def let_go(self, pages: Iterable[int]) -> None:
        """The reverse of `retain`."""
        pages = list(pages)
        for page, times in Counter(pages).items():
            if not self._is_owned(page) or not self._is_retained[page] or times > 1:
                raise ValueError(f"page {page} is not retained")
        for page in pages:
            self._num_idle -= self._is_idle(page)
            self._is_retained[page] = False
            self._drop(page, 1)

    def release(self, pages: Iterable[int]) -> None:
        """Take one owner from each page; a page without owners is free again."""
        counts = Counter(pages)
        for page, count in counts.items():
            if not self._is_owned(page) or count > self.users(page):
                raise ValueError(f"page {page} is released more often than it is owned")
        for page, count in counts.items():
            self._drop(page, count)
            self._num_idle += self._is_idle(page)

    def check(self) -> None:
        """Raise RuntimeError unless every page is either free once or owned, never both and never neither."""
        free = set(self._free)
        if len(free) != len(self._free):
            raise RuntimeError("a page is free twice")
        for page, owners in enumerate(self._owners):
            if owners < 0 or (owners == 0) != (page in free):
                raise RuntimeError(f"page {page} has {owners} owners and is {'' if page in free else 'not '}free")
        if free - set(range(self.num_pages)):
            raise RuntimeError("an unknown page is free")
        idle = sum(map(self._is_idle, range(self.num_pages)))
        if idle != self._num_idle or any(self.users(page) < 0 for page in range(self.num_pages)):
            raise RuntimeError(f"{idle} pages are retained and without users, {self._num_idle} were counted")

    def _drop(self, page: int, count: int) -> None:
        self._owners[page] -= count
        if not self._owners[page]:
            self._free.append(page)

    def _is_idle(self, page: int) -> bool:
        return self._is_retained[page] and self._owners[page] == 1

    def _is_owned(self, page: int) -> bool:
        return 0 <= page < len(self._owners) and self._owners[page] > 0
