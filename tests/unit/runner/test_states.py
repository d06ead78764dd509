"""Runners of hybrids: they are what their plan promised; rollback leaves the bits of plain decoding; prompts are cut at
blocks; snapshots continue as their prompt would have; recorded forwards are the layers'."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from proa.arch.delta_blocks import BLOCK
from proa.cache.state_values import StateRoom
from proa.cache.transaction import CacheTransaction
from proa.loading.build import build, construct
from proa.loading.progress import Silent
from proa.runner.batch import RowSpan
from proa.runner.describe import promised
from proa.runner.recorded import RecordedForward
from proa.runner.runner import Runner
from proa.units import DType, Numerics, Phase, Rollback
from tests.factories.headers import planned
from tests.factories.hybrid_checkpoints import HYBRID_FAMILIES
from tests.factories.hybrid_runners import (
    KEPT_ROWS,
    PAGES,
    SLOTS,
    Rows,
    Served,
    hybrid_plan,
    hybrid_runner,
    same,
    write_tiny_hybrid,
)
from tests.factories.native import probed, why_not
from tests.factories.runners import runner_of

FOUND = probed()
WHY_NOT = why_not(FOUND)
native = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
SOME = ("qwen3_5_text", "kimi_linear")
TEXT = torch.randint(10, 500, (4, 400), generator=torch.Generator().manual_seed(0)).tolist()
WRONG = [7] * 16

Write = Callable[..., Path]


@pytest.fixture(scope="session")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Write:
    """`hybrid("kimi_linear")`: a checkpoint, written once."""
    root = tmp_path_factory.mktemp("hybrid")
    return lambda family: write_tiny_hybrid(family, root / family)


@pytest.fixture(scope="module", params=[(f, d) for f in SOME for d in ("float32", "bfloat16")], ids="-".join)
def exact(request: pytest.FixtureRequest, hybrid: Write) -> Callable[[Rollback], Runner]:
    """Native runners by rollback: a row's bits depend on its request alone."""
    if WHY_NOT is not None:
        pytest.skip(WHY_NOT)
    family, dtype = request.param
    plan = hybrid_plan(hybrid(family), "native", dtype=dtype)
    assert plan.plan.numerics.value is Numerics.EXACT
    return {rollback: hybrid_runner(plan, rollback) for rollback in Rollback}.__getitem__


# What was built


@pytest.mark.parametrize("rollback", Rollback)
@pytest.mark.parametrize("family", HYBRID_FAMILIES)
def test_a_built_runner_is_what_its_plan_promised(family: str, rollback: Rollback, hybrid: Write) -> None:
    plan = hybrid_plan(hybrid(family), "torch", dtype="bfloat16")
    said = hybrid_runner(plan, rollback).describe()
    room = StateRoom(slots=SLOTS, kept_rows=KEPT_ROWS if rollback is Rollback.REPLAY else 0)
    assert said == promised(plan.plan, plan.spec, plan.parameters, PAGES, room)
    assert said["linear_attention.verify"] == "torch"
    assert said["states"]["dtypes"] == {"conv": "torch.bfloat16", "delta": "torch.float32"}
    table = {name: info.shape for name, info in plan.parameters.items()}
    assert {name: tuple(p.shape) for name, p in construct(plan, None, None).named_parameters()} == table


def test_a_runner_with_other_kernels_or_slots_does_not_pass_for_its_plan(hybrid: Write) -> None:
    plan, other = (hybrid_plan(hybrid("qwen3_5_text"), name, dtype="float32") for name in ("torch", "reference"))
    said = hybrid_runner(other, Rollback.REPLAY).describe()
    expected = promised(plan.plan, plan.spec, plan.parameters, PAGES, StateRoom(slots=SLOTS, kept_rows=1))
    wrong = {key for key in said if said[key] != expected[key]}
    assert wrong == {*(f"linear_attention.{phase.value}" for phase in Phase), "states"}


