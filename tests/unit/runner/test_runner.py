"""A runner tells the truth about itself, and a row's logits do not depend on how its request was cut into forwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from proa.loading.build import build
from proa.loading.progress import Silent
from proa.runner.describe import promised
from proa.runner.runner import Runner
from proa.units import DType, Phase
from tests.factories.checkpoints import FAMILIES
from tests.factories.headers import planned
from tests.factories.runners import Rows, built_runner, runner_of

PROMPT = [(7 * i * i + 3) % 512 for i in range(40)]


@pytest.mark.parametrize("asks", [{}, {"dtype": "bfloat16", "page_size": 4}, {"kv_dtype": "bfloat16"}])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_built_runner_is_what_its_plan_promised(
    family: str, asks: dict[str, object], tiny: Callable[..., Path]
) -> None:
    plan = planned(tiny(family), **asks).target
    runner = built_runner(plan, num_pages=9)
    assert runner.describe() == promised(plan.plan, plan.spec, plan.parameters, 9)


def test_a_runner_that_was_built_differently_does_not_pass_for_its_plan(tiny: Callable[..., Path]) -> None:
    """The reverse: build with another cache type than the plan's, and the description says so."""
    plan = planned(tiny("llama")).target
    built = build(plan, Silent(), None, None)
    other = replace(plan.plan, kv_dtype=replace(plan.plan.kv_dtype, value=DType.BF16))
    said = Runner(other, plan.spec, built.model, built.ledger, 9, gives_hidden=False).describe()
    expected = promised(plan.plan, plan.spec, plan.parameters, 9)
    assert {key for key in said if said[key] != expected[key]} == {"kv_dtype", "kv_bytes"}


def test_calls_are_counted_per_phase(tiny: Callable[..., Path]) -> None:
    runner = runner_of(tiny("llama"))
    rows = Rows(runner, 2, 64)
    rows.prefill(0, PROMPT)
    rows.prefill(1, PROMPT[:3])
    rows.decode([1, 2])
    calls = runner.kernel_calls()
    assert calls["attention.prefill/reference"] == 2 * 3
    assert calls["attention.decode/reference"] == 3
    assert "attention.verify/reference" not in calls


@pytest.mark.parametrize("chunk", [1, 7, 39])
def test_a_prompt_in_chunks_gives_the_logits_of_the_whole(chunk: int, tiny: Callable[..., Path]) -> None:
    runner = runner_of(tiny("mistral", sliding_window=9), page_size=4)
    rows = Rows(runner, 2, 64)
    whole = rows.prefill(0, PROMPT)
    parts = [rows.prefill(1, PROMPT[at : at + chunk]) for at in range(0, len(PROMPT), chunk)]
    torch.testing.assert_close(torch.cat(parts), whole, atol=1e-4, rtol=1e-4)


def test_verify_rows_give_the_logits_of_decoding_one_by_one(tiny: Callable[..., Path]) -> None:
    runner = runner_of(tiny("qwen3"))
    rows = Rows(runner, 4, 64)
    for request in range(4):
        rows.prefill(request, PROMPT[: 20 + request % 2])
    single = torch.cat([rows.decode([token] * 4)[:2] for token in (5, 9, 3)])
    rows.lengths = [20, 21, 20, 21]
    spans = [rows.span(2, Phase.VERIFY, [5, 9, 3]), rows.span(3, Phase.VERIFY, [5, 9])]
    verified = runner.forward(spans).logits
    torch.testing.assert_close(verified[:3], single[0::2], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(verified[3:], single[1::2][:2], atol=1e-4, rtol=1e-4)


def test_all_phases_share_one_forward(tiny: Callable[..., Path]) -> None:
    runner = runner_of(tiny("llama"))
    rows = Rows(runner, 6, 64)
    alone = [rows.prefill(0, PROMPT), rows.prefill(1, PROMPT[:9])]
    rows.prefill(2, PROMPT[:8])
    rows.prefill(3, PROMPT[:6])
    mixed = runner.forward(
        [
            rows.span(4, Phase.PREFILL, PROMPT, [39]),
            rows.span(2, Phase.DECODE, PROMPT[8:9]),
            rows.span(3, Phase.VERIFY, PROMPT[6:9]),
            rows.span(5, Phase.PREFILL, PROMPT[:4], []),
        ]
    ).logits
    expected = torch.cat((alone[0][39:], alone[1][8:], alone[1][6:9]))
    torch.testing.assert_close(mixed, expected, atol=1e-4, rtol=1e-4)


def test_rows_that_want_no_logits_give_none(tiny: Callable[..., Path]) -> None:
    runner = runner_of(tiny("llama"))
    rows = Rows(runner, 1, 64)
    assert runner.forward([rows.span(0, Phase.PREFILL, PROMPT, [])]).logits.shape == (0, 512)


def test_what_another_request_left_in_the_cache_does_not_matter(tiny: Callable[..., Path]) -> None:
    runner = runner_of(tiny("llama"))
    rows = Rows(runner, 3, 64)
    clean = rows.prefill(0, PROMPT)
    for tensor in runner._kv.tensors():
        tensor.fill_(float("nan"))
    assert torch.equal(rows.prefill(1, PROMPT), clean)
    rows.prefill(2, PROMPT[:5])
    rows.lengths[0] = 0
    rows.prefill(0, PROMPT)
    assert not rows.decode([1, 1, 1]).isnan().any()


def test_two_runners_of_one_checkpoint_agree_bit_for_bit(tiny: Callable[..., Path]) -> None:
    first, second = (runner_of(tiny("qwen2")) for _ in range(2))
    assert torch.equal(Rows(first, 1, 64).prefill(0, PROMPT), Rows(second, 1, 64).prefill(0, PROMPT))
    assert first.kernel_calls() == second.kernel_calls()


def test_a_runner_gives_hidden_rows_only_if_it_was_built_to(tiny: Callable[..., Path]) -> None:
    plan = planned(tiny("llama")).target
    giving, plain = built_runner(plan, gives_hidden=True), built_runner(plan)
    outputs = [
        runner.forward([Rows(runner, 1, 64).span(0, Phase.PREFILL, PROMPT, [39, 3])]) for runner in (giving, plain)
    ]
    assert outputs[0].hidden is not None and outputs[0].hidden.shape == (40, plan.spec.hidden)
    assert outputs[1].hidden is None and torch.equal(outputs[0].logits, outputs[1].logits)
    head = giving._model.output_head
    torch.testing.assert_close(head(outputs[0].hidden[[39, 3]]), outputs[0].logits)
