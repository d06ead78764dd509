"""Experts on stored blocks: against float64 arithmetic on weights that gguf's own code dequantised, with activations
rounded as the kernels' format says; and their exactness."""

from __future__ import annotations

import pytest
import torch

from proa.kernels.catalog import BLOCK_FORMATS
from proa.kernels.native.abi import load_library
from proa.kernels.native.moe import NativeMoE
from proa.kernels.native.ops import NativeDense
from proa.kernels.native.sink import Direct, Program, Recorder
from proa.kernels.reference.moe import ReferenceMoE
from proa.kernels.seam import Blocks, PackedExperts, Routed
from proa.units import DType
from tests.factories.native import probed, why_not
from tests.kernels.test_native_blocks import rounded, stored

FOUND = probed()
WHY_NOT = why_not(FOUND) or (None if "avx512_vnni" in FOUND.caps.isa else "this CPU has no avx512_vnni")
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

FORMATS = sorted(BLOCK_FORMATS, key=lambda format: format.name)
DTYPES = (torch.float32, torch.bfloat16)
SLOTS, HIDDEN, WIDTH = 7, 64, 32  # K formats: 256, as a row is whole blocks
# A gated value beside a rounding border may fall to either side: half a step of 127, of one of WIDTH summands.
BOUND = {torch.float32: 1e-2, torch.bfloat16: 2e-2}


@pytest.fixture(scope="module")
def ops() -> NativeMoE:
    library = load_library(FOUND.library)
    return NativeMoE(library, Direct(library))


def slots_of(format: DType, out: int, size: int, seed: int = 0) -> tuple[Blocks, torch.Tensor]:
    """Blocks of SLOTS matrices [out, size], and the float64 values that they stand for."""
    kind = format.name
    if kind.endswith("_K"):
        size //= 8  # `stored` makes eight times as many columns of these
    blocks, values = stored(SLOTS * out, size, kind, seed)
    weight = Blocks(data=blocks.unflatten(0, (SLOTS, out)).contiguous(), format=format)
    return weight, values.unflatten(0, (SLOTS, out))


def sizes(format: DType) -> tuple[int, int]:
    return (256, 256) if format.name.endswith("_K") else (HIDDEN, WIDTH)


def experts_of(format: DType) -> tuple[Blocks, Blocks, torch.Tensor, torch.Tensor]:
    hidden, width = sizes(format)
    gate_up, up_values = slots_of(format, 2 * width, hidden)
    down, down_values = slots_of(format, hidden, width, seed=1)
    return gate_up, down, up_values, down_values


def rows_of(rows: int, format: DType, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(rows, sizes(format)[0], generator=torch.Generator().manual_seed(rows)) / 8).to(dtype)


def some_routed(rows: int, chosen: int) -> Routed:
    random = torch.Generator().manual_seed(2)
    slots = torch.stack([torch.randperm(SLOTS - 1, generator=random)[:chosen] for _ in range(rows)]).int()
    return Routed(slots=slots, weights=torch.randn(rows, chosen, generator=random))


def run(ops: NativeMoE | ReferenceMoE, x: torch.Tensor, routed: Routed, packed: PackedExperts) -> torch.Tensor:
    return ops.experts(x, routed, packed, scale=2.5, shared=None, gate=None)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "chosen"), [(1, 1), (1, 4), (7, 2), (13, 5), (40, 3)])
def test_experts_are_the_weighted_sum_of_their_mlps_over_rounded_activations(
    ops: NativeMoE, format: DType, dtype: torch.dtype, rows: int, chosen: int
) -> None:
    gate_up, down, up_values, down_values = experts_of(format)
    x, routed = rows_of(rows, format, dtype), some_routed(rows, chosen)
    seen, expected = rounded(x), torch.zeros(x.shape, dtype=torch.float64)
    for row, (slots, weights) in enumerate(zip(routed.slots.tolist(), routed.weights.tolist(), strict=True)):
        for slot, weight in zip(slots, weights, strict=True):
            gate, up = (up_values[slot] @ seen[row]).to(dtype).double().chunk(2)
            hidden = (gate * gate.sigmoid() * up).to(dtype)
            expected[row] += 2.5 * weight * (down_values[slot] @ rounded(hidden[None])[0])
    ours = run(ops, x, routed, ops.pack_expert_blocks(gate_up, down, dtype))
    assert (ours.double() - expected).abs().max() <= BOUND[dtype] * expected.abs().max()


