"""Reference latent attention against keys and values made explicitly, head by head, in float64; the indexer by brute
force."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from proa.arch.blocks import IndexerSpec, RopeKind, RopeSpec
from proa.kernels.latent_seam import IndexNorm, LatentKV, LatentShape
from proa.kernels.reference.latent import ReferenceLatent
from proa.kernels.seam import RopeRows
from proa.layers.base import ForwardBatch
from proa.runner.batch import RowSpan, make_batch
from proa.units import Phase

OPS = ReferenceLatent()
HEADS, NOPE, ROPE, VALUE, RANK, SCALE = 4, 6, 4, 5, 16, 0.3
SHAPE = LatentShape(heads=HEADS, nope=NOPE, rope=ROPE, value=VALUE, rank=RANK)
REQUESTS = [(0, 5), (7, 3), (30, 1), (12, 5)]  # (cached rows, new rows)
INDEX_HEADS, INDEX_SIZE = 3, 8


class Paged:
    """Requests whose rows lie in shuffled pages, and their batch."""

    def __init__(self, phase: Phase, requests: Sequence[tuple[int, int]], page_size: int) -> None:
        rng = np.random.default_rng(0)
        self.requests, self.page_size = requests, page_size
        counts = [-(-(start + new) // page_size) for start, new in requests]
        order = rng.permutation(sum(counts) + 3)
        pages = [order[sum(counts[:i]) : sum(counts[: i + 1])].tolist() for i in range(len(counts))]
        self.num_rows = len(order) * page_size
        self.slots = [[p * page_size + o for p in own for o in range(page_size)] for own in pages]
        spans = [
            RowSpan(phase=phase, tokens=[0] * new, start=start, pages=own, logits=())
            for (start, new), own in zip(requests, pages, strict=True)
        ]
        self.batch: ForwardBatch = make_batch(spans, page_size=page_size, windows=(None,), device="cpu")

    def used(self) -> list[int]:
        return [
            slot for slots, (start, new) in zip(self.slots, self.requests, strict=True) for slot in slots[: start + new]
        ]

    def new_rows(self) -> list[tuple[int, int]]:
        """Request and position of every row of the batch."""
        return [(at, p) for at, (start, new) in enumerate(self.requests) for p in range(start, start + new)]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def filled(paged: Paged, width: int, seed: int) -> torch.Tensor:
    """Cache rows of that width: NaN where no request wrote."""
    rows = torch.full((paged.num_rows, width), float("nan"))
    rows[paged.used()] = random(len(paged.used()), width, seed=seed)
    return rows


def rope_rows(positions: torch.Tensor, size: int, *, is_interleaved: bool) -> RopeRows:
    frequencies = torch.tensor([10000.0 ** (-2 * i / size) for i in range(size // 2)])
    angles = torch.cat((frequencies, frequencies)) * positions.float().view(-1, 1, 1)
    signs = torch.cat((-torch.ones(size // 2), torch.ones(size // 2)))
    return RopeRows(cos=angles.cos(), sin=angles.sin() * signs, is_interleaved=is_interleaved)


def turned64(x: np.ndarray, position: int, size: int, *, is_interleaved: bool) -> np.ndarray:
    """The first `size` elements turn in pairs, which end up as two halves."""
    first, second = (x[:size:2], x[1:size:2]) if is_interleaved else (x[: size // 2], x[size // 2 : size])
    angles = position * 10000.0 ** (-2 * np.arange(size // 2) / size)
    turned = (first + 1j * second) * np.exp(1j * angles)
    return np.concatenate((turned.real, turned.imag, x[size:]))


def attended(
    paged: Paged, latent: torch.Tensor, queries: torch.Tensor, up: torch.Tensor, dtype: torch.dtype
) -> np.ndarray:
    kv = LatentKV(latent=latent.to(dtype), index=None, page_size=paged.page_size)
    absorbed = OPS.absorb(up.to(dtype), SHAPE)
    parts = [
        OPS.latent_attention(
            queries.to(dtype)[part.first : part.first + part.num_rows], absorbed, kv, part, scale=SCALE, visible=None
        )
        for part in paged.batch.segments
    ]
    return torch.cat(parts).double().numpy()


def unabsorbed(paged: Paged, latent: torch.Tensor, queries: torch.Tensor, up: torch.Tensor) -> np.ndarray:
    """Keys and values of every row and head made first, as MLA is defined; one query at a time."""
    rows, heads = latent.double().numpy(), up.double().numpy().reshape(HEADS, NOPE + VALUE, RANK)
    out = []
    for row, (request, position) in enumerate(paged.new_rows()):
        seen = rows[paged.slots[request][: position + 1]]
        for head in range(HEADS):
            keys = np.concatenate((seen[:, :RANK] @ heads[head, :NOPE].T, seen[:, RANK:]), axis=1)
            values = seen[:, :RANK] @ heads[head, NOPE:].T
            scores = keys @ queries[row, head].double().numpy() * SCALE
            weights = np.exp(scores - scores.max())
            out.append(weights / weights.sum() @ values)
    return np.array(out).reshape(-1, HEADS * VALUE)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("phase", [Phase.PREFILL, Phase.VERIFY])
def test_absorbed_attention_is_that_over_explicit_keys_and_values(phase: Phase, page_size: int) -> None:
    paged = Paged(phase, REQUESTS, page_size)
    latent, up = filled(paged, RANK + ROPE, 1), random(HEADS * (NOPE + VALUE), RANK, seed=2) / 4
    queries = random(14, HEADS, NOPE + ROPE, seed=3)
    out = attended(paged, latent, queries, up, torch.float32)
    np.testing.assert_allclose(out, unabsorbed(paged, latent, queries, up), atol=5e-6)


@pytest.mark.parametrize("starts", [[0], [17], [4, 4, 4], [0, 9, 31, 2]])
def test_decode_rows_of_any_lengths_share_a_segment(starts: list[int]) -> None:
    paged = Paged(Phase.DECODE, [(start, 1) for start in starts], 4)
    assert len(paged.batch.segments) == 1
    latent, up = filled(paged, RANK + ROPE, 1), random(HEADS * (NOPE + VALUE), RANK, seed=2) / 4
    queries = random(len(starts), HEADS, NOPE + ROPE, seed=3)
    out = attended(paged, latent, queries, up, torch.float32)
    np.testing.assert_allclose(out, unabsorbed(paged, latent, queries, up), atol=5e-6)


def test_bfloat16_differs_by_rounding_only() -> None:
    paged = Paged(Phase.VERIFY, REQUESTS, 4)
    latent, up = filled(paged, RANK + ROPE, 1).bfloat16(), (random(HEADS * (NOPE + VALUE), RANK, seed=2) / 4).bfloat16()
    queries = random(14, HEADS, NOPE + ROPE, seed=3).bfloat16()
    out = attended(paged, latent, queries, up, torch.bfloat16)
    np.testing.assert_allclose(out, unabsorbed(paged, latent, queries, up), atol=5e-2)


def test_a_selection_hides_rows_that_it_leaves_out() -> None:
    paged = Paged(Phase.VERIFY, [(6, 2)], 4)
    latent, up = filled(paged, RANK + ROPE, 1), random(HEADS * (NOPE + VALUE), RANK, seed=2) / 4
    queries = random(2, HEADS, NOPE + ROPE, seed=3)
    (segment,) = paged.batch.segments
    kv, absorbed = LatentKV(latent=latent, index=None, page_size=4), OPS.absorb(up, SHAPE)
    visible = torch.zeros(1, 2, 8, dtype=torch.bool)
    visible[0, :, 3] = True  # one row only: its value, whatever the scores
    out = OPS.latent_attention(queries, absorbed, kv, segment, scale=SCALE, visible=visible).double().numpy()
    row = latent[paged.slots[0][3], :RANK].double().numpy()
    values = up.double().numpy().reshape(HEADS, NOPE + VALUE, RANK)[:, NOPE:] @ row
    np.testing.assert_allclose(out, np.stack((values.reshape(-1),) * 2), atol=5e-6)


@pytest.mark.parametrize("turning", ["halves", "neighbours", "none"])
def test_writing_norms_the_latent_and_rotates_the_rest(turning: str) -> None:
    """Queries and latents come as parts of longer rows, as a merged projection leaves them."""
    merged, weight = random(3, HEADS * (NOPE + ROPE) + RANK + ROPE) * 2, random(RANK, seed=1)
    queries, latent = merged.split((HEADS * (NOPE + ROPE), RANK + ROPE), dim=1)
    positions, slots = torch.tensor([3, 4, 9]), torch.tensor([5, 2, 11])
    is_interleaved = turning == "neighbours"
    rope = None if turning == "none" else rope_rows(positions, ROPE, is_interleaved=is_interleaved)
    kv = LatentKV(latent=torch.zeros(12, RANK + ROPE), index=None, page_size=4)
    out = OPS.latent_write(queries, latent, weight, 1e-6, SHAPE, rope, kv, slots)

    def turned(x: np.ndarray, position: int) -> np.ndarray:
        return x if rope is None else turned64(x, position, ROPE, is_interleaved=is_interleaved)

    for row, position in enumerate(positions.tolist()):
        rank, key = latent[row, :RANK].double().numpy(), latent[row, RANK:].double().numpy()
        normed = rank / np.sqrt((rank**2).mean() + 1e-6) * weight.double().numpy()
        expected = np.concatenate((normed, turned(key, position)))
        np.testing.assert_allclose(kv.latent[slots[row]].numpy(), expected, atol=2e-5)
        heads = queries[row].double().numpy().reshape(HEADS, NOPE + ROPE)
        for head in range(HEADS):
            expected = np.concatenate((heads[head, :NOPE], turned(heads[head, NOPE:], position)))
            np.testing.assert_allclose(out[row, head].numpy(), expected, atol=2e-5)
    assert not kv.latent[[0, 1, 3, 4, 6, 7, 8, 9, 10]].any()


def test_the_query_norm_reads_a_part_of_longer_rows() -> None:
    merged, weight = random(3, 20) * 3, random(8, seed=1)
    out = OPS.query_norm(merged[:, :8], weight, 1e-5)
    rows = merged[:, :8].double().numpy()
    expected = rows / np.sqrt((rows**2).mean(axis=1, keepdims=True) + 1e-5) * weight.double().numpy()
    np.testing.assert_allclose(out.numpy(), expected, atol=1e-5)
    assert out.is_contiguous() and OPS.query_norm(merged[:, :8].bfloat16(), weight, 1e-5).dtype is torch.bfloat16


def indexer(top_k: int, *, is_interleaved: bool) -> IndexerSpec:
    rope = RopeSpec(kind=RopeKind.DEFAULT, base=10000.0, dim=ROPE, is_interleaved=is_interleaved)
    return IndexerSpec(num_heads=INDEX_HEADS, head_dim=INDEX_SIZE, top_k=top_k, rope=rope, norm_eps=1e-6, is_full=True)


def chosen_rows(visible: torch.Tensor, paged: Paged) -> list[list[int]]:
    """Positions that each row of the only segment may see."""
    flat = visible.flatten(0, 1)
    unpad = paged.batch.segments[0].unpad
    flat = flat if unpad is None else flat[unpad]
    return [row.nonzero().flatten().tolist() for row in flat]


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("top_k", [1, 6, 100])
def test_the_indexer_selects_the_rows_of_the_best_scores(top_k: int, is_interleaved: bool) -> None:
    paged, spec = Paged(Phase.VERIFY, REQUESTS, 4), indexer(top_k, is_interleaved=is_interleaved)
    rows = paged.new_rows()
    queries, keys, weights = (
        random(14, INDEX_HEADS * INDEX_SIZE),
        random(14, INDEX_SIZE, seed=1),
        random(14, INDEX_HEADS, seed=2),
    )
    norm = IndexNorm(weight=random(INDEX_SIZE, seed=3), bias=random(INDEX_SIZE, seed=4))
    positions = torch.tensor([position for _, position in rows])
    rope = rope_rows(positions, ROPE, is_interleaved=is_interleaved)
    kv = LatentKV(latent=torch.zeros(paged.num_rows, 1), index=filled(paged, INDEX_SIZE, 5), page_size=4)
    chosen = OPS.index(queries, keys, weights, norm, spec, rope, kv, paged.batch.segments, paged.batch.write_slots)
    assert kv.index is not None
    for row, (request, position) in enumerate(rows):
        key = keys[row].double().numpy()
        key = (key - key.mean()) / np.sqrt(key.var() + 1e-6) * norm.weight.double().numpy() + norm.bias.double().numpy()
        expected = turned64(key, position, ROPE, is_interleaved=is_interleaved)
        np.testing.assert_allclose(kv.index[paged.slots[request][position]].numpy(), expected, atol=2e-5)
    expected_rows = []
    for row, (request, position) in enumerate(rows):
        seen = kv.index[paged.slots[request][: position + 1]].double().numpy()
        scores = np.zeros(len(seen))
        for head in range(INDEX_HEADS):
            query = queries[row].double().numpy().reshape(INDEX_HEADS, INDEX_SIZE)[head]
            products = seen @ turned64(query, position, ROPE, is_interleaved=is_interleaved)
            scores += weights[row, head].item() * np.maximum(products, 0) / np.sqrt(INDEX_HEADS * INDEX_SIZE)
        best = sorted(range(len(seen)), key=lambda at: (-scores[at], at))[:top_k]
        expected_rows.append(sorted(best))
    assert chosen_rows(chosen.visible[0], paged) == expected_rows


def test_rows_that_score_the_same_are_taken_from_the_front() -> None:
    """Keys that no query looks at score exactly 0, all of them."""
    paged, spec = Paged(Phase.VERIFY, [(9, 2)], 4), indexer(4, is_interleaved=False)
    kv = LatentKV(latent=torch.zeros(paged.num_rows, 1), index=torch.zeros(paged.num_rows, INDEX_SIZE), page_size=4)
    norm = IndexNorm(weight=torch.zeros(INDEX_SIZE), bias=torch.zeros(INDEX_SIZE))
    rope = rope_rows(torch.tensor([9, 10]), ROPE, is_interleaved=False)
    queries, keys, weights = random(2, INDEX_HEADS * INDEX_SIZE), random(2, INDEX_SIZE), random(2, INDEX_HEADS)
    chosen = OPS.index(queries, keys, weights, norm, spec, rope, kv, paged.batch.segments, paged.batch.write_slots)
    assert chosen_rows(chosen.visible[0], paged) == [[0, 1, 2, 3]] * 2


def test_a_layer_without_index_keys_cannot_select() -> None:
    paged, spec = Paged(Phase.VERIFY, [(0, 1)], 4), indexer(4, is_interleaved=False)
    kv = LatentKV(latent=torch.zeros(paged.num_rows, 1), index=None, page_size=4)
    norm = IndexNorm(weight=torch.zeros(INDEX_SIZE), bias=torch.zeros(INDEX_SIZE))
    rope = rope_rows(torch.tensor([0]), ROPE, is_interleaved=False)
    with pytest.raises(ValueError, match="no cache of index keys"):
        OPS.index(
            random(1, INDEX_HEADS * INDEX_SIZE), random(1, INDEX_SIZE), random(1, INDEX_HEADS), norm, spec, rope, kv,
            paged.batch.segments, paged.batch.write_slots,
        )  # fmt: skip
