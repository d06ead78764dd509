"""Native routing and experts against their definitions in float64, for ragged counts and both types.

And the rules of a router: every choice is a total order; a row's bits do not depend on the rows beside it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch

from proa.arch.blocks import SILU, ActivationSpec, GroupScore, RouterSpec, Score
from proa.kernels.native.abi import load_library
from proa.kernels.native.moe import NativeMoE
from proa.kernels.native.ops import NativeDense
from proa.kernels.native.sink import Direct, Program, Recorder
from proa.kernels.reference.moe import ReferenceMoE
from proa.kernels.seam import Routed
from tests.factories.native import probed, why_not

FOUND = probed()
WHY_NOT = why_not(FOUND)
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

DTYPES = (torch.float32, torch.bfloat16)
# float32: sums in another order. bfloat16: inputs are rounded before both computations; gate and up, their product, an
# expert's result and the output are each rounded once (2^-9), and errors of one step pass through the next product.
BOUND = {torch.float32: 1e-5, torch.bfloat16: 2**-6}
PLAIN = RouterSpec(
    score=Score.SOFTMAX,
    has_bias=False,
    num_groups=1,
    top_groups=1,
    group_score=GroupScore.NONE,
    renormalise=True,
    scale=1.0,
)
HIDDEN, WIDTH, SLOTS = 48, 32, 11


@pytest.fixture(scope="module")
def ops() -> NativeMoE:
    library = load_library(FOUND.library)
    return NativeMoE(library, Direct(library))


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + 7 * len(shape)))


def spec_with(**changes: object) -> RouterSpec:
    fields = {name: getattr(PLAIN, name) for name in PLAIN.__slots__}
    return RouterSpec(**(fields | changes))  # type: ignore[arg-type]  # values of the fields' own types


def expected_route(
    logits: torch.Tensor, bias: torch.Tensor | None, spec: RouterSpec, top_k: int
) -> tuple[list[list[int]], torch.Tensor]:
    """One row at a time in float64, by sorting (choice, index) pairs."""
    slots, weights = [], []
    for row in logits.double():
        scores = {
            Score.SOFTMAX: row.softmax(0),
            Score.SIGMOID: 1 / (1 + (-row).exp()),
            Score.SQRT_SOFTPLUS: (1 + row.exp()).log().sqrt(),
        }[spec.score]
        choice = (scores if bias is None else scores + bias.double()).tolist()
        allowed = range(len(choice))
        if spec.group_score is not GroupScore.NONE:
            size = len(choice) // spec.num_groups
            counted = 1 if spec.group_score is GroupScore.MAX else 2
            worth = [sum(sorted(choice[g * size : (g + 1) * size])[-counted:]) for g in range(spec.num_groups)]
            best = sorted(range(spec.num_groups), key=lambda g: (-worth[g], g))[: spec.top_groups]
            allowed = [e for e in allowed if e // size in best]
        chosen = sorted(allowed, key=lambda e: (-choice[e], e))[:top_k]
        taken = scores[chosen]
        slots.append(chosen)
        weights.append((taken / taken.sum() if spec.renormalise else taken) * spec.scale)
    return slots, torch.stack(weights)


ROUTERS = [
    (8, 2, {}),
    (33, 4, {"renormalise": False}),
    (16, 1, {"scale": 16.0}),
    (64, 6, {"num_groups": 8, "top_groups": 3, "group_score": GroupScore.MAX, "renormalise": False, "scale": 16.0}),
    (40, 8, {"score": Score.SIGMOID, "scale": 2.5}),
    (48, 4, {"score": Score.SIGMOID, "num_groups": 4, "top_groups": 2, "group_score": GroupScore.TOP2_SUM}),
    (24, 3, {"score": Score.SQRT_SOFTPLUS, "scale": 1.5}),
]


@pytest.mark.parametrize(("experts", "top_k", "changes"), ROUTERS)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_takes_its_best_experts_with_their_scores(
    ops: NativeMoE, experts: int, top_k: int, changes: dict[str, object], has_bias: bool, dtype: torch.dtype
) -> None:
    spec = spec_with(has_bias=has_bias, **changes)
    weight, x = (values(experts, HIDDEN, seed=1) / 4).to(dtype), values(40, HIDDEN).to(dtype)
    bias = values(experts, seed=3) / 8 if has_bias else None
    slots, weights = expected_route(x.double() @ weight.double().T, bias, spec, top_k)
    routed = ops.route(x, ops.pack_router(weight, bias), spec, top_k, (), 1.0, None)
    assert routed.slots.tolist() == slots
    torch.testing.assert_close(routed.weights.double(), weights, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("score", Score)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_table_lists_the_experts_of_each_token(ops: NativeMoE, score: Score, dtype: torch.dtype) -> None:
    """Scores by the formula in float64; the reference takes the same experts."""
    weight, x = (values(24, HIDDEN, seed=1) / 4).to(dtype), values(40, HIDDEN).to(dtype)
    table, tokens = torch.randint(24, (50, 6), generator=torch.Generator().manual_seed(1)), (torch.arange(40) * 7) % 50
    spec = spec_with(score=score, scale=1.5, table=50)
    routed = ops.route(x, ops.pack_router(weight, None, table), spec, 6, (24,), 0.4, None, tokens)
    logits = x.double() @ weight.double().T
    scores = {
        Score.SOFTMAX: logits.softmax(1), Score.SIGMOID: 1 / (1 + (-logits).exp()),
        Score.SQRT_SOFTPLUS: (1 + logits.exp()).log().sqrt(),
    }[score]  # fmt: skip
    taken = torch.stack([row[table[token]] for row, token in zip(scores, tokens, strict=True)])
    assert routed.slots.tolist() == [[*table[token].tolist(), 24] for token in tokens]
    expected = taken / taken.sum(1, keepdim=True) * 1.5
    torch.testing.assert_close(routed.weights[:, :6].double(), expected, atol=1e-6, rtol=1e-5)
    reference = ReferenceMoE()
    same = reference.route(x, reference.pack_router(weight, None, table), spec, 6, (24,), 0.4, None, tokens)
    assert torch.equal(same.slots, routed.slots)
    with pytest.raises(TypeError, match="no token ids"):
        ops.route(x, ops.pack_router(weight, None, table), spec, 6, (), 1.0, None)


@pytest.mark.parametrize("score", Score)
def test_equal_scores_go_by_index(ops: NativeMoE, score: Score) -> None:
    weight = torch.zeros(20, 16)
    weight[[3, 7, 18]] = 1.0  # three equal ones, then seventeen equal ones
    routed = ops.route(torch.ones(3, 16) / 16, ops.pack_router(weight, None), spec_with(score=score), 6, (), 1.0, None)
    assert routed.slots.tolist() == [[3, 7, 18, 0, 1, 2]] * 3


@pytest.mark.parametrize("group_score", [GroupScore.MAX, GroupScore.TOP2_SUM])
def test_equal_groups_go_by_index(ops: NativeMoE, group_score: GroupScore) -> None:
    spec = spec_with(score=Score.SIGMOID, num_groups=4, top_groups=2, group_score=group_score)
    router = ops.pack_router(torch.zeros(16, 16), None)
    assert ops.route(torch.ones(1, 16), router, spec, 6, (), 1.0, None).slots.tolist() == [[0, 1, 2, 3, 4, 5]]


def test_the_correction_bias_chooses_and_does_not_weigh(ops: NativeMoE) -> None:
    bias = torch.zeros(16)
    bias[5] = 10.0
    weight, x = values(16, HIDDEN), values(1, HIDDEN)
    scores = (x.double() @ weight.double().T).softmax(1)[0]
    spec = spec_with(has_bias=True, renormalise=False)
    routed = ops.route(x, ops.pack_router(weight, bias), spec, 1, (), 1.0, None)
    assert routed.slots.tolist() == [[5]]
    assert float(routed.weights) == pytest.approx(float(scores[5]), rel=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_shared_slots_follow_with_their_weight_or_gate(ops: NativeMoE, dtype: torch.dtype) -> None:
    weight, x = values(8, HIDDEN).to(dtype), values(5, HIDDEN).to(dtype)
    gate = (values(1, HIDDEN, seed=2) / 4).to(dtype)
    router, spec = ops.pack_router(weight, None), spec_with(scale=2.0)
    routed = ops.route(x, router, spec, 2, (8, 9), 0.5, None)
    plain = ops.route(x, router, spec, 2, (), 0.5, None)
    assert torch.equal(routed.slots[:, :2], plain.slots)
    assert torch.equal(routed.weights[:, :2], plain.weights)
    assert routed.slots[:, 2:].tolist() == [[8, 9]] * 5
    assert routed.weights[:, 2:].tolist() == [[0.5, 0.5]] * 5
    gated = ops.route(x, router, spec, 2, (8, 9), 0.5, gate)
    expected = torch.sigmoid(x.double() @ gate.double().T).expand(-1, 2)
    torch.testing.assert_close(gated.weights[:, 2:].double(), expected, atol=1e-6, rtol=1e-5)


def expert_weights(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return (values(SLOTS, 2 * WIDTH, HIDDEN) / 7).to(dtype), (values(SLOTS, HIDDEN, WIDTH) / 6).to(dtype)


def some_routed(rows: int, chosen: int, seed: int = 0) -> Routed:
    """Different slots for each row, some slots never taken, weights of both signs."""
    random = torch.Generator().manual_seed(seed)
    slots = torch.stack([torch.randperm(SLOTS - 2, generator=random)[:chosen] for _ in range(rows)]).int()
    return Routed(slots=slots, weights=values(rows, chosen, seed=seed + 5))


def expected_experts(
    x: torch.Tensor,
    routed: Routed,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    scale: float,
    limit: float = float("inf"),
) -> torch.Tensor:
    out = torch.zeros(len(x), HIDDEN, dtype=torch.float64)
    for row, (slots, weights) in enumerate(zip(routed.slots.tolist(), routed.weights.tolist(), strict=True)):
        for slot, weight in zip(slots, weights, strict=True):
            both = gate_up[slot].double() @ x[row].double()
            gate, up = both[:WIDTH].clamp(max=limit), both[WIDTH:].clamp(-limit, limit)
            out[row] += weight * (down[slot].double() @ (gate / (1 + (-gate).exp()) * up))
    return out * scale


def assert_near(ours: torch.Tensor, expected: torch.Tensor, bound: float) -> None:
    """Relative to the largest expected value."""
    assert (ours.double() - expected).abs().max() <= bound * expected.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "chosen"), [(1, 1), (1, 4), (2, 3), (7, 2), (8, 9), (13, 4), (40, 5)])
def test_experts_are_the_weighted_sum_of_their_mlps(ops: NativeMoE, dtype: torch.dtype, rows: int, chosen: int) -> None:
    gate_up, down = expert_weights(dtype)
    x, routed = values(rows, HIDDEN).to(dtype), some_routed(rows, chosen)
    expected = expected_experts(x, routed, gate_up, down, 2.5)
    packed = ops.pack_experts(gate_up, down)
    assert packed.nbytes == SLOTS * 3 * WIDTH * HIDDEN * dtype.itemsize
    assert_near(ops.experts(x, routed, packed, scale=2.5, shared=None, gate=None), expected, BOUND[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_separate_shared_result_enters_unscaled_or_gated(ops: NativeMoE, dtype: torch.dtype) -> None:
    gate_up, down = expert_weights(dtype)
    x, shared, routed = values(9, HIDDEN).to(dtype), values(9, HIDDEN, seed=4).to(dtype), some_routed(9, 3)
    gate = (values(1, HIDDEN, seed=2) / 4).to(dtype)
    plain = expected_experts(x, routed, gate_up, down, 16.0)
    packed = ops.pack_experts(gate_up, down)
    ours = ops.experts(x, routed, packed, scale=16.0, shared=shared, gate=None)
    assert_near(ours, plain + shared.double(), BOUND[dtype])
    gated = ops.experts(x, routed, packed, scale=16.0, shared=shared, gate=gate)
    assert_near(gated, plain + shared.double() * torch.sigmoid(x.double() @ gate.double().T), BOUND[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_native_and_reference_agree_from_router_to_output(ops: NativeMoE, dtype: torch.dtype) -> None:
    gate_up, down = expert_weights(dtype)
    weight, bias, x = values(SLOTS - 1, HIDDEN).to(dtype), values(SLOTS - 1) / 8, values(17, HIDDEN).to(dtype)
    shared, gate = values(17, HIDDEN, seed=4).to(dtype), (values(1, HIDDEN, seed=2) / 4).to(dtype)
    spec = spec_with(score=Score.SIGMOID, has_bias=True, scale=2.5)
    results = []
    for backend in (ReferenceMoE(), ops):
        packed = backend.pack_experts(gate_up.clone(), down.clone())
        routed = backend.route(x, backend.pack_router(weight, bias), spec, 4, (SLOTS - 1,), 0.4, None)
        results.append(backend.experts(x, routed, packed, scale=1.0, shared=shared, gate=gate))
    assert_near(results[1], results[0].double(), BOUND[dtype])


def test_an_expert_of_weight_one_is_the_gated_mlp_bit_for_bit(ops: NativeMoE) -> None:
    """So a shared expert has the same bits as a slot and as an MLP of its own."""
    gate_up, down = expert_weights(torch.bfloat16)
    dense, x = NativeDense(ops.library, Direct(ops.library)), values(9, HIDDEN).bfloat16()
    mlp = dense.ffn(x, dense.pack(gate_up[3].clone(), None), dense.pack(down[3].clone(), None))
    routed = Routed(slots=torch.full((9, 1), 3, dtype=torch.int32), weights=torch.ones(9, 1))
    packed = ops.pack_experts(gate_up, down)
    assert torch.equal(ops.experts(x, routed, packed, scale=1.0, shared=None, gate=None), mlp)


def test_packing_takes_the_memory_that_was_given(ops: NativeMoE) -> None:
    gate_up, down = expert_weights(torch.bfloat16)
    packed = ops.pack_experts(gate_up, down)
    assert (packed.gate_up.data_ptr(), packed.down.data_ptr()) == (gate_up.data_ptr(), down.data_ptr())


def test_experts_of_broken_panels_are_refused(ops: NativeMoE) -> None:
    with pytest.raises(ValueError, match="whole panels"):
        ops.pack_experts(torch.zeros(2, 48, 32), torch.zeros(2, 32, 24))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_limit_cuts_gate_from_above_and_up_on_both_sides(ops: NativeMoE, dtype: torch.dtype) -> None:
    gate_up, down = expert_weights(dtype)
    x, routed = values(13, HIDDEN).to(dtype), some_routed(13, 4)
    expected = expected_experts(x, routed, gate_up, down, 2.5, limit=0.5)
    plain = expected_experts(x, routed, gate_up, down, 2.5)
    packed = ops.pack_experts(gate_up, down)
    cut = ops.experts(x, routed, packed, scale=2.5, shared=None, gate=None, activation=ActivationSpec(limit=0.5))
    assert_near(cut, expected, BOUND[dtype])
    assert (plain - expected).abs().max() > 0.2 * expected.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_limit_that_nothing_reaches_changes_no_bit(ops: NativeMoE, dtype: torch.dtype) -> None:
    x, routed, packed = values(13, HIDDEN).to(dtype), some_routed(13, 4), ops.pack_experts(*expert_weights(dtype))
    outs = [
        ops.experts(x, routed, packed, scale=1.0, shared=None, gate=None, activation=activation)
        for activation in (SILU, ActivationSpec(limit=100.0))
    ]
    assert torch.equal(*outs)


def whole_block(ops: NativeMoE, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Router and experts with every option, over rows x."""
    gate_up, down = expert_weights(dtype)
    weight, gate = values(SLOTS - 1, HIDDEN).to(dtype), (values(1, HIDDEN, seed=2) / 4).to(dtype)
    router, packed = ops.pack_router(weight, values(SLOTS - 1) / 8), ops.pack_experts(gate_up, down)
    spec = spec_with(score=Score.SIGMOID, has_bias=True, scale=2.5)
    routed = ops.route(x, router, spec, 4, (SLOTS - 1,), 0.4, gate)
    return ops.experts(x, routed, packed, scale=2.5, shared=x.flip(1).contiguous(), gate=gate)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_beside_any_other_rows(ops: NativeMoE, dtype: torch.dtype) -> None:
    x = values(40, HIDDEN).to(dtype)
    whole = whole_block(ops, x, dtype)
    for step in (1, 2, 3, 7, 8, 16):
        assert torch.equal(torch.cat([whole_block(ops, part.contiguous(), dtype) for part in x.split(step)]), whole)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    assert torch.equal(whole_block(ops, x[order].contiguous(), dtype), whole[order])
    crowd = torch.cat((x, x[:1].expand(40, -1)))  # many rows of one choice: other tiles for its experts
    assert torch.equal(whole_block(ops, crowd.contiguous(), dtype)[:40], whole)


