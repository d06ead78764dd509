"""Products on block-FP8 codes: against float64 arithmetic on values that are read bit by bit from the codes; exactness.

The values of a code and the scales' grid are computed here; neither kernel nor reference is asked for them.
"""

from __future__ import annotations

import pytest
import torch

from proa.kernels.native.abi import load_library
from proa.kernels.native.moe import NativeMoE
from proa.kernels.native.ops import NativeDense
from proa.kernels.native.sink import Direct, Program, Recorder
from proa.kernels.onednn import OnednnDense
from proa.kernels.reference.misc import ReferenceDense
from proa.kernels.reference.moe import ReferenceMoE
from proa.kernels.seam import Codes, Routed
from tests.factories.native import probed, why_not

FOUND = probed()
WHY_NOT = why_not(FOUND) or (None if "avx512vbmi" in FOUND.caps.isa else "this CPU has no avx512vbmi")
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

DTYPES = (torch.float32, torch.bfloat16)
# Values are exact, sums and scales float32, the output is rounded once; an expert rounds four times.
BOUND = {torch.float32: 1e-5, torch.bfloat16: 2**-8}
BOUND_EXPERTS = {torch.float32: 1e-5, torch.bfloat16: 2**-6}
SLOTS, WIDTH, HIDDEN = 7, 32, 80


@pytest.fixture(scope="module")
def dense() -> NativeDense:
    library = load_library(FOUND.library)
    return NativeDense(library, Direct(library))


@pytest.fixture(scope="module")
def experts() -> NativeMoE:
    library = load_library(FOUND.library)
    return NativeMoE(library, Direct(library))


