"""Which stored types a plain tensor may have. Owns the rule that one odd tensor among many equal ones is damage."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable

from proa.checkpoint.types import TensorInfo
from proa.units import DType

FLOATS = frozenset({DType.F32, DType.F16, DType.BF16})
IDS = (DType.I64, DType.I32)
_HALVES = frozenset({DType.F16, DType.BF16})
_GGUF = tuple(dtype for dtype in DType if dtype.is_block or dtype in FLOATS)


class PlainTypes:
    """The types that plain tensors of one runner may have, learnt from all of them (template, tensor).

    A GGUF mixes formats on purpose, so there any float or block format will do. In the hub's form a tensor has the type
    of its template's other layers and experts, or, where it stands alone (embedding, head, last norm), that of most
    other templates of matrices or vectors; a lone one may also be kept in float32 among halves, which loses nothing. A
    type that differs from all of these was changed by accident: bits that were written as one type and are read as
    another. Tensors of the templates `integers` hold ids.
    """

    def __init__(
        self, tensors: Iterable[tuple[str, TensorInfo]], form: str, integers: Collection[str] = frozenset()
    ) -> None:
        self._is_gguf, self._integers = form == "gguf", integers
        self._templates: dict[str, Counter[DType]] = defaultdict(Counter)
        is_matrix: dict[str, bool] = {}
        for template, info in tensors:
            if info.dtype in FLOATS:
                self._templates[template][info.dtype] += 1
                is_matrix[template] = _is_matrix(info)
        votes: dict[bool, Counter[DType]] = {True: Counter(), False: Counter()}
        for template, matrix in is_matrix.items():
            votes[matrix].update(_most(self._templates[template])[:1])
        self._usual = {matrix: _most(counts) for matrix, counts in votes.items()}
        self._answers: dict[tuple[str, bool], tuple[DType, ...]] = {}

    def of(self, template: str, info: TensorInfo) -> tuple[DType, ...]:
        """The types that `info` may have."""
        if template in self._integers:
            return IDS
        if self._is_gguf:
            return _GGUF
        key = (template, _is_matrix(info))
        if key not in self._answers:
            self._answers[key] = self._allowed(*key)
        return self._answers[key]

    def _allowed(self, template: str, is_matrix: bool) -> tuple[DType, ...]:
        usual = self._usual[is_matrix] or (DType.F32,)
        counts = self._templates.get(template, Counter[DType]())
        if counts.total() < 2:  # noqa: PLR2004  (alone)
            return (*usual, DType.F32) if _HALVES.intersection(usual) and DType.F32 not in usual else usual
        tops = _most(counts)
        return tuple(dtype for dtype in tops if dtype in usual) or tops[:1]


def _most(counts: Counter[DType]) -> tuple[DType, ...]:
    """The types with the highest count."""
    return tuple(dtype for dtype, count in counts.items() if count == max(counts.values()))


def _is_matrix(info: TensorInfo) -> bool:
    return len(info.shape) > 1
