"""The native indexer against brute force in float64, attention over what it chose, and the scale of queries.

And the rule that makes them exact: neither choice nor result depends on the rows beside a row, or on the threads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from proa.arch.blocks import IndexerSpec, QueryScale, RopeKind, RopeSpec
from proa.kernels.latent_seam import Chosen, IndexNorm, LatentKV, LatentShape
from proa.kernels.native.abi import load_library
from proa.kernels.native.latent import NativeLatent
from proa.kernels.native.ops import NativeDense, request_rows
from proa.kernels.native.sink import Direct, Program, Recorder
from proa.kernels.seam import RopeRows
from proa.layers.base import ForwardBatch
from proa.runner.batch import RowSpan, make_batch
from proa.units import Phase
from tests.factories.native import probed, why_not

FOUND = probed()
WHY_NOT = why_not(FOUND)
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

DTYPES = (torch.float32, torch.bfloat16)
BOUND = {torch.float32: 1e-5, torch.bfloat16: 2**-5}
SHAPE, SCALE = LatentShape(heads=6, nope=16, rope=8, value=20, rank=48), 0.2
NORM_EPS = 1e-6


def indexer(heads: int, size: int, top_k: int, *, is_interleaved: bool = False) -> IndexerSpec:
    rope = RopeSpec(kind=RopeKind.DEFAULT, base=10000.0, dim=8, is_interleaved=is_interleaved)
    return IndexerSpec(num_heads=heads, head_dim=size, top_k=top_k, rope=rope, norm_eps=NORM_EPS, is_full=True)


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + 7 * len(shape)))


class Indexed:
    """Requests whose rows are indexed and attended in any cutting, over shuffled pages full of NaN. Inputs are parts of
    longer rows."""

    def __init__(self, lengths: Sequence[int], page_size: int, dtype: torch.dtype, spec: IndexerSpec) -> None:
        self.dtype, self.spec, self.page_size = dtype, spec, page_size
        wide = spec.num_heads * spec.head_dim
        self.rows = [values(n, wide + spec.head_dim + spec.num_heads, seed=i).to(dtype) for i, n in enumerate(lengths)]
        self.latent = [values(n, SHAPE.rank + SHAPE.rope, seed=40 + i).to(dtype) for i, n in enumerate(lengths)]
        self.queries = [values(n, SHAPE.heads * 24, seed=80 + i).to(dtype) for i, n in enumerate(lengths)]
        self.norm = IndexNorm(weight=1 + values(spec.head_dim) / 8, bias=values(spec.head_dim, seed=1) / 8)
        self.up = (values(SHAPE.heads * (SHAPE.nope + SHAPE.value), SHAPE.rank) / 7).to(dtype)
        counts = [-(-n // page_size) for n in lengths]
        order = np.random.default_rng(0).permutation(sum(counts) + 2)
        self.pages = [order[sum(counts[:i]) : sum(counts[: i + 1])].tolist() for i in range(len(counts))]
        cached = len(order) * page_size
        self.kv = LatentKV(
            latent=torch.full((cached, SHAPE.rank + SHAPE.rope), math.nan, dtype=dtype),
            index=torch.full((cached, spec.head_dim), math.nan, dtype=dtype),
            page_size=page_size,
        )
        library = load_library(FOUND.library)
        self.ops = NativeLatent(library, Direct(library))

    def batch(self, parts: Sequence[tuple[int, int, int]], phase: Phase) -> ForwardBatch:
        spans = [
            RowSpan(phase=phase, tokens=[0] * (stop - start), start=start, pages=self.pages[r], logits=())
            for r, start, stop in parts
        ]
        return make_batch(spans, page_size=self.page_size, windows=(None,), device="cpu")

    def turning(self, positions: torch.Tensor) -> RopeRows:
        angles = positions[:, None, None].float() * torch.logspace(0, -3, 4).repeat(2)
        signs = torch.tensor([-1.0, 1.0]).repeat_interleave(4)
        return RopeRows(cos=angles.cos(), sin=angles.sin() * signs, is_interleaved=self.spec.rope.is_interleaved)

    def index(self, parts: Sequence[tuple[int, int, int]], batch: ForwardBatch) -> Chosen:
        spec = self.spec
        rows = torch.cat([self.rows[r][start:stop] for r, start, stop in parts])
        sizes = (spec.num_heads * spec.head_dim, spec.head_dim, spec.num_heads)
        turning = self.turning(batch.positions)
        return self.ops.index(
            *rows.split(sizes, dim=1), self.norm, spec, turning, self.kv, batch.segments, batch.write_slots
        )

    def forward(
        self, parts: Sequence[tuple[int, int, int]], phase: Phase, *, attends: bool = True
    ) -> tuple[list[list[int]], torch.Tensor]:
        """What each row of [start, stop) of each (request, start, stop) sees, and its attention's result."""
        batch = self.batch(parts, phase)
        chosen = self.index(parts, batch)
        lists = [row[1 : 1 + int(row[0])].tolist() for part in chosen.visible for row in part]
        latent = torch.cat([self.latent[r][start:stop] for r, start, stop in parts])
        queries = torch.cat([self.queries[r][start:stop] for r, start, stop in parts])
        turned = self.ops.latent_write(
            queries, latent, torch.ones(SHAPE.rank), 1e-6, SHAPE, self.turning(batch.positions), self.kv,
            batch.write_slots,
        )  # fmt: skip
        out = [
            self.ops.latent_attention(
                turned[part.first : part.first + part.num_rows], self.ops.absorb(self.up, SHAPE), self.kv, part,
                scale=SCALE, visible=seen if attends else None,
            )
            for part, seen in zip(batch.segments, chosen.visible, strict=True)
        ]  # fmt: skip
        return lists, torch.cat(out)

    def turned(self, x: torch.Tensor, position: int) -> torch.Tensor:
        """The first eight elements of x [.., size] float64, by complex multiplication."""
        pairs = x[..., :8]
        both = (pairs[..., 0::2], pairs[..., 1::2]) if self.spec.rope.is_interleaved else pairs.split(4, dim=-1)
        angles = position * torch.logspace(0, -3, 4).double()
        done = torch.complex(*both) * torch.polar(torch.ones(4, dtype=torch.float64), angles)
        return torch.cat((done.real, done.imag, x[..., 8:]), -1)

    def expected(self, request: int) -> list[list[int]]:
        spec = self.spec
        wide = spec.num_heads * spec.head_dim
        raw = self.rows[request].double()
        keys = torch.nn.functional.layer_norm(
            raw[:, wide : wide + spec.head_dim], (spec.head_dim,), self.norm.weight.double(), self.norm.bias.double(),
            NORM_EPS,
        )  # fmt: skip
        seen = torch.stack([self.turned(key, at).to(self.dtype).double() for at, key in enumerate(keys)])
        out = []
        for at, row in enumerate(raw):
            queries = self.turned(row[:wide].view(spec.num_heads, -1), at).to(self.dtype).double()
            scores = (row[wide + spec.head_dim :, None] * (queries @ seen[: at + 1].T).relu()).sum(0)
            order = sorted((-score, place) for place, score in enumerate(scores.tolist()))
            out.append(sorted(place for _, place in order[: spec.top_k]))
        return out