def value_of(code: int) -> float:
    """OCP FP8 E4M3: sign, four bits of exponent with bias 7, three of mantissa; exponent 0 has no leading one."""
    sign, exponent, mantissa = -1 if code & 128 else 1, code >> 3 & 15, code & 7
    return sign * (mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


VALUES = torch.tensor([0.0 if code & 127 == 127 else value_of(code) for code in range(256)], dtype=torch.float64)


def some_codes(*shape: int, columns: int, seed: int = 0) -> tuple[Codes, torch.Tensor]:
    """Any code but the two that are no numbers, scales over five powers of two; and the float64 values meant."""
    random = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, shape, generator=random)
    codes[(codes & 127) == 127] = 0
    grid = (*shape[:-2], -(-shape[-2] // 16), -(-shape[-1] // columns))
    scales = torch.rand(grid, generator=random) * 2.0 ** -torch.randint(8, 13, grid, generator=random)
    rows, inputs = torch.arange(shape[-2]) // 16, torch.arange(shape[-1]) // columns
    spread = scales.double()[..., rows, :][..., inputs]
    return Codes(codes=codes.byte().view(torch.float8_e4m3fn), scales=scales, columns=columns), VALUES[codes] * spread


def rows_of(count: int, size: int, dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_near(ours: torch.Tensor, expected: torch.Tensor, bound: float) -> None:
    assert (ours.double() - expected).abs().max() <= bound * expected.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 8, 9, 17, 48, 61])
@pytest.mark.parametrize(
    ("out", "size", "columns"), [(16, 16, 16), (48, 96, 32), (33, 64, 128), (1, 272, 128), (150, 304, 128)]
)
def test_products_are_those_of_the_values_meant(
    dense: NativeDense, dtype: torch.dtype, rows: int, out: int, size: int, columns: int
) -> None:
    """Ragged last panels and blocks, every way to share rows; 150 outputs are two groups of panels and two more."""
    weight, values = some_codes(out, size, columns=columns)
    x, bias = rows_of(rows, size, dtype), torch.linspace(-1, 1, out).to(dtype)
    packed = dense.pack_codes(weight, bias, dtype)
    assert packed.nbytes == out * size + 4 * weight.scales.numel()
    assert_near(dense.matmul(x, packed), x.double() @ values.T + bias.double(), BOUND[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_has_its_value(dense: NativeDense, dtype: torch.dtype) -> None:
    """Subnormal ones too: a row of ones among zeros picks one code, and 1.0 scales it."""
    codes = torch.arange(256).byte().view(16, 16).view(torch.float8_e4m3fn)
    packed = dense.pack_codes(Codes(codes=codes, scales=torch.ones(1, 1), columns=16), None, dtype)
    found = dense.matmul(torch.eye(16, dtype=dtype), packed).T.flatten().double()
    is_number = (torch.arange(256) & 127) != 127
    rows_with_nan = torch.tensor([7, 15])  # a product with no number is none, whatever it is multiplied by
    picked = is_number & ~torch.isin(torch.arange(256) // 16, rows_with_nan)
    assert torch.equal(found[picked], VALUES[picked])
    assert found.view(16, 16)[rows_with_nan].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_looked_up_bit_for_bit(dense: NativeDense, dtype: torch.dtype) -> None:
    weight, values = some_codes(70, 96, columns=32)
    ids = torch.tensor([69, 0, 16, 15, 33])
    found = dense.lookup(dense.pack_codes(weight, None, dtype), ids)
    torch.testing.assert_close(found.double(), values[ids], atol=0, rtol=1e-7)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_beside_any_other_rows(dense: NativeDense, dtype: torch.dtype) -> None:
    up, down = some_codes(2 * 96, 272, columns=128)[0], some_codes(80, 96, columns=32, seed=1)[0]
    packs = [dense.pack_codes(weight, None, dtype) for weight in (up, down)]
    x = rows_of(100, 272, dtype)
    for op in (lambda rows: dense.matmul(rows, packs[0]), lambda rows: dense.ffn(rows, *packs)):
        whole = op(x)
        for step in (1, 2, 3, 5, 6, 8, 9, 16, 48, 60):
            assert torch.equal(torch.cat([op(part.contiguous()) for part in x.split(step)]), whole)


def test_the_order_of_summation_shows_in_the_bits(dense: NativeDense) -> None:
    """Or the test above could not notice another one: a sum over all k before scaling differs from ours."""
    weight, _ = some_codes(64, 256, columns=128)
    flat = Codes(codes=weight.codes, scales=torch.full((4, 2), 0.25), columns=128)
    short = Codes(codes=weight.codes, scales=torch.full((4, 16), 0.25), columns=16)
    x = rows_of(9, 256, torch.float32)
    one, other = (dense.matmul(x, dense.pack_codes(weight, None, torch.float32)) for weight in (flat, short))
    assert not torch.equal(one, other)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "chosen"), [(1, 1), (1, 4), (7, 2), (13, 5), (70, 3)])
def test_experts_are_the_weighted_sum_of_their_mlps(
    experts: NativeMoE, dtype: torch.dtype, rows: int, chosen: int
) -> None:
    gate_up, up_values = some_codes(SLOTS, 2 * WIDTH, HIDDEN, columns=32)
    down, down_values = some_codes(SLOTS, HIDDEN, WIDTH, columns=32, seed=1)
    x, random = rows_of(rows, HIDDEN, dtype) / 4, torch.Generator().manual_seed(2)
    slots = torch.stack([torch.randperm(SLOTS - 1, generator=random)[:chosen] for _ in range(rows)]).int()
    weights = torch.randn(rows, chosen, generator=random)
    expected = torch.zeros(rows, HIDDEN, dtype=torch.float64)
    for row in range(rows):
        for slot, weight in zip(slots[row].tolist(), weights[row].tolist(), strict=True):
            gate, up = (up_values[slot] @ x[row].double()).chunk(2)
            expected[row] += 2.5 * weight * (down_values[slot] @ (gate * gate.sigmoid() * up))
    nbytes = sum(part.nbytes for weight in (gate_up, down) for part in (weight.codes, weight.scales))
    packed = experts.pack_expert_codes(gate_up, down, dtype)
    assert packed.nbytes == nbytes
    assert (packed.gate_up.data_ptr(), packed.down.data_ptr()) == (gate_up.codes.data_ptr(), down.codes.data_ptr())
    ours = experts.experts(x, Routed(slots=slots, weights=weights), packed, scale=2.5, shared=None, gate=None)
    assert_near(ours, expected, BOUND_EXPERTS[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_experts_has_the_same_bits_beside_any_other_rows(experts: NativeMoE, dtype: torch.dtype) -> None:
    gate_up, down = some_codes(SLOTS, 2 * WIDTH, HIDDEN, columns=32)[0], some_codes(SLOTS, HIDDEN, WIDTH, columns=32)[0]
    packed, x = experts.pack_expert_codes(gate_up, down, dtype), rows_of(90, HIDDEN, dtype)
    slots = torch.stack([torch.tensor([1, 4, row % 4 + 2 if row % 4 != 2 else 6]) for row in range(90)]).int()
    routed = Routed(slots=slots, weights=rows_of(90, 3, torch.float32))

    def run(part: slice) -> torch.Tensor:
        some = Routed(slots=routed.slots[part].contiguous(), weights=routed.weights[part].contiguous())
        return experts.experts(x[part].contiguous(), some, packed, scale=1.0, shared=None, gate=None)

    whole = run(slice(None))
    for step in (1, 3, 8, 9, 50):
        assert torch.equal(torch.cat([run(slice(at, at + step)) for at in range(0, 90, step)]), whole)


def test_an_expert_of_weight_one_is_the_gated_mlp_bit_for_bit(experts: NativeMoE, dense: NativeDense) -> None:
    gate_up, down = some_codes(SLOTS, 2 * WIDTH, HIDDEN, columns=32)[0], some_codes(SLOTS, HIDDEN, WIDTH, columns=32)[0]
    packs = [
        dense.pack_codes(Codes(codes=w.codes[3].clone(), scales=w.scales[3].clone(), columns=32), None, torch.bfloat16)
        for w in (gate_up, down)
    ]
    x = rows_of(9, HIDDEN, torch.bfloat16)
    routed = Routed(slots=torch.full((9, 1), 3, dtype=torch.int32), weights=torch.ones(9, 1))
    packed = experts.pack_expert_codes(gate_up, down, torch.bfloat16)
    ours = experts.experts(x, routed, packed, scale=1.0, shared=None, gate=None)
    assert torch.equal(ours, dense.ffn(x, *packs))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_other_backends_compute_with_the_dequantised_values(dtype: torch.dtype) -> None:
    weight, values = some_codes(40, 96, columns=32)
    x = rows_of(3, 96, dtype)
    for ops in (ReferenceDense(), OnednnDense()):
        assert_near(ops.matmul(x, ops.pack_codes(weight, None, dtype)), x.double() @ values.T, 2 * BOUND[dtype])
    gate_up, up_values = some_codes(2, 2 * WIDTH, HIDDEN, columns=32)
    packed = ReferenceMoE().pack_expert_codes(gate_up, some_codes(2, HIDDEN, WIDTH, columns=32)[0], dtype)
    assert_near(packed.gate_up, up_values, BOUND[dtype])


def test_a_recorded_product_gives_the_same_bits(dense: NativeDense) -> None:
    weight, _ = some_codes(48, 96, columns=32)
    packed, recorder = dense.pack_codes(weight, None, torch.bfloat16), Recorder(64)
    recorded = NativeDense(dense.library, recorder)
    rows, x = recorder.empty((64, 96), torch.bfloat16), rows_of(20, 96, torch.bfloat16)
    out = recorded.matmul(rows, packed)
    program = Program(dense.library, recorder, {})
    for count in (20, 1, 9):
        rows[:count] = x[:count]
        program.run(count, {})
        assert torch.equal(out[:count], dense.matmul(x, packed)[:count])


def test_experts_with_two_sizes_of_blocks_are_refused(experts: NativeMoE) -> None:
    gate_up, down = some_codes(2, 32, 32, columns=32)[0], some_codes(2, 32, 16, columns=16)[0]
    with pytest.raises(ValueError, match="per 32 and per 16 columns"):
        experts.pack_expert_codes(gate_up, down, torch.float32)
