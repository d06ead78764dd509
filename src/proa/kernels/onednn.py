"""The onednn backend: matmuls over weights that torch's oneDNN arranged once, at load. The rest is the reference's.

F.linear arranges a weight anew in every call. The ops used here are private to torch, so the plan takes this backend
only after a passed self-test. Not exact: oneDNN sums in another order for one row than for many (tests/kernels).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from proa.arch.blocks import SILU, ActivationSpec, QueryScale
from proa.errors import KernelUnavailable
from proa.kernels.catalog import ONEDNN
from proa.kernels.reference.misc import ReferenceDense, activate
from proa.kernels.seam import Codes, Packed, RopeRows
from proa.units import DType


@dataclass(frozen=True, slots=True, kw_only=True)
class OnednnPacked(Packed):
    """`weight` is opaque (layout torch._mkldnn): nothing but oneDNN can read it, so no row can be looked up in it."""


class OnednnDense:
    """DenseOps for float32 and bfloat16 on the CPU."""

    name = ONEDNN

    def __init__(self) -> None:
        self._plain = ReferenceDense()
        self._reorder = _private("_reorder_linear_weight")
        self._linear = _private("_linear_pointwise")

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Packed:
        arranged = self._reorder(weight.detach(), None)
        return OnednnPacked(weight=arranged, bias=bias, in_features=weight.shape[1], out_features=weight.shape[0])

    def unpacked(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self._plain.unpacked(shape, dtype)

    def pack_in_place(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Packed:
        return self.pack(weight, bias)  # torch keeps the arrangement to itself

    def pack_blocks(self, blocks: torch.Tensor, bias: torch.Tensor | None, format: DType, dtype: torch.dtype) -> Packed:
        plain = self._plain.pack_blocks(blocks, bias, format, dtype)
        return self.pack(plain.weight, plain.bias)

    def pack_codes(self, weight: Codes, bias: torch.Tensor | None, dtype: torch.dtype) -> Packed:
        plain = self._plain.pack_codes(weight, bias, dtype)
        return self.pack(plain.weight, plain.bias)

    def matmul(self, x: torch.Tensor, packed: Packed) -> torch.Tensor:
        if not isinstance(packed, OnednnPacked):
            raise TypeError("a weight that another backend packed was given to a onednn op")
        return self._linear(x, packed.weight, packed.bias, "none", [], "")

    def logits(self, x: torch.Tensor, packed: Packed) -> torch.Tensor:
        return self.matmul(x, packed).float()

    def ffn(self, x: torch.Tensor, gate_up: Packed, down: Packed, activation: ActivationSpec = SILU) -> torch.Tensor:
        gate, up = self.matmul(x, gate_up).chunk(2, dim=-1)
        return self.matmul(activate(gate, up, activation), down)

    def gate(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return self._plain.gate(x, gate)

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype) -> torch.Tensor:
        return self._plain.norm(x, weight, eps, dtype)

    def add_norm(
        self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype
    ) -> torch.Tensor:
        return self._plain.add_norm(x, delta, weight, eps, dtype)

    def select(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return self._plain.select(x, rows)

    def lookup(self, packed: Packed, token_ids: torch.Tensor) -> torch.Tensor:
        if isinstance(packed, OnednnPacked):
            raise TypeError("rows were looked up in a weight that only oneDNN can read; `table` makes one for lookups")
        return self._plain.lookup(packed, token_ids)

    def table(self, weight: torch.Tensor) -> Packed:
        return self._plain.table(weight)

    def scale_queries(self, queries: torch.Tensor, positions: torch.Tensor, spec: QueryScale) -> torch.Tensor:
        return self._plain.scale_queries(queries, positions, spec)

    def rotation(
        self, positions: torch.Tensor, frequencies: torch.Tensor, signs: torch.Tensor, magnitude: float
    ) -> RopeRows:
        return self._plain.rotation(positions, frequencies, signs, magnitude)


def _private(name: str) -> Callable[..., Any]:
    """One of torch's oneDNN ops. Raises KernelUnavailable `kernels/no-op` where this torch has none."""
    found = getattr(torch.ops.mkldnn, name, None)
    if found is None or not torch.backends.mkldnn.is_available():
        raise KernelUnavailable("kernels/no-op", f"torch {torch.__version__} has no mkldnn::{name}, which onednn needs")
    return found
