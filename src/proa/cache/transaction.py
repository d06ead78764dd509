"""One transaction per step over everything that a rejected proposal must undo. Owns no state of the participants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol


class Participant(Protocol):
    """Part of the state that a step may write tentatively (block tables of one runner, sampling state, ...)."""

    def mark(self) -> None:
        """Remember the committed state; what is written from now on is tentative."""
        ...

    def keep(self, rows: Mapping[int, int]) -> None:
        """Commit, per request id, the first `rows` tentative rows of this step; drop the rest.

        A request without an entry keeps nothing new; an entry for a request that is unknown here means nothing.
        """
        ...

    def undo(self) -> None:
        """Return to the marked state. Must not fail, and may be called after a complete or a partial `keep`."""
        ...


class CacheTransaction:
    """Rows written since `begin` become permanent only by `commit(keep)`.

    One per step, over participants of both runners, because a verifier that keeps three rows of one and four of
    another corrupts the request without any error. A failure in any participant undoes all. A context manager;
    leaving it undecided raises RuntimeError after undoing, an exception inside undoes. It is decided once.
    """

    def __init__(self, participants: Sequence[Participant]) -> None:
        self._participants = tuple(participants)
        self._decided = False

    def __enter__(self) -> CacheTransaction:
        for number, participant in enumerate(self._participants):
            try:
                participant.mark()
            except BaseException:
                _undo(self._participants[:number])
                raise
        return self

    def commit(self, keep: Mapping[int, int]) -> None:
        self._decide()
        try:
            for participant in self._participants:
                participant.keep(keep)
        except BaseException:
            _undo(self._participants)
            raise

    def rollback(self) -> None:
        self._decide()
        _undo(self._participants)

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if self._decided:
            return
        self.rollback()
        if kind is None:
            raise RuntimeError("a cache transaction was left without commit or rollback")

    def _decide(self) -> None:
        if self._decided:
            raise RuntimeError("a cache transaction was decided twice")
        self._decided = True


def _undo(participants: Sequence[Participant]) -> None:
    """Undo every participant, in reverse order, even when one breaks its promise not to fail; then raise for that."""
    failed: BaseException | None = None
    for participant in reversed(participants):
        try:
            participant.undo()
        except BaseException as error:
            failed = failed or error
    if failed is not None:
        raise failed