SPECS = [
    indexer(3, 8, 5),
    indexer(4, 32, 16, is_interleaved=True),
    indexer(9, 40, 1),
    indexer(8, 128, 100),
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.num_heads}x{spec.head_dim} top {spec.top_k}")
@pytest.mark.parametrize("page_size", [16, 5])
def test_each_row_sees_its_best_earlier_rows(spec: IndexerSpec, page_size: int) -> None:
    case = Indexed([70, 1, 33], page_size, torch.float32, spec)
    lists, _ = case.forward([(r, 0, len(rows)) for r, rows in enumerate(case.rows)], Phase.PREFILL)
    assert lists == [seen for r in range(3) for seen in case.expected(r)]


def test_a_bfloat16_choice_differs_in_near_ties_at_most() -> None:
    case = Indexed([90], 16, torch.bfloat16, indexer(8, 64, 16))
    lists, _ = case.forward([(0, 0, 90)], Phase.PREFILL)
    expected = case.expected(0)
    assert [len(seen) for seen in lists] == [len(seen) for seen in expected]
    assert sum(len(set(a) ^ set(b)) for a, b in zip(lists, expected, strict=True)) <= 4


def test_rows_that_score_the_same_are_taken_from_the_front() -> None:
    """Keys that no query looks at score exactly 0, all of them."""
    case = Indexed([40], 16, torch.float32, indexer(4, 32, 7))
    case.norm = IndexNorm(weight=torch.zeros(32), bias=torch.zeros(32))
    lists, _ = case.forward([(0, 0, 40)], Phase.PREFILL)
    assert lists == [list(range(min(at + 1, 7))) for at in range(40)]


