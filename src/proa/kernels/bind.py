"""The kernels of one runner, bound by name, and the count of their calls. Owns no choice: names come from the plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import torch

from proa.errors import KernelUnavailable
from proa.kernels.native.abi import load_library
from proa.kernels.native.ops import NativeAttention, NativeDense
from proa.kernels.native.sink import Direct, Program, Recorder
from proa.kernels.onednn import OnednnDense
from proa.kernels.reference.attention import ReferenceAttention
from proa.kernels.reference.misc import ReferenceDense
from proa.kernels.seam import AttentionOps, DenseOps, HeadNorm, Heads, LayerKV, Packed, RopeRows, Segment
from proa.units import DType, Phase

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelNames:
    """What a plan says about kernels: the backend of the dense ops, and of attention in each phase."""

    matmul: str
    attention: Mapping[Phase, str]


def bind(names: KernelNames, library: Path | None) -> KernelSet:
    """A fresh kernel set. `library` is the compiled file of the native backend, where a name asks for it.

    Raises KernelUnavailable for a name that no backend here has: plans never contain one.
    """
    return KernelSet(
        dense=_backend(_DENSE, "matmul_kernel", names.matmul, library),
        attention={
            phase: _backend(_ATTENTION, f"attention.{phase.value}", name, library)
            for phase, name in names.attention.items()
        },
    )


def _backend(table: Mapping[str, Callable[[Path | None], T]], knob: str, name: str, library: Path | None) -> T:
    if name not in table:
        raise KernelUnavailable(
            "kernels/unknown", f"{knob} = {name} is no kernel of this package", facts=(f"have: {', '.join(table)}",)
        )
    return table[name](library)


def _native_dense(library: Path | None) -> DenseOps:
    loaded = load_library(library)
    return NativeDense(loaded, Direct(loaded))


def _native_attention(library: Path | None) -> AttentionOps:
    return NativeAttention(Direct(load_library(library)))


_DENSE: Mapping[str, Callable[[Path | None], DenseOps]] = MappingProxyType(
    {"native": _native_dense, "onednn": lambda _: OnednnDense(), "reference": lambda _: ReferenceDense()}
)
_ATTENTION: Mapping[str, Callable[[Path | None], AttentionOps]] = MappingProxyType(
    {"native": _native_attention, "reference": lambda _: ReferenceAttention()}
)


class KernelSet:
    """The ops of one runner. Layers call these and nothing else; what each op means is said in kernels/seam.py.

    `calls` counts them by (op, backend), `attention` by phase.
    """

    def __init__(self, *, dense: DenseOps, attention: Mapping[Phase, AttentionOps]) -> None:
        self._dense = dense
        self._attention = dict(attention)
        # Phases share one arrangement of the cache (a plan rule), so any of them can write for all.
        self._writer = next(iter(self._attention.values()))
        self.calls: Counter[tuple[str, str]] = Counter()

    @property
    def names(self) -> KernelNames:
        """The names of the backends that are bound, as they give them themselves."""
        return KernelNames(
            matmul=self._dense.name, attention={phase: ops.name for phase, ops in self._attention.items()}
        )

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Packed:
        self.calls["pack", self._dense.name] += 1
        return self._dense.pack(weight, bias)

    def pack_blocks(self, blocks: torch.Tensor, bias: torch.Tensor | None, format: DType, dtype: torch.dtype) -> Packed:
        self.calls["pack", self._dense.name] += 1
        return self._dense.pack_blocks(blocks, bias, format, dtype)

    def matmul(self, x: torch.Tensor, packed: Packed) -> torch.Tensor:
        self.calls["matmul", self._dense.name] += 1
        return self._dense.matmul(x, packed)

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype) -> torch.Tensor:
        self.calls["norm", self._dense.name] += 1
        return self._dense.norm(x, weight, eps, dtype)

    def add_norm(
        self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype
    ) -> torch.Tensor:
        self.calls["add_norm", self._dense.name] += 1
        return self._dense.add_norm(x, delta, weight, eps, dtype)

    def attn_in(
        self,
        x: torch.Tensor,
        qkv: Packed,
        heads: Heads,
        norm: HeadNorm | None,
        rope: RopeRows,
        kv: LayerKV,
        write_slots: torch.Tensor,
    ) -> torch.Tensor:
        """Project x [T, D] and hand the rows to the cache's owner; the queries [T, H, d]."""
        self.calls["attn_in", self._writer.name] += 1
        return self._writer.write(self._dense.matmul(x, qkv), heads, norm, rope, kv, write_slots)

    def logits(self, x: torch.Tensor, packed: Packed) -> torch.Tensor:
        self.calls["logits", self._dense.name] += 1
        return self._dense.logits(x, packed)

    def select(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return self._dense.select(x, rows)

    def rotation(self, positions: torch.Tensor, frequencies: torch.Tensor, signs: torch.Tensor) -> RopeRows:
        return self._writer.rotation(positions, frequencies, signs)

    def lookup(self, packed: Packed, token_ids: torch.Tensor) -> torch.Tensor:
        self.calls["lookup", self._dense.name] += 1
        return self._dense.lookup(packed, token_ids)

    def table(self, weight: torch.Tensor) -> Packed:
        return self._dense.table(weight)

    def has_rows(self, packed: Packed) -> bool:
        """Whether `lookup` can read rows of what `pack` made: not where torch keeps the arrangement to itself."""
        return not packed.weight.is_mkldnn

    def attention(
        self, queries: torch.Tensor, kv: LayerKV, segment: Segment, *, window: int | None, scale: float
    ) -> torch.Tensor:
        ops = self._attention[segment.phase]
        self.calls[f"attention.{segment.phase.value}", ops.name] += 1
        return ops.attention(queries, kv, segment, window=window, scale=scale)

    def ffn(self, x: torch.Tensor, gate_up: Packed, down: Packed) -> torch.Tensor:
        self.calls["ffn", self._dense.name] += 1
        return self._dense.ffn(x, gate_up, down)

    def record(self, capacity: int, forward: Callable[[], object]) -> Program | None:
        """What `forward` asks of these kernels, over `capacity` rows, as one program; None where not all are native."""
        ops = [self._dense, *self._attention.values()]
        native = [one for one in ops if isinstance(one, NativeDense | NativeAttention)]
        if len(native) < len(ops) or not isinstance(self._dense, NativeDense):
            return None
        recorder, direct, before = Recorder(capacity), [one.sink for one in native], self.calls.copy()
        try:
            for one in native:
                one.sink = recorder
            forward()
        finally:
            for one, sink in zip(native, direct, strict=True):
                one.sink = sink
        calls, self.calls = self.calls - before, before
        return Program(self._dense.library, recorder, calls)

    def count(self, program: Program, phases: Iterable[Phase]) -> None:
        """Add the calls of one run. A program attends over all rows at once; each phase in it counts as if alone."""
        for (op, backend), times in program.calls.items():
            if op.startswith("attention."):
                for phase in phases:
                    self.calls[f"attention.{phase.value}", backend] += times
            else:
                self.calls[op, backend] += times
