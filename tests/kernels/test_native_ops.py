"""Native ops against their definitions in float64 arithmetic, for ragged shapes and both types.

And the rule that makes them exact: a row's bits do not depend on the rows beside it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from proa.kernels.native.abi import load_library
from proa.kernels.native.ops import NativeAttention, NativeDense
from proa.kernels.native.sink import Direct, Recorder
from proa.kernels.probing.probe import self_test
from proa.kernels.reference.misc import ReferenceDense
from proa.kernels.seam import HeadNorm, Heads, LayerKV, RopeRows
from proa.kernels.verdicts import PARTS, PASSED
from proa.runner.batch import RowSpan, make_batch
from proa.units import Phase
from tests.factories.native import probed, why_not

FOUND = probed()
WHY_NOT = why_not(FOUND)
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

DTYPES = (torch.float32, torch.bfloat16)
# float32: sums of up to 200 products in another order. bfloat16: inputs are rounded before both computations, so only
# the output's rounding (2^-9) and, in chains, that of the values between two products remain.
BOUND = {torch.float32: 1e-5, torch.bfloat16: 2**-8}
CHAIN = {torch.float32: 1e-5, torch.bfloat16: 2**-6}


@pytest.fixture(scope="module")
def dense() -> NativeDense:
    library = load_library(FOUND.library)
    return NativeDense(library, Direct(library))


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + 7 * len(shape)))


def assert_near(ours: torch.Tensor, expected: torch.Tensor, bound: float) -> None:
    """Relative to the largest expected value."""
    assert (ours.double() - expected).abs().max() <= bound * expected.abs().max()


@pytest.mark.parametrize("part", PARTS.values())
def test_this_hosts_kernels_pass_their_self_test(part: str) -> None:
    assert FOUND.library is not None
    assert self_test(FOUND.library, part) == PASSED


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 16, 33])
@pytest.mark.parametrize(("out", "size"), [(1, 16), (15, 32), (16, 2), (17, 48), (100, 200), (64, 64), (130, 16)])
def test_matmul_is_the_product_with_bias(
    dense: NativeDense, dtype: torch.dtype, rows: int, out: int, size: int
) -> None:
    x, weight, bias = values(rows, size).to(dtype), values(out, size, seed=1).to(dtype), values(out, seed=2).to(dtype)
    packed = dense.pack(weight, bias)
    assert (packed.out_features, packed.in_features, packed.nbytes) == (out, size, weight.nbytes)
    assert_near(dense.matmul(x, packed), x.double() @ weight.double().T + bias.double(), BOUND[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out", "size"), [(16, 2), (64, 48), (272, 64)])
def test_packing_in_place_gives_the_same_panels_in_the_weights_memory(
    dense: NativeDense, dtype: torch.dtype, out: int, size: int
) -> None:
    weight = values(out, size).to(dtype)
    apart, address = dense.pack(weight, None).weight, weight.data_ptr()
    packed = dense.pack_in_place(weight, None)
    assert packed.weight.data_ptr() == address and torch.equal(packed.weight, apart)


def test_rows_that_do_not_fill_their_last_panel_are_packed_apart(dense: NativeDense) -> None:
    weight = values(17, 32)
    kept = weight.clone()
    assert torch.equal(dense.pack_in_place(weight, None).weight, dense.pack(kept, None).weight)
    assert torch.equal(weight, kept)


@pytest.mark.parametrize("dtype", DTYPES)
def test_lookup_reads_back_the_rows_that_were_packed(dense: NativeDense, dtype: torch.dtype) -> None:
    weight, ids = values(37, 48).to(dtype), torch.tensor([36, 0, 17, 17])
    assert torch.equal(dense.lookup(dense.pack(weight, None), ids), weight[ids].float())
    assert torch.equal(dense.lookup(dense.table(weight), ids), weight[ids].float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 20])
def test_add_norm_is_the_formula_and_advances_the_residual(dense: NativeDense, dtype: torch.dtype, rows: int) -> None:
    x, delta, weight = values(rows, 48), values(rows, 48, seed=1).to(dtype), 1 + values(48) / 8
    total = x.double() + delta.double()
    expected = total / (total.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert_near(dense.norm(total.float(), weight, 1e-5, dtype), expected, BOUND[dtype])
    assert_near(dense.add_norm(x, delta, weight, 1e-5, dtype), expected, BOUND[dtype])
    assert_near(x, total, 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 6, 19])
def test_the_gated_mlp_is_the_formula(dense: NativeDense, dtype: torch.dtype, rows: int) -> None:
    x, gate_up = values(rows, 48).to(dtype), (values(160, 48, seed=1) / 7).to(dtype)
    down = (values(48, 80, seed=2) / 9).to(dtype)
    both = x.double() @ gate_up.double().T
    expected = both[:, :80] * both[:, :80].sigmoid() * both[:, 80:] @ down.double().T
    assert_near(dense.ffn(x, dense.pack(gate_up, None), dense.pack(down, None)), expected, CHAIN[dtype])


def test_extreme_gates_neither_overflow_nor_vanish(dense: NativeDense) -> None:
    gate = torch.tensor([-1e4, -100.0, -88.0, -20.0, 0.0, 20.0, 88.0, 100.0, 1e4] + [1.0] * 7)
    gate_up = torch.cat((torch.diag(gate), torch.eye(16)))
    out = dense.ffn(torch.ones(1, 16), dense.pack(gate_up, None), dense.pack(torch.eye(16), None))
    torch.testing.assert_close(out[0], torch.nn.functional.silu(gate), atol=1e-30, rtol=1e-5)


class Cached:
    """Requests whose rows go through write and attention in any cutting, over shuffled pages full of NaN."""

    HEADS = Heads(query=6, key_value=2, size=48)
    SCALE = 0.2

    def __init__(
        self,
        lengths: Sequence[int],
        page_size: int,
        dtype: torch.dtype,
        rope_size: int = 48,
        *,
        is_whole: bool = False,
        is_interleaved: bool = False,
    ) -> None:
        self.dtype, self.page_size, self.is_interleaved = dtype, page_size, is_interleaved
        self.projected = [values(n, 10 * 48, seed=i).to(dtype) for i, n in enumerate(lengths)]
        self.norm = HeadNorm(weight=1 + values(8, 48) / 8, eps=1e-6, is_whole=is_whole)
        self.frequencies = torch.logspace(0, -3, rope_size // 2).repeat(2)
        counts = [-(-n // page_size) for n in lengths]
        order = np.random.default_rng(0).permutation(sum(counts) + 2)
        self.pages = [order[sum(counts[:i]) : sum(counts[: i + 1])].tolist() for i in range(len(counts))]
        rows = len(order) * page_size
        keys, kept = (torch.full((rows, 2, 48), math.nan, dtype=dtype) for _ in "kv")
        self.kv = LayerKV(keys=keys, values=kept, page_size=page_size)
        self.ops = NativeAttention(Direct(load_library(FOUND.library)))

    def rope(self, positions: torch.Tensor) -> RopeRows:
        angles = positions[:, None, None].float() * self.frequencies
        signs = torch.ones(len(self.frequencies))
        signs[: len(signs) // 2] = -1
        return RopeRows(cos=angles.cos(), sin=angles.sin() * signs, is_interleaved=self.is_interleaved)

    def forward(self, parts: Sequence[tuple[int, int, int]], phase: Phase, window: int | None) -> torch.Tensor:
        """Rows [start, stop) of each (request, start, stop), in one batch."""
        spans = [
            RowSpan(phase=phase, tokens=[0] * (stop - start), start=start, pages=self.pages[r], logits=())
            for r, start, stop in parts
        ]
        batch = make_batch(spans, page_size=self.page_size, windows=(None, window), device="cpu")
        projected = torch.cat([self.projected[r][start:stop] for r, start, stop in parts])
        rope = self.rope(batch.positions)
        queries = self.ops.write(projected, self.HEADS, self.norm, rope, self.kv, batch.write_slots)
        return torch.cat(
            [
                self.ops.attention(queries[s.first : s.first + s.num_rows], self.kv, s, window=window, scale=self.SCALE)
                for s in batch.segments
            ]
        )

    def expected(self, request: int, window: int | None) -> torch.Tensor:
        """One row and head at a time, in float64, from norm and rotation as complex multiplication."""
        rows = self.projected[request].double().view(-1, 10, 48)
        squares = rows[:, :8].square().mean(-1, keepdim=True)
        if self.norm.is_whole:
            for heads in (slice(0, 6), slice(6, 8)):
                squares[:, heads] = squares[:, heads].mean(1, keepdim=True)
        mixed = rows[:, :8] / (squares + 1e-6).sqrt() * self.norm.weight.double()
        half = len(self.frequencies) // 2
        turn = torch.polar(
            torch.ones(len(rows), half, dtype=torch.float64),
            torch.arange(len(rows))[:, None] * self.frequencies[:half].double(),
        )[:, None]
        parts = (mixed[..., :half], mixed[..., half : 2 * half])
        if self.is_interleaved:
            parts = (mixed[..., 0 : 2 * half : 2], mixed[..., 1 : 2 * half : 2])
        turned = torch.complex(*parts) * turn
        mixed = torch.cat((turned.real, turned.imag, mixed[..., 2 * half :]), -1).to(self.dtype).double()
        out = torch.empty(len(rows), 6, 48, dtype=torch.float64)
        for at in range(len(rows)):
            low = 0 if window is None else max(0, at - window + 1)
            for head in range(6):
                scores = mixed[low : at + 1, 6 + head // 3] @ mixed[at, head] * self.SCALE
                out[at, head] = scores.softmax(0) @ rows[low : at + 1, 8 + head // 3]
        return out.view(len(rows), -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("page_size", "window", "rope_size"), [(16, None, 48), (32, 20, 48), (64, 70, 32), (16, 1, 16)]
)
def test_attention_over_pages_is_the_softmax_of_each_row(
    dtype: torch.dtype, page_size: int, window: int | None, rope_size: int
) -> None:
    case = Cached([5, 150, 64, 1], page_size, dtype, rope_size)
    out = case.forward([(r, 0, len(p)) for r, p in enumerate(case.projected)], Phase.PREFILL, window)
    expected = torch.cat([case.expected(r, window) for r in range(4)])
    assert_near(out, expected, CHAIN[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("is_whole", "is_interleaved", "rope_size"), [(True, False, 32), (False, True, 48), (True, True, 8)]
)
def test_norms_over_all_heads_and_neighbours_as_pairs_are_the_formula_too(
    dtype: torch.dtype, is_whole: bool, is_interleaved: bool, rope_size: int
) -> None:
    case = Cached([5, 40], 16, dtype, rope_size, is_whole=is_whole, is_interleaved=is_interleaved)
    out = case.forward([(0, 0, 5), (1, 0, 40)], Phase.PREFILL, None)
    assert_near(out, torch.cat([case.expected(r, None) for r in range(2)]), CHAIN[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 20])
def test_a_rows_attention_has_the_same_bits_in_every_cutting(dtype: torch.dtype, window: int | None) -> None:
    lengths = [5, 150, 64, 33]
    whole = Cached(lengths, 16, dtype).forward([(r, 0, n) for r, n in enumerate(lengths)], Phase.PREFILL, window)
    firsts = np.cumsum([0, *lengths])
    for page_size, step, phase in ((16, 1, Phase.DECODE), (32, 5, Phase.VERIFY), (64, 7, Phase.PREFILL)):
        case, got = Cached(lengths, page_size, dtype), torch.empty_like(whole)
        for start in range(0, max(lengths), step):
            parts = [(r, start, min(start + step, n)) for r, n in enumerate(lengths) if start < n]
            out, at = case.forward(parts, phase, window), 0
            for request, begin, stop in parts:
                got[firsts[request] + begin : firsts[request] + stop] = out[at : at + stop - begin]
                at += stop - begin
        assert torch.equal(got, whole), (page_size, step)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rows_products_have_the_same_bits_beside_any_other_rows(dense: NativeDense, dtype: torch.dtype) -> None:
    x = values(40, 96).to(dtype)
    packed, up = dense.pack(values(70, 96, seed=1).to(dtype), None), dense.pack(values(64, 96, seed=2).to(dtype), None)
    down, scale = dense.pack(values(96, 32, seed=3).to(dtype), None), 1 + values(96) / 8
    ops = (
        lambda rows: dense.matmul(rows, packed),
        lambda rows: dense.ffn(rows, up, down),
        lambda rows: dense.norm(rows.float(), scale, 1e-6, dtype),
    )
    for op in ops:
        whole = op(x)
        for step in (1, 2, 3, 5, 6, 8, 16):
            assert torch.equal(torch.cat([op(part.contiguous()) for part in x.split(step)]), whole)


def test_stock_products_do_not_have_that_property() -> None:
    """Or the test above could not fail: float32 F.linear rounds one row otherwise than many."""
    dense, x, weight = ReferenceDense(), values(64, 1024), values(1024, 1024, seed=1)
    packed = dense.pack(weight, None)
    assert not torch.equal(torch.cat([dense.matmul(row, packed) for row in x.split(1)]), dense.matmul(x, packed))


def test_a_recordings_memory_is_used_again_only_when_the_last_part_of_it_is_dropped() -> None:
    with torch.inference_mode():  # as a runner records: views do not hold their base there
        recorder = Recorder(4)
        part = recorder.empty((4, 8), torch.float32)[:, 4:]
        place = part.data_ptr() - 4 * part.itemsize
        assert recorder.empty((4, 8), torch.float32).data_ptr() != place
        del part
        assert place in {recorder.empty((4, 8), torch.float32).data_ptr() for _ in range(2)}