def test_values_that_are_no_numbers_do_not_break_the_choice() -> None:
    case = Indexed([40], 16, torch.float32, indexer(4, 32, 7))
    case.rows[0][5] = math.nan
    lists, _ = case.forward([(0, 0, 40)], Phase.PREFILL)
    assert all(len(seen) == min(at + 1, 7) and seen == sorted(set(seen)) for at, seen in enumerate(lists))


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_is_that_over_the_chosen_rows(dtype: torch.dtype) -> None:
    case = Indexed([70, 33], 16, dtype, indexer(4, 32, 9))
    parts = [(r, 0, len(rows)) for r, rows in enumerate(case.rows)]
    lists, out = case.forward(parts, Phase.PREFILL)
    up = case.up.double().view(SHAPE.heads, -1, SHAPE.rank)
    row = 0
    for request, _, stop in parts:
        page = [p * 16 + o for p in case.pages[request] for o in range(16)]
        cached = case.kv.latent[page[:stop]].double()
        for at in range(stop):
            seen = cached[lists[row]]
            queries = case.queries[request][at].double().view(SHAPE.heads, -1)
            plain, turn = queries.split((SHAPE.nope, SHAPE.rope), dim=1)
            for head in range(SHAPE.heads):
                keys, own = seen[:, :48] @ up[head, :16].T, seen[:, :48] @ up[head, 16:].T
                scores = keys @ plain[head] + seen[:, 48:] @ case.turned(turn[head], at).to(dtype).double()
                expected = (scores * SCALE).softmax(0) @ own
                error = (out[row].view(SHAPE.heads, -1)[head].double() - expected).abs().max()
                assert error <= BOUND[dtype] * out.double().abs().max()
            row += 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_choice_and_result_have_the_same_bits_in_every_cutting(dtype: torch.dtype) -> None:
    lengths, spec = [5, 100, 64, 33], indexer(5, 40, 12)
    whole_lists, whole = Indexed(lengths, 16, dtype, spec).forward(
        [(r, 0, n) for r, n in enumerate(lengths)], Phase.PREFILL
    )
    firsts = np.cumsum([0, *lengths])
    for page_size, step, phase in ((16, 1, Phase.DECODE), (32, 5, Phase.VERIFY), (7, 7, Phase.PREFILL)):
        case = Indexed(lengths, page_size, dtype, spec)
        for start in range(0, max(lengths), step):
            parts = [(r, start, min(start + step, n)) for r, n in enumerate(lengths) if start < n]
            lists, out = case.forward(parts, phase)
            at = 0
            for request, begin, stop in parts:
                own = slice(firsts[request] + begin, firsts[request] + stop)
                assert lists[at : at + stop - begin] == whole_lists[own]
                assert torch.equal(out[at : at + stop - begin], whole[own])
                at += stop - begin


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_share_one_rows_positions_without_a_trace(threads: int) -> None:
    """One row and several threads: they split its positions."""
    spec, before = indexer(5, 40, 12), torch.get_num_threads()
    whole, _ = Indexed([101], 16, torch.bfloat16, spec).forward([(0, 0, 101)], Phase.PREFILL)
    case = Indexed([101], 16, torch.bfloat16, spec)
    case.forward([(0, 0, 100)], Phase.PREFILL)
    try:
        torch.set_num_threads(threads)
        lists, _ = case.forward([(0, 100, 101)], Phase.DECODE)
    finally:
        torch.set_num_threads(before)
    assert lists == whole[100:]


