"""Reference attention against a softmax written row by row in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from proa.kernels.reference.attention import ReferenceAttention
from proa.kernels.seam import LayerKV
from proa.runner.batch import RowSpan, make_batch
from proa.units import Phase

HEADS, KV_HEADS, SIZE, SCALE = 6, 2, 8, 0.3
REQUESTS = [(0, 5), (7, 3), (30, 1), (12, 5)]  # (cached rows, new rows)


class Case:
    """Random requests whose cache rows lie in shuffled pages; every row that no request owns is NaN."""

    def __init__(self, phase: Phase, requests: Sequence[tuple[int, int]], page_size: int, dtype: torch.dtype) -> None:
        rng = np.random.default_rng(0)
        self.requests, self.dtype = requests, dtype
        counts = [-(-(start + new) // page_size) for start, new in requests]
        order = rng.permutation(sum(counts) + 3)
        self.pages = [order[sum(counts[:i]) : sum(counts[: i + 1])].tolist() for i in range(len(counts))]
        rows = (len(order)) * page_size
        self.keys, self.values = (np.full((rows, KV_HEADS, SIZE), np.nan) for _ in range(2))
        self.slots = [[p * page_size + o for p in pages for o in range(page_size)] for pages in self.pages]
        for slots, (start, new) in zip(self.slots, requests, strict=True):
            used = slots[: start + new]
            self.keys[used], self.values[used] = (
                self.rounded(rng.standard_normal((len(used), KV_HEADS, SIZE))) for _ in "kv"
            )
        self.queries = self.rounded(rng.standard_normal((sum(new for _, new in requests), HEADS, SIZE)))
        spans = [
            RowSpan(phase=phase, tokens=[0] * new, start=start, pages=pages, logits=())
            for (start, new), pages in zip(requests, self.pages, strict=True)
        ]
        self.batch = make_batch(spans, page_size=page_size, windows=(None, 3, 9), device="cpu")

    def rounded(self, values: np.ndarray) -> np.ndarray:
        return torch.from_numpy(values).to(self.dtype).double().numpy()

    def result(self, window: int | None) -> np.ndarray:
        kv = LayerKV(
            keys=torch.from_numpy(self.keys).to(self.dtype),
            values=torch.from_numpy(self.values).to(self.dtype),
            page_size=4,
        )
        queries = torch.from_numpy(self.queries).to(self.dtype)
        parts = [
            ReferenceAttention().attention(
                queries[part.first : part.first + part.num_rows], kv, part, window=window, scale=SCALE
            )
            for part in self.batch.segments
        ]
        return torch.cat(parts).double().numpy()

    def expected(self, window: int | None) -> np.ndarray:
        """One query row and head at a time."""
        out = []
        row = 0
        for slots, (start, new) in zip(self.slots, self.requests, strict=True):
            for position in range(start, start + new):
                low = 0 if window is None else max(0, position - window + 1)
                seen = slots[low : position + 1]
                for head in range(HEADS):
                    kv_head = head // (HEADS // KV_HEADS)
                    scores = self.keys[seen, kv_head] @ self.queries[row, head] * SCALE
                    weights = np.exp(scores - scores.max())
                    out.append(weights / weights.sum() @ self.values[seen, kv_head])
                row += 1
        return np.array(out).reshape(row, HEADS * SIZE)


@pytest.mark.parametrize("window", [None, 3, 9])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("phase", [Phase.PREFILL, Phase.VERIFY])
def test_every_row_sees_its_own_earlier_rows_and_no_other(phase: Phase, page_size: int, window: int | None) -> None:
    case = Case(phase, REQUESTS, page_size, torch.float32)
    np.testing.assert_allclose(case.result(window), case.expected(window), atol=2e-6)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("starts", [[0], [17], [4, 4, 4], [0, 9, 31, 2]])
def test_decode_rows_of_any_lengths_share_a_segment(starts: list[int], window: int | None) -> None:
    case = Case(Phase.DECODE, [(start, 1) for start in starts], 4, torch.float32)
    assert len(case.batch.segments) == 1
    np.testing.assert_allclose(case.result(window), case.expected(window), atol=2e-6)


def test_bfloat16_differs_by_rounding_only() -> None:
    case = Case(Phase.VERIFY, REQUESTS, 4, torch.bfloat16)
    np.testing.assert_allclose(case.result(None), case.expected(None), atol=2e-2)


def test_a_cache_of_another_type_is_read_in_the_type_of_the_queries() -> None:
    case = Case(Phase.DECODE, [(9, 1), (3, 1)], 4, torch.bfloat16)  # values that bfloat16 holds exactly
    segment = case.batch.segments[0]
    kv = LayerKV(
        keys=torch.from_numpy(case.keys).bfloat16(), values=torch.from_numpy(case.values).bfloat16(), page_size=4
    )
    out = ReferenceAttention().attention(torch.from_numpy(case.queries).float(), kv, segment, window=None, scale=SCALE)
    assert out.dtype is torch.float32
    np.testing.assert_allclose(out.numpy(), case.expected(None), atol=2e-6)


def test_masks_are_made_once_per_forward_not_once_per_layer() -> None:
    case = Case(Phase.VERIFY, REQUESTS, 4, torch.float32)
    case.result(None)
    memo = case.batch.segments[0].views[None].memo
    before = {key: tensor.data_ptr() for key, tensor in memo.items()}
    case.result(None)
    assert before and {key: tensor.data_ptr() for key, tensor in memo.items()} == before


def test_without_the_mask_a_row_would_see_later_rows() -> None:
    case = Case(Phase.VERIFY, [(0, 5)], 4, torch.float32)
    view = case.batch.segments[0].views[None]
    assert view.visible is not None
    view.visible.fill_(True)
    wrong = np.abs(case.result(None) - case.expected(None)).reshape(5, -1).max(axis=1)
    assert (wrong[:-1] > 1e-3).all() and math.isclose(wrong[-1], 0, abs_tol=2e-6)
