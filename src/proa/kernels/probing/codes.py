"""Self-test of products on block-FP8 codes: both backends' results on small random values, for probe.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from proa.kernels.native.abi import Form, load_library
from proa.kernels.native.moe import NativeMoE
from proa.kernels.native.ops import NativeDense
from proa.kernels.native.sink import Direct
from proa.kernels.reference.misc import ReferenceDense
from proa.kernels.reference.moe import ReferenceMoE
from proa.kernels.seam import Codes, Routed


def fp8_results(library: Path, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """(op, native, reference): a ragged product with bias, all 254 values among the codes, and experts."""
    random, loaded = torch.Generator().manual_seed(0), load_library(library)
    if not loaded.proa_row_bytes(Form.F8, 16):
        return  # the plan keeps no codes on such a processor
    dense, experts = (
        (NativeDense(loaded, Direct(loaded)), ReferenceDense()),
        (NativeMoE(loaded, Direct(loaded)), ReferenceMoE()),
    )
    weight, bias = _codes(random, 90, 176, 128), torch.randn(90, generator=random).to(dtype)
    for rows in (1, 7, 60):
        x = torch.randn(rows, 176, generator=random).to(dtype)
        made = [ops.matmul(x, ops.pack_codes(weight, bias, dtype)) for ops in dense]
        yield f"matmul of {rows} rows on fp8", made[0], made[1]
    gate_up, down = _codes(random, 5 * 64, 48, 32), _codes(random, 5 * 48, 32, 32)
    x, slots = (
        torch.randn(12, 48, generator=random).to(dtype),
        torch.tensor([[4, 1], [2, 4], [0, 1]]).int().repeat(4, 1),
    )
    routed, made = Routed(slots=slots, weights=torch.rand(12, 2, generator=random)), []
    for ops in experts:
        packed = ops.pack_expert_codes(_by_slot(gate_up, 5), _by_slot(down, 5), dtype)
        made.append(ops.experts(x / 8, routed, packed, scale=1.5, shared=None, gate=None))
    yield "experts on fp8", made[0], made[1]


def _codes(random: torch.Generator, out: int, size: int, columns: int) -> Codes:
    codes = torch.randint(0, 254, (out, size), generator=random)
    codes += codes >= 127  # the bytes 127 and 255 are no numbers
    scales = torch.rand(-(-out // 16), -(-size // columns), generator=random) / 1000
    return Codes(codes=codes.to(torch.uint8).view(torch.float8_e4m3fn), scales=scales, columns=columns)


def _by_slot(weight: Codes, slots: int) -> Codes:
    """A copy, as packing takes the memory that it is given."""
    parts = [tensor.unflatten(0, (slots, -1)).clone() for tensor in (weight.codes, weight.scales)]
    return Codes(codes=parts[0], scales=parts[1], columns=weight.columns)