@pytest.mark.parametrize("format", FORMATS)
def test_packed_experts_take_the_bytes_that_the_catalogue_says(ops: NativeMoE, format: DType) -> None:
    (hidden, width), block = sizes(format), BLOCK_FORMATS[format]
    packed = ops.pack_expert_blocks(*experts_of(format)[:2], torch.bfloat16)
    assert packed.nbytes == SLOTS * 3 * hidden * width // block.elements * block.nbytes


@pytest.mark.parametrize("format", FORMATS)
def test_an_expert_of_weight_one_is_the_gated_mlp_on_blocks_bit_for_bit(ops: NativeMoE, format: DType) -> None:
    gate_up, down, _, _ = experts_of(format)
    dense = NativeDense(ops.library, Direct(ops.library))
    packs = [dense.pack_blocks(one.data[3], None, format, torch.bfloat16) for one in (gate_up, down)]
    routed = Routed(slots=torch.full((9, 1), 3, dtype=torch.int32), weights=torch.ones(9, 1))
    x = rows_of(9, format, torch.bfloat16)
    packed = ops.pack_expert_blocks(gate_up, down, torch.bfloat16)
    assert torch.equal(ops.experts(x, routed, packed, scale=1.0, shared=None, gate=None), dense.ffn(x, *packs))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_beside_any_other_rows(ops: NativeMoE, format: DType, dtype: torch.dtype) -> None:
    packed, x = ops.pack_expert_blocks(*experts_of(format)[:2], dtype), rows_of(40, format, dtype)
    routed = some_routed(40, 4)

    def part(rows: torch.Tensor) -> torch.Tensor:
        return run(ops, x[rows], Routed(slots=routed.slots[rows], weights=routed.weights[rows]), packed)

    whole = part(torch.arange(40))
    for step in (1, 2, 3, 7, 8, 16):
        assert torch.equal(torch.cat([part(rows) for rows in torch.arange(40).split(step)]), whole)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    assert torch.equal(part(order), whole[order])


def test_gate_and_up_may_have_another_format_than_down(ops: NativeMoE) -> None:
    """As files of mixed K formats have it."""
    gate_up, _, up_values, _ = experts_of(DType.Q4_K)
    _, down, _, down_values = experts_of(DType.Q6_K)
    x, routed = rows_of(3, DType.Q4_K, torch.float32), some_routed(3, 1)
    ours = run(ops, x, routed, ops.pack_expert_blocks(gate_up, down, torch.float32))
    for row, slot in enumerate(routed.slots[:, 0].tolist()):
        gate, up = (up_values[slot] @ rounded(x)[row]).chunk(2)
        inner = down_values[slot] @ rounded((gate * gate.sigmoid() * up).float()[None])[0]
        expected = 2.5 * float(routed.weights[row]) * inner
        assert (ours[row].double() - expected).abs().max() <= BOUND[torch.float32] * expected.abs().max()


def test_a_recorded_block_gives_the_same_bits_for_fewer_rows(ops: NativeMoE) -> None:
    packed, x = (
        ops.pack_expert_blocks(*experts_of(DType.Q4_0)[:2], torch.bfloat16),
        rows_of(40, DType.Q4_0, torch.bfloat16),
    )
    routed, recorder = some_routed(40, 4), Recorder(64)
    direct, recorded = run(ops, x, routed, packed), NativeMoE(ops.library, recorder)
    rows = recorder.empty((64, HIDDEN), torch.bfloat16)
    taken = Routed(slots=recorder.empty((64, 4), torch.int32), weights=recorder.empty((64, 4), torch.float32))
    out = run(recorded, rows, taken, packed)
    program = Program(ops.library, recorder, {})
    for count in (40, 1, 17):
        rows[:count], taken.slots[:count], taken.weights[:count] = (
            x[:count],
            routed.slots[:count],
            routed.weights[:count],
        )
        program.run(count, {})
        assert torch.equal(out[:count], direct[:count])


@pytest.mark.parametrize("format", FORMATS)
def test_the_reference_computes_with_the_dequantised_values(format: DType) -> None:
    gate_up, down, up_values, down_values = experts_of(format)
    packed = ReferenceMoE().pack_expert_blocks(gate_up, down, torch.float32)
    torch.testing.assert_close(packed.gate_up.double(), up_values, atol=1e-7, rtol=1e-6)
    torch.testing.assert_close(packed.down.double(), down_values, atol=1e-7, rtol=1e-6)


def test_experts_of_broken_panels_are_refused(ops: NativeMoE) -> None:
    odd = Blocks(data=torch.zeros(2, 48, 34, dtype=torch.uint8), format=DType.Q8_0)
    with pytest.raises(ValueError, match=r"\(2, 48, 32\) are no whole panels"):
        ops.pack_expert_blocks(odd, odd, torch.float32)