def listed_block(ops: NativeMoE, x: torch.Tensor, tokens: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A router with a table, and experts with a limit."""
    weight, table = values(SLOTS, HIDDEN).to(dtype), (torch.arange(40 * 3) * 7 % SLOTS).view(40, 3)
    spec = spec_with(score=Score.SQRT_SOFTPLUS, scale=1.5, table=40)
    routed = ops.route(x, ops.pack_router(weight, None, table), spec, 3, (), 1.0, None, tokens)
    packed, limit = ops.pack_experts(*expert_weights(dtype)), ActivationSpec(limit=0.5)
    return ops.experts(x, routed, packed, scale=1.0, shared=None, gate=None, activation=limit)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_a_listed_token_has_the_same_bits_beside_any_other_rows(ops: NativeMoE, dtype: torch.dtype) -> None:
    x, tokens = values(40, HIDDEN).to(dtype), torch.arange(40).flip(0).contiguous()
    whole = listed_block(ops, x, tokens, dtype)
    for step in (1, 3, 8):
        parts = list(zip(x.split(step), tokens.split(step), strict=True))
        assert torch.equal(torch.cat([listed_block(ops, *part, dtype) for part in parts]), whole)
    assert not torch.equal(listed_block(ops, x, torch.zeros_like(tokens), dtype), whole)


def test_a_recorded_router_with_a_table_reads_the_tokens_of_each_run(ops: NativeMoE) -> None:
    recorder, x = Recorder(64), values(40, HIDDEN)
    rows, tokens = recorder.empty((64, HIDDEN), torch.float32), torch.zeros(64, dtype=torch.int64)
    out = listed_block(NativeMoE(ops.library, recorder), rows, tokens, torch.float32)
    program = Program(ops.library, recorder, {})
    for count, token in ((40, 3), (1, 17), (9, 39)):
        given = torch.full((count,), token)
        rows[:count] = x[:count]
        program.run(count, {"token_ids": given})
        assert torch.equal(out[:count], listed_block(ops, x[:count].contiguous(), given, torch.float32))


def test_the_order_of_summation_shows_in_the_bits(ops: NativeMoE) -> None:
    """Or the test above could not notice a sum in another order: the same experts in another order differ."""
    packed, x = ops.pack_experts(*expert_weights(torch.float32)), values(40, HIDDEN)

    def summed(order: Sequence[int]) -> torch.Tensor:
        routed = some_routed(40, 5)
        chosen = Routed(slots=routed.slots[:, order].contiguous(), weights=routed.weights[:, order].contiguous())
        return ops.experts(x, chosen, packed, scale=1.0, shared=None, gate=None)

    results = [summed(order) for order in itertools.islice(itertools.permutations(range(5)), 0, 120, 40)]
    assert not torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_a_recorded_block_gives_the_same_bits_for_fewer_rows(ops: NativeMoE) -> None:
    x = values(40, HIDDEN).bfloat16()
    direct, recorder = whole_block(ops, x, torch.bfloat16), Recorder(64)
    gate_up, down = expert_weights(torch.bfloat16)
    router = ops.pack_router(values(SLOTS - 1, HIDDEN).bfloat16(), values(SLOTS - 1) / 8)
    packed, gate = ops.pack_experts(gate_up, down), (values(1, HIDDEN, seed=2) / 4).bfloat16()
    recorded = NativeMoE(ops.library, recorder)
    rows, shared = (recorder.empty((64, HIDDEN), torch.bfloat16) for _ in range(2))
    spec = spec_with(score=Score.SIGMOID, has_bias=True, scale=2.5)
    routed = recorded.route(rows, router, spec, 4, (SLOTS - 1,), 0.4, gate)
    out = recorded.experts(rows, routed, packed, scale=2.5, shared=shared, gate=gate)
    program = Program(ops.library, recorder, {})
    for count in (40, 1, 17):
        rows[:count], shared[:count] = x[:count], x[:count].flip(1)
        program.run(count, {})
        assert torch.equal(out[:count], direct[:count])


def test_another_backends_router_and_types_are_refused(ops: NativeMoE) -> None:
    x, weight = values(1, HIDDEN), values(8, HIDDEN)
    with pytest.raises(TypeError, match="another backend"):
        ops.route(x, ReferenceMoE().pack_router(weight, None), PLAIN, 1, (), 1.0, None)
    with pytest.raises(TypeError, match="bfloat16"):
        ops.route(x, ops.pack_router(weight, None), PLAIN, 1, (8,), 1.0, values(1, HIDDEN).bfloat16())
    with pytest.raises(ValueError, match="follow each other"):
        ops.route(x, ops.pack_router(weight, None), PLAIN, 1, (8, 10), 1.0, None)
    with pytest.raises(ValueError, match="groups"):
        ops.route(x, ops.pack_router(weight, None), spec_with(num_groups=128), 1, (), 1.0, None)
