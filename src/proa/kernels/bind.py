"""The kernels of one runner, bound by name, and the count of their calls. Owns no choice: names come from the plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

import torch

from proa.errors import KernelUnavailable
from proa.kernels.reference.attention import ReferenceAttention
from proa.kernels.reference.misc import ReferenceDense
from proa.kernels.seam import AttentionOps, DenseOps, HeadNorm, Heads, LayerKV, Packed, RopeRows, Segment
from proa.units import Phase

T = TypeVar("T")

_DENSE: Mapping[str, Callable[[], DenseOps]] = MappingProxyType({"reference": ReferenceDense})
_ATTENTION: Mapping[str, Callable[[], AttentionOps]] = MappingProxyType({"reference": ReferenceAttention})


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelNames:
    """What a plan says about kernels: the backend of the dense ops, and of attention in each phase."""

    matmul: str
    attention: Mapping[Phase, str]


def bind(names: KernelNames) -> KernelSet:
    """A fresh kernel set. Raises KernelUnavailable for a name that no backend here has: plans never contain one."""
    return KernelSet(
        dense=_backend(_DENSE, "matmul_kernel", names.matmul),
        attention={
            phase: _backend(_ATTENTION, f"attention.{phase.value}", name) for phase, name in names.attention.items()
        },
    )


def _backend(table: Mapping[str, Callable[[], T]], knob: str, name: str) -> T:
    if name not in table:
        raise KernelUnavailable(
            "kernels/unknown", f"{knob} = {name} is no kernel of this package", facts=(f"have: {', '.join(table)}",)
        )
    return table[name]()


class KernelSet:
    """The ops of one runner. Layers call these and nothing else; what each op means is said in kernels/seam.py.

    `calls` counts them by (op, backend), `attention` by phase.
    """

    def __init__(self, *, dense: DenseOps, attention: Mapping[Phase, AttentionOps]) -> None:
        self._dense = dense
        self._attention = dict(attention)
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
        self.calls["attn_in", self._dense.name] += 1
        return self._dense.attn_in(x, qkv, heads, norm, rope, kv, write_slots)

    def attention(
        self, queries: torch.Tensor, kv: LayerKV, segment: Segment, *, window: int | None, scale: float
    ) -> torch.Tensor:
        ops = self._attention[segment.phase]
        self.calls[f"attention.{segment.phase.value}", ops.name] += 1
        return ops.attention(queries, kv, segment, window=window, scale=scale)

    def ffn(self, x: torch.Tensor, gate_up: Packed, down: Packed) -> torch.Tensor:
        self.calls["ffn", self._dense.name] += 1
        return self._dense.ffn(x, gate_up, down)
