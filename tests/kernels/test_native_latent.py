"""Native latent attention against its definition in float64, one head and one row at a time and without absorption.

And the rule that makes it exact: a row's bits do not depend on the rows beside it, the cutting, or the page size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from proa.kernels.latent_seam import LatentKV, LatentShape
from proa.kernels.native.abi import load_library
from proa.kernels.native.latent import NativeLatent
from proa.kernels.native.ops import NativeDense, request_rows
from proa.kernels.native.sink import Direct, Program, Recorder
from proa.kernels.reference.latent import ReferenceLatent
from proa.kernels.seam import RopeRows, Segment
from proa.runner.batch import RowSpan, make_batch
from proa.units import Phase
from tests.factories.native import probed, why_not

FOUND = probed()
WHY_NOT = why_not(FOUND)
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

DTYPES = (torch.float32, torch.bfloat16)
# bfloat16: cached rows are rounded as the definition says, in both; absorbed queries, weights, attended rows and the
# output are rounded once each (2^-9), and their errors pass through two products.
BOUND = {torch.float32: 1e-5, torch.bfloat16: 2**-5}
SMALL = LatentShape(heads=3, nope=6, rope=4, value=10, rank=16)  # nothing but the rank is a whole vector
USUAL = LatentShape(heads=5, nope=32, rope=16, value=24, rank=96)
SCALE = 0.3


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + 7 * len(shape)))


def assert_near(ours: torch.Tensor, expected: torch.Tensor, bound: float) -> None:
    """Relative to the largest expected value."""
    assert (ours.double() - expected).abs().max() <= bound * expected.abs().max()


class Cached:
    """Requests whose rows go through write and attention in any cutting, over shuffled pages full of NaN. Rows are
    parts of longer ones, as a merged projection gives them."""

    def __init__(
        self, lengths: Sequence[int], page_size: int, dtype: torch.dtype, shape: LatentShape, *, rope: str = "halves"
    ) -> None:
        self.dtype, self.page_size, self.shape, self.rope = dtype, page_size, shape, rope
        self.merged_query = shape.heads * (shape.nope + shape.rope)
        width = self.merged_query + shape.rank + shape.rope
        self.merged = [values(n, width, seed=i).to(dtype) for i, n in enumerate(lengths)]
        self.norm = 1 + values(shape.rank) / 8
        self.up = (values(shape.heads * (shape.nope + shape.value), shape.rank) / shape.rank**0.5).to(dtype)
        self.frequencies = torch.logspace(0, -3, shape.rope // 2)
        counts = [-(-n // page_size) for n in lengths]
        order = np.random.default_rng(0).permutation(sum(counts) + 2)
        self.pages = [order[sum(counts[:i]) : sum(counts[: i + 1])].tolist() for i in range(len(counts))]
        latent = torch.full((len(order) * page_size, shape.rank + shape.rope), math.nan, dtype=dtype)
        self.kv = LatentKV(latent=latent, index=None, page_size=page_size)
        library = load_library(FOUND.library)
        self.ops: NativeLatent | ReferenceLatent = NativeLatent(library, Direct(library))

    def turning(self, positions: torch.Tensor) -> RopeRows | None:
        if self.rope == "none":
            return None
        angles = positions[:, None, None].float() * self.frequencies.repeat(2)
        signs = torch.tensor([-1.0, 1.0]).repeat_interleave(self.shape.rope // 2)
        return RopeRows(cos=angles.cos(), sin=angles.sin() * signs, is_interleaved=self.rope == "neighbours")

    def forward(self, parts: Sequence[tuple[int, int, int]], phase: Phase) -> torch.Tensor:
        """Rows [start, stop) of each (request, start, stop), in one batch."""
        spans = [
            RowSpan(phase=phase, tokens=[0] * (stop - start), start=start, pages=self.pages[r], logits=())
            for r, start, stop in parts
        ]
        batch = make_batch(spans, page_size=self.page_size, windows=(None,), device="cpu")
        merged = torch.cat([self.merged[r][start:stop] for r, start, stop in parts])
        queries, latent = merged.split((self.merged_query, merged.shape[1] - self.merged_query), dim=1)
        queries = self.ops.latent_write(
            queries, latent, self.norm, 1e-6, self.shape, self.turning(batch.positions), self.kv, batch.write_slots
        )
        absorbed = self.ops.absorb(self.up, self.shape)
        return torch.cat([self.attend(queries, absorbed, segment) for segment in batch.segments])

    def attend(self, queries: torch.Tensor, absorbed: object, segment: Segment) -> torch.Tensor:
        own = queries[segment.first : segment.first + segment.num_rows]
        return self.ops.latent_attention(own, absorbed, self.kv, segment, scale=SCALE, visible=None)  # type: ignore[arg-type]  # made by the same ops

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        """X [T, N, r] float64 by complex multiplication; pairs where the spelling says, results in two halves."""
        half = self.shape.rope // 2
        if self.rope == "none":
            return x
        turn = torch.polar(
            torch.ones(len(x), half, dtype=torch.float64), torch.arange(len(x))[:, None] * self.frequencies.double()
        )[:, None]
        is_halves = self.rope == "halves"
        pairs = torch.complex(*((x[..., :half], x[..., half:]) if is_halves else (x[..., 0::2], x[..., 1::2])))
        done = pairs * turn
        return torch.cat((done.real, done.imag), -1)

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.dtype).double()

    def expected(self, request: int) -> torch.Tensor:
        s, rows = self.shape, self.merged[request].double()
        queries = rows[:, : self.merged_query].view(len(rows), s.heads, s.nope + s.rope)
        turned = self.rounded(self.turned(queries[..., s.nope :]))
        latent = rows[:, self.merged_query : self.merged_query + s.rank]
        normed = self.rounded(latent / (latent.square().mean(-1, keepdim=True) + 1e-6).sqrt() * self.norm.double())
        shared = self.rounded(self.turned(rows[:, None, self.merged_query + s.rank :]))[:, 0]
        up = self.up.double().view(s.heads, s.nope + s.value, s.rank)
        out = torch.empty(len(rows), s.heads, s.value, dtype=torch.float64)
        for head in range(s.heads):
            keys, own = normed @ up[head, : s.nope].T, normed @ up[head, s.nope :].T
            for at in range(len(rows)):
                scores = keys[: at + 1] @ queries[at, head, : s.nope] + shared[: at + 1] @ turned[at, head]
                out[at, head] = (scores * SCALE).softmax(0) @ own[: at + 1]
        return out.flatten(1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [SMALL, USUAL])
@pytest.mark.parametrize(("page_size", "rope"), [(16, "halves"), (5, "neighbours"), (64, "none")])
def test_latent_attention_is_attention_over_the_keys_and_values_it_stands_for(
    dtype: torch.dtype, shape: LatentShape, page_size: int, rope: str
) -> None:
    case = Cached([5, 70, 33, 1], page_size, dtype, shape, rope=rope)
    out = case.forward([(r, 0, len(rows)) for r, rows in enumerate(case.merged)], Phase.PREFILL)
    assert_near(out, torch.cat([case.expected(r) for r in range(4)]), BOUND[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_native_and_reference_agree_and_share_the_cache(dtype: torch.dtype) -> None:
    lengths = [5, 70]
    parts = [(r, 0, n) for r, n in enumerate(lengths)]
    native, reference = (Cached(lengths, 16, dtype, USUAL, rope="neighbours") for _ in range(2))
    reference.ops = ReferenceLatent()
    for case in (native, reference):
        case.kv.latent.zero_()  # the reference multiplies unwritten rows of a page by a weight of 0
    assert_near(native.forward(parts, Phase.PREFILL), reference.forward(parts, Phase.PREFILL).double(), BOUND[dtype])
    assert_near(native.kv.latent, reference.kv.latent.double(), 2**-8 if dtype == torch.bfloat16 else 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [SMALL, USUAL])
def test_a_row_has_the_same_bits_in_every_cutting(dtype: torch.dtype, shape: LatentShape) -> None:
    lengths = [5, 100, 64, 33]
    whole = Cached(lengths, 16, dtype, shape).forward([(r, 0, n) for r, n in enumerate(lengths)], Phase.PREFILL)
    firsts = np.cumsum([0, *lengths])
    for page_size, step, phase in ((16, 1, Phase.DECODE), (32, 5, Phase.VERIFY), (7, 7, Phase.PREFILL)):
        case, got = Cached(lengths, page_size, dtype, shape), torch.empty_like(whole)
        for start in range(0, max(lengths), step):
            parts = [(r, start, min(start + step, n)) for r, n in enumerate(lengths) if start < n]
            out, at = case.forward(parts, phase), 0
            for request, begin, stop in parts:
                got[firsts[request] + begin : firsts[request] + stop] = out[at : at + stop - begin]
                at += stop - begin
        assert torch.equal(got, whole), (page_size, step)


def test_the_reference_does_not_have_that_property() -> None:
    """Or the test above could not fail: stock products round one row otherwise than many."""
    whole, alone = (Cached([100], 16, torch.float32, USUAL) for _ in range(2))
    for case in (whole, alone):
        case.ops = ReferenceLatent()
        case.kv.latent.zero_()
    rows = [alone.forward([(0, at, at + 1)], Phase.DECODE) for at in range(100)]
    assert not torch.equal(torch.cat(rows), whole.forward([(0, 0, 100)], Phase.PREFILL))


@pytest.mark.parametrize("dtype", DTYPES)
def test_query_norm_reads_a_part_of_longer_rows(dtype: torch.dtype) -> None:
    library = load_library(FOUND.library)
    x, weight = values(9, 80).to(dtype), 1 + values(48) / 8
    part = x[:, 16:64]
    expected = part.double() / (part.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    ours = NativeLatent(library, Direct(library)).query_norm(part, weight, 1e-5)
    assert ours.is_contiguous()
    assert_near(ours, expected, 1e-5 if dtype == torch.float32 else 2**-8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_read_a_part_of_longer_rows(dtype: torch.dtype) -> None:
    library = load_library(FOUND.library)
    dense, x = NativeDense(library, Direct(library)), values(9, 80).to(dtype)
    packed = dense.pack((values(40, 48) / 7).to(dtype), None)
    assert torch.equal(dense.matmul(x[:, 16:64], packed), dense.matmul(x[:, 16:64].contiguous(), packed))


def test_a_recorded_layer_gives_the_same_bits_for_fewer_rows() -> None:
    """Parts of a merged row stay alive in a recording although the row itself is dropped."""
    case = Cached([37], 16, torch.bfloat16, USUAL)
    whole = case.forward([(0, 0, 37)], Phase.PREFILL)
    library, recorder = load_library(FOUND.library), Recorder(64)
    ops = NativeLatent(library, recorder)
    rows = recorder.empty((64, case.merged[0].shape[1]), torch.bfloat16)
    queries, latent = rows.split((case.merged_query, rows.shape[1] - case.merged_query), dim=1)
    cos, sin = (recorder.empty((64, 1, USUAL.rope), torch.float32) for _ in range(2))
    memory = rows.view(-1)
    del rows
    slots = torch.zeros(64, dtype=torch.int64)
    turned = ops.latent_write(queries, latent, case.norm, 1e-6, USUAL, RopeRows(cos=cos, sin=sin), case.kv, slots)
    segment = make_batch(
        [RowSpan(phase=Phase.PREFILL, tokens=[0] * 64, start=0, pages=[0, 0, 0, 0], logits=())],
        page_size=16, windows=(None,), device="cpu",
    ).segments[0]  # fmt: skip
    out = ops.latent_attention(turned, ops.absorb(case.up, USUAL), case.kv, segment, scale=SCALE, visible=None)
    program = Program(library, recorder, {})
    for start, stop in ((0, 30), (30, 31), (31, 37)):
        span = RowSpan(phase=Phase.PREFILL, tokens=[0] * (stop - start), start=start, pages=case.pages[0], logits=())
        batch = make_batch([span], page_size=16, windows=(None,), device="cpu")
        turning = case.turning(batch.positions)
        assert turning is not None
        cos[: stop - start], sin[: stop - start] = turning.cos, turning.sin
        memory.view(64, -1)[: stop - start] = case.merged[0][start:stop]
        program.run(stop - start, {"slots": batch.write_slots, "requests": request_rows(batch.segments, 0)})
        assert torch.equal(out[: stop - start], whole[start:stop])


def test_what_native_has_no_form_for_is_refused() -> None:
    library = load_library(FOUND.library)
    ops, case = NativeLatent(library, Direct(library)), Cached([4], 16, torch.float32, USUAL)
    for shape in (
        LatentShape(heads=1, nope=4, rope=4, value=4, rank=24),
        LatentShape(heads=1, nope=4, rope=4, value=4, rank=1024),
        LatentShape(heads=1, nope=5, rope=4, value=4, rank=16),
    ):
        with pytest.raises(ValueError, match="no form"):
            ops.absorb(torch.zeros(shape.nope + shape.value, shape.rank), shape)
    batch = make_batch(
        [RowSpan(phase=Phase.DECODE, tokens=[0], start=0, pages=[0], logits=())],
        page_size=16, windows=(None,), device="cpu",
    )  # fmt: skip
    queries = torch.zeros(1, USUAL.heads, USUAL.nope + USUAL.rope)
    with pytest.raises(TypeError, match="another backend"):
        ops.latent_attention(
            queries, ReferenceLatent().absorb(case.up, USUAL), case.kv, batch.segments[0], scale=1.0, visible=None
        )
    with pytest.raises(TypeError, match="another backend"):
        ops.latent_attention(
            queries, ops.absorb(case.up, USUAL), case.kv, batch.segments[0], scale=1.0,
            visible=torch.ones(1, 1, 1, dtype=torch.bool),
        )  # fmt: skip
