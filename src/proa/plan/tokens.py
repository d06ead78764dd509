"""A tokenizer's ids as one value that can be compared and that prints short. Owns no file reading."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import zip_longest


class TokenTable:
    """Token text by id. Ids without a token at the end are padding and do not count; in between they do."""

    __slots__ = ("_texts", "digest")

    def __init__(self, texts: Sequence[str | None]) -> None:
        end = len(texts)
        while end and texts[end - 1] is None:
            end -= 1
        self._texts = tuple(texts[:end])
        self.digest = hashlib.sha256(repr(self._texts).encode()).hexdigest()[:12]

    @property
    def count(self) -> int:
        return len(self._texts)

    def first_difference(self, other: TokenTable) -> int | None:
        """The lowest id whose text differs, an id that only one of them has included."""
        if self._texts == other._texts:
            return None
        pairs = enumerate(zip_longest(self._texts, other._texts))
        return next((index for index, (mine, theirs) in pairs if mine != theirs), None)

    def show(self, index: int) -> str:
        text = self._texts[index] if index < len(self._texts) else None
        return "no token" if text is None else repr(text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TokenTable) and self._texts == other._texts

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"{self.count} ids, {self.digest}"
