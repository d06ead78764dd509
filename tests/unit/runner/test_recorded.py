"""A recorded forward gives what the layers give; hidden rows of it are a copy; drafts that borrow are not recorded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from proa.arch.decoder import Borrow
from proa.cache.kv import KVCache
from proa.kernels.bind import bind
from proa.kernels.kernel_set import KernelNames
from proa.loading.build import build
from proa.loading.progress import Silent
from proa.runner.recorded import RecordedForward
from proa.units import Phase
from tests.factories.mla_checkpoints import write_mla
from tests.factories.native import native_plan, native_runner, probed, why_not
from tests.factories.runners import Rows

FOUND = probed()
WHY_NOT = why_not(FOUND)
native = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
PROMPT = [(7 * i * i + 3) % 512 for i in range(90)]


@native
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_hidden_rows_of_a_program_are_those_of_the_layers(dtype: str, tiny: Callable[..., Path]) -> None:
    runner = native_runner(tiny("llama"), FOUND, gives_hidden=True, dtype=dtype)
    recorded, rows = runner._forward, Rows(runner, 2, 128)
    assert isinstance(recorded, RecordedForward)
    outputs = [runner.forward([rows.span(0, Phase.PREFILL, PROMPT[:count], [0, count - 1])]) for count in (9, 80)]
    runner._forward = lambda batch: runner._model(batch, runner._kv.layers)
    rows.lengths[0] = 0
    for output, count in zip(outputs, (9, 80), strict=True):
        layers = runner.forward([rows.span(0, Phase.PREFILL, PROMPT[:count], [0, count - 1])])
        assert output.hidden is not None and layers.hidden is not None
        assert torch.equal(output.hidden, layers.hidden) and torch.equal(output.logits, layers.logits)


@native
def test_hidden_rows_outlive_the_next_forward(tiny: Callable[..., Path]) -> None:
    runner = native_runner(tiny("llama"), FOUND, gives_hidden=True, dtype="float32")
    rows = Rows(runner, 1, 128)
    first = runner.forward([rows.span(0, Phase.PREFILL, PROMPT[:5])]).hidden
    assert first is not None
    before = first.clone()
    runner.forward([rows.span(0, Phase.PREFILL, PROMPT[5:40])])
    assert torch.equal(first, before)


@native
def test_a_draft_that_borrows_or_reads_hidden_rows_is_not_recorded(tiny: Callable[..., Path]) -> None:
    plan = native_plan(tiny("llama"), FOUND, dtype="float32")
    model = build(plan, Silent(), FOUND.library, None).model
    mixers = [layer.mixer for layer in plan.spec.layers]
    kv = KVCache(mixers, num_pages=4, page_size=16, dtype=torch.float32, device="cpu").layers
    assert RecordedForward(model, plan.spec, kv, gives_hidden=False).is_possible
    borrower = replace(plan.spec, borrows=(Borrow.HEAD,))
    assert not RecordedForward(model, borrower, kv, gives_hidden=False).is_possible


@native
def test_an_op_outside_of_the_recording_makes_it_impossible() -> None:
    """A program that left an op out would give its first result again and again."""
    names = KernelNames(
        matmul="native", attention={Phase.DECODE: "native"}, is_latent=False, delta={}, moe=None, sampling="reference"
    )
    kernels = bind(names, FOUND.library)
    x, weight = torch.ones(4, 16), torch.ones(16)
    assert kernels.record(4, lambda: kernels.norm(x, weight, 1e-6, torch.float32)) is not None

    def with_reference_op() -> None:
        kernels.norm(x, weight, 1e-6, torch.float32)
        kernels.calls["scale_queries", "reference"] += 1

    assert kernels.record(4, with_reference_op) is None
    assert not kernels.calls


def test_a_backend_without_a_sink_cannot_be_recorded() -> None:
    names = KernelNames(
        matmul="reference",
        attention={Phase.DECODE: "reference"},
        is_latent=False,
        delta={},
        moe=None,
        sampling="reference",
    )
    assert bind(names, None).record(4, lambda: None) is None


@native
@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa", "mistral4"])
def test_models_with_an_indexer_or_scaled_queries_are_recorded(family: str, tmp_path: Path) -> None:
    runner = native_runner(write_mla(family, tmp_path), FOUND, dtype="bfloat16")
    recorded, rows = runner._forward, Rows(runner, 2, 128)
    assert isinstance(recorded, RecordedForward)
    outputs = [runner.forward([rows.span(0, Phase.PREFILL, PROMPT[:count])]).logits for count in (9, 80)]
    runner._forward = lambda batch: runner._model(batch, runner._kv.layers)
    rows.lengths[0] = 0
    for output, count in zip(outputs, (9, 80), strict=True):
        assert torch.equal(output, runner.forward([rows.span(0, Phase.PREFILL, PROMPT[:count])]).logits)