def test_states_need_room_and_only_models_with_states_have_any(hybrid: Write, tiny: Write) -> None:
    for path, room in ((hybrid("qwen3_5_text"), None), (tiny("llama"), StateRoom(slots=4, kept_rows=0))):
        plan = planned(path).target
        built = build(plan, Silent(), None, None)
        with pytest.raises(TypeError, match="delta layers was given"):
            Runner(plan.plan, plan.spec, built.model, built.ledger, 9, gives_hidden=False, room=room)


def test_f31_a_plan_that_names_no_kernel_builds_no_linear_attention(hybrid: Write, tiny: Write) -> None:
    plan, dense = planned(hybrid("qwen3_5_text")).target, planned(tiny("llama")).target
    without = replace(plan, plan=replace(plan.plan, linear_attention=dense.plan.linear_attention))
    with pytest.raises(TypeError, match="its plan has no kernel for prefill, decode, verify"):
        construct(without, None, None)


def test_participants_are_the_tables_that_a_step_writes(hybrid: Write, tiny: Write) -> None:
    runner = hybrid_runner(hybrid_plan(hybrid("qwen3_5_text"), "torch"), Rollback.REPLAY)
    assert runner.participants == (runner.tables, runner.states)
    dense = runner_of(tiny("llama"))
    assert dense.states is None and dense.participants == (dense.tables,)


def test_calls_are_counted_by_phase_and_kernel(hybrid: Write) -> None:
    plan = planned(
        hybrid("qwen3_5_text"), linear_attention_prefill="torch", linear_attention_decode="reference",
        linear_attention_verify="torch",
    ).target  # fmt: skip
    served = Served(hybrid_runner(plan, Rollback.REPLAY))
    served.prefill(1, TEXT[0][:9])
    served.decode(1, TEXT[0][9:11])
    served.verify(1, TEXT[0][11:15], 2)
    served.verify(1, TEXT[0][13:15], 2)
    calls = {op: count for op, count in served.runner.kernel_calls().items() if op.startswith("delta.")}
    assert calls == {
        "delta.prefill/torch": 3,
        "delta.decode/reference": 6,
        "delta.verify/torch": 6,
        "delta.replay/reference": 3,
    }


# Exactness of rollback


@pytest.mark.parametrize("rollback", Rollback)
@pytest.mark.parametrize("accepted", range(6))
def test_after_any_accepted_count_state_and_next_logits_are_those_of_plain_decoding(
    exact: Callable[[Rollback], Runner], rollback: Rollback, accepted: int
) -> None:
    runner, text = exact(rollback), TEXT[0]
    plain, speculative = Served(runner), Served(runner)
    logits = []
    for request, served in ((1, plain), (2, speculative)):
        served.prefill(request, text[:70])
    one_by_one = plain.decode(1, text[70 : 70 + accepted])
    rows = speculative.verify(2, [*text[70 : 70 + accepted], *WRONG[: 5 - accepted]], accepted)
    assert torch.equal(rows[:accepted], one_by_one)
    assert same(speculative.state(2), plain.state(1))
    speculative.spoil_unowned()
    for request in (1, 2):
        logits.append(plain.decode(request, text[100:103]))
    assert torch.equal(*logits)
    assert same(speculative.state(2), plain.state(1))
    for request in (1, 2):
        plain.release(request)


@pytest.mark.parametrize("rollback", Rollback)
def test_random_acceptance_over_two_hundred_tokens_is_plain_decoding(
    exact: Callable[[Rollback], Runner], rollback: Rollback
) -> None:
    """Runs of 200 tokens, until 300 proposals of random lengths were judged; two requests at once, of which one decodes
    plainly in between."""
    runner, patterns, seed = exact(rollback), 0, 0
    served = Served(runner)
    for request in (1, 2):
        served.prefill(request, TEXT[request][:66])
    expected = [torch.cat([served.decode(r, TEXT[r][66:266])]) for r in (1, 2)]
    states = [served.state(r) for r in (1, 2)]
    for request in (1, 2):
        served.release(request)
    while patterns < 300:
        patterns += _run_of_200(served, random.Random(seed), expected, states)
        seed += 1


