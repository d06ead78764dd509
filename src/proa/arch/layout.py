"""The physical arrangement of a runner's weights: decided in its plan, read by rules, parameters and loader.

Owns no name of a stored tensor and no data.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import prod

from proa.units import DType

ROWS_PER_SCALE = 16  # of kept block FP8: parts of a merged parameter need no common grid of larger blocks


class SharedWeight(Enum):
    """With what weight a fused shared expert enters the sum of a token's experts."""

    ONE = "1"
    INVERSE_SCALE = "1/scale"  # the router's scale multiplies the sum, and must not reach the shared expert
    TOKEN_GATE = "the token's gate"


class ScaleOn(Enum):
    """Where the router's scale is applied."""

    WEIGHTS = "weights"
    OUTPUT = "output"


class ExpertFiles(Enum):
    """How routed experts of a layer are stored: one tensor per expert and projection; one for all experts, gate and up
    together; or one per projection for all experts (GGUF)."""

    LISTED = "listed"
    STACKED = "stacked"
    BY_PROJECTION = "by projection"


@dataclass(frozen=True, slots=True, kw_only=True)
class MoELayout:
    """One layer's arrangement of experts: the one object that builder, router, weight rules and loader read.

    Slots 0 to `num_routed - 1` are the routed experts. Fused shared experts take the slots after them, one of the
    routed width each; separate ones have an MLP of their own and `shared_slots` is empty.
    """

    num_routed: int
    shared_slots: tuple[int, ...]
    shared_weight: SharedWeight
    scale_on: ScaleOn
    files: ExpertFiles

    @property
    def is_fused(self) -> bool:
        return bool(self.shared_slots)

    @property
    def num_slots(self) -> int:
        return self.num_routed + len(self.shared_slots)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightLayout:
    """Physical arrangement of one runner's weights, decided in its plan; read by rules, table and builder alike.

    `tied_head`: the output head is the embedding matrix, there is no `head.weight` parameter. `moe`: the layout of each
    MoE layer by its index. `blocks`: parameters kept in a stored form, by name: a block format, or F8_E4M3 with a scale
    per `scale_columns` columns; all others are in the compute dtype.
    """

    tied_head: bool
    moe: tuple[tuple[int, MoELayout], ...] = ()
    blocks: tuple[tuple[str, DType], ...] = ()
    scale_columns: int | None = None

    def moe_of(self, layer: int) -> MoELayout:
        """Raises KeyError for a layer without experts."""
        return dict(self.moe)[layer]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterInfo:
    """Shape in elements; `dtype` None means the runner's compute dtype, a block format the bytes as stored.

    `scale_columns`: columns per scale, of F8_E4M3 codes that have float32 scales beside them, in a tensor of its own.
    `below`: the values are integers from 0 to below that, which loading checks.
    """

    shape: tuple[int, ...]
    dtype: DType | None = None
    scale_columns: int | None = None
    below: int | None = None

    @property
    def scale_shape(self) -> tuple[int, ...] | None:
        """[..., rows / ROWS_PER_SCALE, columns / scale_columns], rounded up."""
        if self.scale_columns is None:
            return None
        *outer, rows, columns = self.shape
        return (*outer, -(-rows // ROWS_PER_SCALE), -(-columns // self.scale_columns))

    @property
    def rows(self) -> int:
        """Rows of the parameter seen as a matrix: all dimensions but the last one, or the elements of a vector."""
        return prod(self.shape[:-1] or self.shape)

    def nbytes(self, compute: DType) -> int:
        scales = 0 if self.scale_shape is None else DType.F32.nbytes(prod(self.scale_shape))
        return (self.dtype or compute).nbytes(prod(self.shape)) + scales
