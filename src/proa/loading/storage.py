"""Which stored types a dense tensor may have. Owns the rule that one odd tensor among many equal ones is damage."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

from proa.arch.weights import as_template
from proa.checkpoint.types import Checkpoint, TensorInfo
from proa.units import DType

_FLOATS = frozenset({DType.F32, DType.F16, DType.BF16})
_HALVES = frozenset({DType.F16, DType.BF16})


def expected_dtypes(checkpoint: Checkpoint) -> Mapping[str, tuple[DType, ...]]:
    """The types that each tensor of the checkpoint may have.

    A GGUF mixes formats on purpose, so there any float or block format will do. In the hub's form a tensor has the type
    of its template's other layers, or, where it stands alone (embedding, head, last norm), that of the other matrices
    or vectors; a lone one may also be kept in float32 among halves, which loses nothing. A type that
    differs from all of these was changed by accident: bits that were written as one type and are read as another.
    """
    if checkpoint.form == "gguf":
        allowed = tuple(dtype for dtype in DType if dtype.is_block or dtype in _FLOATS)
        return dict.fromkeys(checkpoint.tensors, allowed)
    by_rank: dict[bool, Counter[DType]] = defaultdict(Counter)
    by_template: dict[str, Counter[DType]] = defaultdict(Counter)
    for info in checkpoint.tensors.values():
        if info.dtype in _FLOATS:
            by_rank[_is_matrix(info)][info.dtype] += 1
            by_template[as_template(info.name)[0]][info.dtype] += 1
    return {
        name: _allowed(by_template[as_template(name)[0]], by_rank[_is_matrix(info)])
        for name, info in checkpoint.tensors.items()
    }


def _allowed(template: Counter[DType], rank: Counter[DType]) -> tuple[DType, ...]:
    """`template`, `rank`: types of the tensors alike in name, and alike in rank."""
    usual = rank.most_common(1)[0][0] if rank else DType.F32
    if template.total() < 2:
        return (usual, DType.F32) if usual in _HALVES else (usual,)
    most = max(template.values())
    tops = [dtype for dtype, count in template.items() if count == most]
    return (usual,) if usual in tops else (tops[0],)


def _is_matrix(info: TensorInfo) -> bool:
    return len(info.shape) > 1