def _run_of_200(
    served: Served, choose: random.Random, expected: list[torch.Tensor], states: list[list[torch.Tensor]]
) -> int:
    """How many proposals were judged. Every accepted row's logits are compared, and the last states."""
    for request in (1, 2):
        served.prefill(request, TEXT[request][:66])
    at, patterns = {1: 0, 2: 0}, 0
    while min(at.values()) < 200:
        wanted: dict[int, Rows] = {}
        for request, done in at.items():
            text = TEXT[request][66 + done : 266]
            if not text:
                continue
            accepted, extra = min(choose.randint(1, 7), len(text)), choose.randint(0, 3)
            if choose.random() < 0.15:
                wanted[request] = Rows(phase=Phase.DECODE, tokens=text[:1])
            else:
                wanted[request] = Rows(phase=Phase.VERIFY, tokens=text[:accepted] + WRONG[:extra], keep=accepted)
                patterns += 1
        served.spoil_unowned()
        for (request, rows), logits in zip(wanted.items(), served.step(wanted), strict=True):
            kept = len(rows.tokens) if rows.keep is None else rows.keep
            assert torch.equal(logits[:kept], expected[request - 1][at[request] : at[request] + kept])
            at[request] += kept
    for request in (1, 2):
        assert same(served.state(request), states[request - 1])
        served.release(request)
    assert served.states.free_slots == SLOTS
    return patterns


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("family", SOME)
def test_other_kernels_roll_back_to_the_bits_of_the_verified_rows(family: str, backend: str, hybrid: Write) -> None:
    """Their products of many rows are not those of one, so plain decoding is met within rounding; but a replay leaves
    what the forward itself left after that row."""
    plan = hybrid_plan(hybrid(family), backend, dtype="float32")
    runners = {rollback: hybrid_runner(plan, rollback) for rollback in Rollback}
    text = TEXT[3]
    for accepted in range(1, 5):
        left = []
        for runner in runners.values():
            served = Served(runner)
            served.prefill(1, text[:70])
            served.verify(1, [*text[70 : 70 + accepted], *WRONG[: 5 - accepted]], accepted)
            left.append([*served.state(1), served.decode(1, text[70 + accepted : 72 + accepted])])
            served.release(1)
        assert same(*left)
        served = Served(runners[Rollback.REPLAY])
        served.prefill(1, text[:70])
        served.decode(1, text[70 : 70 + accepted])
        plain = [*served.state(1), served.decode(1, text[70 + accepted : 72 + accepted])]
        served.release(1)
        for ours, expected in zip(left[0], plain, strict=True):
            torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("rollback", Rollback)
