"""With native kernels a row's logits are bit-equal whatever else is in the batch, however the prompt is cut, for whole
models of every family in both types."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from proa.runner.batch import RowSpan
from proa.runner.runner import Runner
from proa.units import Numerics, Phase
from tests.factories.native import native_runner, probed, why_not

FOUND = probed()
WHY_NOT = why_not(FOUND)
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

TOKENS = torch.randint(10, 500, (3, 90), generator=torch.Generator().manual_seed(0)).tolist()
FAMILIES = ("llama", "qwen2", "qwen3", "mistral")


@pytest.fixture(scope="module", params=[(f, d) for f in FAMILIES for d in ("float32", "bfloat16")], ids="-".join)
def runner(request: pytest.FixtureRequest, tiny: Callable[..., Path]) -> Runner:
    family, dtype = request.param
    extra = {"sliding_window": 24} if family == "mistral" else {}
    return native_runner(tiny(family, **extra), FOUND, dtype=dtype)


def cut(runner: Runner, cuts: list[list[int]]) -> list[torch.Tensor]:
    """Logits of all rows; forward i computes the next `cuts[r][i]` rows of each request r, all in one batch."""
    size = runner.plan.page_size.value
    per_request = -(-90 // size)
    at, logits = [0] * len(cuts), [[] for _ in cuts]
    for step in range(max(map(len, cuts))):
        live = [r for r, sizes in enumerate(cuts) if step < len(sizes)]
        spans = []
        for r in live:
            tokens = TOKENS[r][at[r] : at[r] + cuts[r][step]]
            phase = Phase.DECODE if len(tokens) == 1 else (Phase.VERIFY, Phase.PREFILL)[len(tokens) > 8]
            pages = list(range(r * per_request, (r + 1) * per_request))[::-1]
            spans.append(RowSpan(phase=phase, tokens=tokens, start=at[r], pages=pages, logits=range(len(tokens))))
            at[r] += len(tokens)
        out = runner.forward(spans).logits
        for r, rows in zip(live, out.split([len(span.tokens) for span in spans]), strict=True):
            logits[r].append(rows)
    return [torch.cat(rows) for rows in logits]


def pieces(length: int) -> st.SearchStrategy[list[int]]:
    """Cuts of `length` rows into chunks of 1 to 40."""
    return st.lists(st.integers(1, 40), min_size=length, max_size=length).map(lambda sizes: trimmed(sizes, length))


def trimmed(sizes: list[int], length: int) -> list[int]:
    out: list[int] = []
    for size in sizes:
        if sum(out) >= length:
            break
        out.append(min(size, length - sum(out)))
    return out


def test_the_plan_says_exact(runner: Runner) -> None:
    assert runner.plan.numerics.value is Numerics.EXACT
    assert runner.describe()["matmul_kernel"] == "native"


@given(cuts=st.lists(pieces(90), min_size=1, max_size=3))
@settings(max_examples=12, deadline=None)
def test_logits_are_the_same_bits_in_every_batch_and_cutting(runner: Runner, cuts: list[list[int]]) -> None:
    together = cut(runner, cuts)
    for request, logits in enumerate(together):
        alone = [[1]] * request + [[90]]
        assert torch.equal(cut(runner, alone)[request], logits)