@pytest.mark.parametrize("dtype", DTYPES)
def test_where_all_rows_are_chosen_attention_has_the_bits_of_the_dense_one(dtype: torch.dtype) -> None:
    results = [
        Indexed([60], 16, dtype, indexer(4, 32, 60)).forward([(0, 0, 60)], Phase.PREFILL, attends=attends)[1]
        for attends in (True, False)
    ]
    assert torch.equal(*results)


def test_a_recorded_choice_is_the_same_for_fewer_rows() -> None:
    case = Indexed([37], 16, torch.bfloat16, indexer(4, 32, 9))
    whole, _ = case.forward([(0, 0, 37)], Phase.PREFILL)
    library, recorder, spec = load_library(FOUND.library), Recorder(64), case.spec
    ops = NativeLatent(library, recorder)
    rows = recorder.empty((64, case.rows[0].shape[1]), torch.bfloat16)
    cos, sin = (recorder.empty((64, 1, 8), torch.float32) for _ in range(2))
    span = RowSpan(phase=Phase.PREFILL, tokens=[0] * 64, start=0, pages=[0] * 4, logits=())
    segments = make_batch([span], page_size=16, windows=(None,), device="cpu").segments
    sizes = (spec.num_heads * spec.head_dim, spec.head_dim, spec.num_heads)
    slots = torch.zeros(64, dtype=torch.int64)
    chosen = ops.index(*rows.split(sizes, dim=1), case.norm, spec, RopeRows(cos=cos, sin=sin), case.kv, segments, slots)
    program = Program(library, recorder, {})
    for start, stop in ((0, 30), (30, 31), (31, 37)):
        batch = case.batch([(0, start, stop)], Phase.PREFILL)
        turning = case.turning(batch.positions)
        cos[: stop - start], sin[: stop - start] = turning.cos, turning.sin
        rows[: stop - start] = case.rows[0][start:stop]
        program.run(stop - start, {"slots": batch.write_slots, "requests": request_rows(batch.segments, 0)})
        found = [row[1 : 1 + int(row[0])].tolist() for row in chosen.visible[0][: stop - start]]
        assert found == whole[start:stop]


def test_what_native_has_no_form_for_is_refused() -> None:
    case = Indexed([4], 16, torch.float32, indexer(1, 264, 2))
    with pytest.raises(ValueError, match="at most 256 elements, not 264"):
        case.forward([(0, 0, 4)], Phase.PREFILL)
    case = Indexed([4], 16, torch.float32, indexer(1, 16, 2))
    case.kv = LatentKV(latent=case.kv.latent, index=None, page_size=16)
    with pytest.raises(ValueError, match="no cache of index keys"):
        case.forward([(0, 0, 4)], Phase.PREFILL)


@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_grow_with_their_position(dtype: torch.dtype) -> None:
    library = load_library(FOUND.library)
    x, positions = values(6, 3, 20).to(dtype), [0, 7, 8, 17, 4000, 131072]
    ours = NativeDense(library, Direct(library)).scale_queries(
        x, torch.tensor(positions), QueryScale(beta=0.1, original=8)
    )
    factors = torch.tensor([1 + 0.1 * math.log(1 + position // 8) for position in positions], dtype=torch.float64)
    assert ours.dtype == dtype
    torch.testing.assert_close(
        ours.double(), x.double() * factors[:, None, None], atol=0, rtol=1e-6 if dtype == torch.float32 else 2**-8
    )