@pytest.mark.parametrize("moment", ["forward", "commit", "replay"])
def test_a_step_that_fails_is_as_if_it_had_not_begun(
    exact: Callable[[Rollback], Runner], rollback: Rollback, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    served, text = Served(exact(rollback)), TEXT[0]
    served.prefill(1, text[:70])
    served.decode(1, text[70:72])
    before = served.state(1)

    def fail(*args: object) -> None:
        raise RuntimeError("it broke")

    with monkeypatch.context() as patch:
        if moment == "forward":
            patch.setattr(served.runner, "_forward", fail)
        if moment == "replay":
            patch.setattr(served.states, "_replay", fail)
        try:
            rows = Rows(phase=Phase.VERIFY, tokens=text[72:76], keep=2)
            served.step({1: rows}, before_commit=fail if moment == "commit" else lambda: None)
        except RuntimeError as error:
            assert "it broke" in str(error)
        else:
            assert (moment, rollback) == ("replay", Rollback.STATES)  # which has nothing to replay
            served.release(1)
            return
    served.states.check()
    assert same(served.state(1), before) and served.tables.length(1) == served.states.length(1) == 72
    again = served.verify(1, text[72:76], 2)
    served.release(1)
    served.prefill(1, text[:70])
    assert torch.equal(served.decode(1, text[70:76])[2:4], again[:2])
    served.release(1)


@pytest.mark.parametrize("rollback", Rollback)
def test_a_chain_of_decodes_in_one_step_rolls_back_to_any_of_them(
    exact: Callable[[Rollback], Runner], rollback: Rollback
) -> None:
    """As a draft of this kind works: one row after the other, and only the verdict says how many stay."""
    served, text = Served(exact(rollback)), TEXT[0]
    for kept in range(1, 5):
        served.prefill(1, text[:70])
        with CacheTransaction(served.runner.participants) as transaction:
            for row, token in enumerate([*text[70 : 70 + kept], *WRONG[: 4 - kept]]):
                served.tables.reserve(1, row + 1)
                state = served.states.extend(1, 1, is_revocable=True)
                pages = served.tables.pages(1)
                served.runner.forward(
                    [RowSpan(phase=Phase.DECODE, tokens=[token], start=70 + row, pages=pages, logits=(), state=state)]
                )
            transaction.commit({1: kept})
        served.prefill(2, text[:70])
        served.decode(2, text[70 : 70 + kept])
        assert same(served.state(1), served.state(2))
        for request in (1, 2):
            served.release(request)


# Prompts


@pytest.mark.parametrize("cuts", [[BLOCK], [BLOCK, 2 * BLOCK], [2 * BLOCK]])
def test_a_prompt_cut_at_blocks_gives_the_bits_of_the_whole(
    exact: Callable[[Rollback], Runner], cuts: list[int]
) -> None:
    served, prompt = Served(exact(Rollback.REPLAY)), TEXT[0][: 2 * BLOCK + 9]
    whole = served.prefill(1, prompt)
    parts = [served.prefill(2, prompt[a:b]) for a, b in zip([0, *cuts], [*cuts, len(prompt)], strict=True) if a < b]
    assert torch.equal(torch.cat(parts), whole)
    assert same(served.state(1), served.state(2))
    for request in (1, 2):
        served.release(request)


def test_prefills_beside_decoding_and_verified_rows_are_those_alone(exact: Callable[[Rollback], Runner]) -> None:
    served = Served(exact(Rollback.REPLAY))
    alone = [served.prefill(1, TEXT[1][:BLOCK]), served.decode(1, TEXT[1][BLOCK : BLOCK + 3])]
    served.release(1)
    for request in (1, 2):
        served.prefill(request, TEXT[1][:BLOCK])
    mixed = served.step(
        {
            3: Rows(phase=Phase.PREFILL, tokens=TEXT[1][:BLOCK]),
            1: Rows(phase=Phase.DECODE, tokens=TEXT[1][BLOCK : BLOCK + 1]),
            2: Rows(phase=Phase.VERIFY, tokens=TEXT[1][BLOCK : BLOCK + 3], keep=2),
            4: Rows(phase=Phase.PREFILL, tokens=TEXT[2][:5]),
        }
    )
    assert torch.equal(mixed[0], alone[0])
    assert torch.equal(mixed[1], alone[1][:1])
    assert torch.equal(mixed[2], alone[1])
    for request in range(1, 5):
        served.release(request)


@pytest.mark.parametrize("start", [1, BLOCK - 1, BLOCK + 1])
def test_a_prompt_that_is_cut_elsewhere_is_refused(start: int, hybrid: Write) -> None:
    served = Served(hybrid_runner(hybrid_plan(hybrid("kimi_linear"), "torch"), Rollback.REPLAY))
    served.prefill(1, TEXT[0][:start])
    with pytest.raises(RuntimeError, match=rf"a prefill begins at row {start}: .* cut at multiples of 64 only"):
        served.prefill(1, TEXT[0][start:80])
    assert served.states.length(1) == start
    served.decode(1, TEXT[0][start : start + 1])


def test_rows_with_states_are_for_models_that_have_them(hybrid: Write, tiny: Write) -> None:
    served = Served(hybrid_runner(hybrid_plan(hybrid("kimi_linear"), "torch"), Rollback.REPLAY))
    bare = RowSpan(phase=Phase.PREFILL, tokens=[1, 2], start=0, pages=[0], logits=())
    with pytest.raises(RuntimeError, match="without states"):
        served.runner.forward([bare])
    with CacheTransaction(served.runner.participants) as transaction:
        state = served.states.extend(1, 2, is_revocable=False)
        with pytest.raises(RuntimeError, match="with states"):
            runner_of(tiny("llama")).forward([replace(bare, state=state)])
        with pytest.raises(ValueError, match="do not match its rows"):
            served.runner.forward([replace(bare, tokens=[1], state=state)])
        transaction.rollback()


# Snapshots


@pytest.mark.parametrize("tail", [1, 5, 12, BLOCK + 3])
def test_a_request_that_begins_with_a_snapshot_goes_on_as_its_prompt_would_have(
    exact: Callable[[Rollback], Runner], tail: int
) -> None:
    served, prompt = Served(exact(Rollback.REPLAY)), TEXT[0][: 2 * BLOCK + tail]
    served.prefill(1, TEXT[0][: 2 * BLOCK + 7], snapshots=[BLOCK, 2 * BLOCK])
    made = served.states.take_snapshots(1)
    assert [one.rows for one in made] == [BLOCK, 2 * BLOCK]
    served.decode(1, TEXT[3][:4])
    cold = served.prefill(2, prompt)
    for request, snapshot in enumerate(made, start=3):
        served.resume(request, 1, snapshot)
        served.spoil_unowned()
        warm = served.prefill(request, prompt[snapshot.rows :])
        assert torch.equal(warm, cold[snapshot.rows :])
        assert same(served.state(request), served.state(2))
    for request in (1, 2, 3, 4):
        served.release(request)
    for snapshot in made:
        served.states.drop(snapshot)
    assert served.states.free_slots == SLOTS


# Recording


@native
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", HYBRID_FAMILIES)
def test_a_recorded_forward_is_that_of_the_layers(family: str, dtype: str, hybrid: Write) -> None:
    plan = hybrid_plan(hybrid(family), "native", dtype=dtype)
    recorded, layers = (hybrid_runner(plan, Rollback.REPLAY, gives_hidden=True) for _ in range(2))
    assert isinstance(recorded._forward, RecordedForward)
    layers._forward = partial(layers._model, kv=layers._kv.layers)
    results = []
    for served in (Served(recorded), Served(layers)):
        logits = [served.prefill(1, TEXT[0][:70]), served.prefill(2, TEXT[1][:3])]
        logits += served.step(
            {
                1: Rows(phase=Phase.DECODE, tokens=[5]),
                3: Rows(phase=Phase.PREFILL, tokens=TEXT[2][:150]),
                2: Rows(phase=Phase.VERIFY, tokens=[6, 7, 8], keep=2),
            }
        )
        logits.append(served.decode(2, [9]))
        results.append([*logits, *(part for request in (1, 2, 3) for part in served.state(request))])
    assert same(*results)
    assert recorded.kernel_calls() == layers.kernel_calls()


@native
def test_a_snapshots_dtype_is_that_of_the_delta_states(hybrid: Write) -> None:
    served = Served(hybrid_runner(hybrid_plan(hybrid("kimi_linear"), "native", dtype="bfloat16"), Rollback.REPLAY))
    served.prefill(1, TEXT[0][:BLOCK], snapshots=[BLOCK])
    assert [one.dtype for one in served.states.take_snapshots(1)] == [DType.F32]
