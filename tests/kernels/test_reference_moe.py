"""Reference routing and experts against the formulas in float64, one row and one expert at a time."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from proa.arch.blocks import SILU, ActivationSpec, GroupScore, RouterSpec, Score
from proa.kernels.reference.moe import ReferenceMoE
from proa.kernels.seam import PackedRouter, Routed

OPS = ReferenceMoE()
EXPERTS, HIDDEN, WIDTH, TOP_K = 12, 10, 6, 3
GROUPS = ((GroupScore.NONE, 1, 1), (GroupScore.MAX, 4, 2), (GroupScore.TOP2_SUM, 3, 2), (GroupScore.TOP2_SUM, 4, 3))


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def router_spec(
    *,
    score: Score = Score.SIGMOID,
    has_bias: bool = False,
    groups: tuple[GroupScore, int, int] = GROUPS[0],
    renormalise: bool = False,
    scale: float = 1.0,
) -> RouterSpec:
    kind, count, top = groups
    return RouterSpec(
        score=score, has_bias=has_bias, num_groups=count, top_groups=top, group_score=kind, renormalise=renormalise,
        scale=scale,
    )  # fmt: skip


def route(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, spec: RouterSpec, top_k: int = TOP_K
) -> Routed:
    return OPS.route(x, OPS.pack_router(weight, bias), spec, top_k, (), 1.0, None)


def score64(logits: list[float], score: Score) -> list[float]:
    match score:
        case Score.SOFTMAX:
            total = sum(math.exp(value) for value in logits)
            return [math.exp(value) / total for value in logits]
        case Score.SIGMOID:
            return [1 / (1 + math.exp(-value)) for value in logits]
        case Score.SQRT_SOFTPLUS:
            return [math.sqrt(math.log(1 + math.exp(value))) for value in logits]


def ordered(values: dict[int, float], count: int) -> list[int]:
    return sorted(values, key=lambda index: (-values[index], index))[:count]


def expected_route(logits: list[float], bias: list[float], spec: RouterSpec) -> tuple[list[int], list[float]]:
    scores = score64(logits, spec.score)
    choice = {expert: score + more for expert, (score, more) in enumerate(zip(scores, bias, strict=True))}
    if spec.group_score is not GroupScore.NONE:
        size = len(logits) // spec.num_groups
        worth: dict[int, float] = {}
        for group in range(spec.num_groups):
            inside = sorted((choice[e] for e in range(group * size, (group + 1) * size)), reverse=True)
            worth[group] = inside[0] if spec.group_score is GroupScore.MAX else inside[0] + inside[1]
        best = ordered(worth, spec.top_groups)
        choice = {expert: value for expert, value in choice.items() if expert // size in best}
    slots = ordered(choice, TOP_K)
    total = sum(scores[slot] for slot in slots) if spec.renormalise else 1.0
    return slots, [scores[slot] / total * spec.scale for slot in slots]


@pytest.mark.parametrize("groups", GROUPS, ids=lambda groups: f"{groups[0].value}-{groups[1]}")
@pytest.mark.parametrize("score", Score)
def test_the_router_is_the_formula(score: Score, groups: tuple[GroupScore, int, int]) -> None:
    x, weight = random(40, HIDDEN), random(EXPERTS, HIDDEN, seed=1)
    logits = (x.double() @ weight.double().T).tolist()
    for has_bias, renormalise, scale in product((False, True), (False, True), (1.0, 2.5)):
        spec = router_spec(score=score, has_bias=has_bias, groups=groups, renormalise=renormalise, scale=scale)
        bias = random(EXPERTS, seed=2) if has_bias else None
        routed = route(x, weight, bias, spec)
        plain = [0.0] * EXPERTS if bias is None else bias.double().tolist()
        expected = [expected_route(row, plain, spec) for row in logits]
        assert routed.slots.dtype is torch.int32 and routed.weights.dtype is torch.float32
        assert routed.slots.tolist() == [slots for slots, _ in expected]
        np.testing.assert_allclose(routed.weights.numpy(), [weights for _, weights in expected], rtol=2e-5)


def test_equal_scores_are_taken_in_the_order_of_their_index() -> None:
    x, weight = torch.ones(2, HIDDEN), torch.zeros(EXPERTS, HIDDEN)
    assert route(x, weight, None, router_spec()).slots.tolist() == [[0, 1, 2]] * 2
    weight[7] = 1.0
    assert route(x, weight, None, router_spec()).slots.tolist() == [[7, 0, 1]] * 2
    spec = router_spec(groups=(GroupScore.MAX, 4, 2))
    assert route(x, torch.zeros_like(weight), None, spec, top_k=5).slots.tolist() == [[0, 1, 2, 3, 4]] * 2


def test_the_correction_bias_chooses_and_does_not_weigh() -> None:
    x, weight = torch.ones(1, 1), torch.tensor([[0.0], [1.0], [2.0], [3.0]])
    bias = torch.tensor([5.0, 4.0, 0.0, 0.0])
    routed = route(x, weight, bias, router_spec(has_bias=True), top_k=2)
    assert routed.slots.tolist() == [[0, 1]]
    np.testing.assert_allclose(routed.weights.numpy(), [[0.5, 1 / (1 + math.exp(-1))]], rtol=1e-6)


def test_an_expert_outside_the_best_groups_is_not_taken_even_if_all_inside_count_less_than_nothing() -> None:
    x, weight = torch.ones(1, 1), torch.zeros(6, 1)
    bias = torch.tensor([-3.0, -4.0, -9.0, -5.0, -5.0, -5.0])  # groups worth -6 and -9, biased scores all below 0
    routed = route(x, weight, bias, router_spec(has_bias=True, groups=(GroupScore.TOP2_SUM, 2, 1)), top_k=3)
    assert routed.slots.tolist() == [[0, 1, 2]]


def test_a_half_precision_row_is_scored_in_float32() -> None:
    x, weight = random(5, HIDDEN).bfloat16(), random(EXPERTS, HIDDEN, seed=1).bfloat16()
    logits = (x.double() @ weight.double().T).tolist()
    routed = route(x, weight, None, router_spec(score=Score.SOFTMAX))
    expected = [expected_route(row, [0.0] * EXPERTS, router_spec(score=Score.SOFTMAX)) for row in logits]
    np.testing.assert_allclose(routed.weights.numpy(), [weights for _, weights in expected], rtol=2e-5)


def test_shared_slots_follow_the_routed_ones_with_a_weight_or_the_rows_gate() -> None:
    x, router, spec = random(4, HIDDEN), random(EXPERTS, HIDDEN, seed=1), router_spec(scale=2.5)
    plain = route(x, router, None, spec)
    fixed = OPS.route(x, PackedRouter(weight=router, bias=None), spec, TOP_K, (12, 13), 0.4, None)
    assert fixed.slots.tolist() == [[*row, 12, 13] for row in plain.slots.tolist()]
    assert torch.equal(fixed.weights[:, :TOP_K], plain.weights)
    assert torch.equal(fixed.weights[:, TOP_K:], torch.full((4, 2), 0.4))
    gate = random(1, HIDDEN, seed=5)
    gated = OPS.route(x, PackedRouter(weight=router, bias=None), spec, TOP_K, (12,), 1.0, gate)
    expected = 1 / (1 + np.exp(-(x.double() @ gate.double().T).numpy()))
    np.testing.assert_allclose(gated.weights[:, TOP_K:].numpy(), expected, rtol=1e-5)


@pytest.mark.parametrize("score", Score)
def test_a_router_with_a_table_takes_the_experts_of_the_token_by_their_scores(score: Score) -> None:
    x, weight = random(6, HIDDEN), random(EXPERTS, HIDDEN, seed=1)
    table = torch.tensor([[3, 0, 11], [7, 8, 9], [5, 5, 2]])  # an expert may be listed twice
    tokens = torch.tensor([2, 0, 1, 1, 0, 2])
    logits = (x.double() @ weight.double().T).tolist()
    for renormalise, scale in product((False, True), (1.0, 1.5)):
        spec = replace(router_spec(score=score, renormalise=renormalise, scale=scale), table=3)
        routed = OPS.route(x, OPS.pack_router(weight, None, table), spec, TOP_K, (12,), 0.4, None, tokens)
        for row, token in enumerate(tokens.tolist()):
            listed = table[token].tolist()
            scores = [score64(logits[row], score)[expert] for expert in listed]
            total = sum(scores) if renormalise else 1.0
            assert routed.slots[row].tolist() == [*listed, 12]
            expected = [*(one / total * scale for one in scores), 0.4]
            np.testing.assert_allclose(routed.weights[row].numpy(), expected, rtol=2e-5)


def test_a_router_with_a_table_refuses_rows_without_tokens() -> None:
    router = OPS.pack_router(random(EXPERTS, HIDDEN), None, torch.zeros(3, TOP_K, dtype=torch.int64))
    with pytest.raises(TypeError, match="no token ids"):
        OPS.route(random(2, HIDDEN), router, replace(router_spec(), table=3), TOP_K, (), 1.0, None)


def mlp64(x: np.ndarray, gate_up: np.ndarray, down: np.ndarray, limit: float = math.inf) -> np.ndarray:
    half = len(gate_up) // 2
    gate, up = np.minimum(gate_up[:half] @ x, limit), np.clip(gate_up[half:] @ x, -limit, limit)
    return down @ (gate / (1 + np.exp(-gate)) * up)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 4e-2)])
@pytest.mark.parametrize("has_gate", [False, True])
@pytest.mark.parametrize("has_shared", [False, True])
@pytest.mark.parametrize("rows", [1, 9])
def test_experts_are_summed_by_their_weights(
    rows: int, has_shared: bool, has_gate: bool, dtype: torch.dtype, tolerance: float
) -> None:
    x, shared = random(rows, HIDDEN).to(dtype), random(rows, HIDDEN, seed=4).to(dtype)
    gate_up, down = (
        random(EXPERTS, 2 * WIDTH, HIDDEN, seed=1).to(dtype),
        random(EXPERTS, HIDDEN, WIDTH, seed=2).to(dtype),
    )
    gate = random(1, HIDDEN, seed=5).to(dtype)
    slots = torch.stack([torch.randperm(EXPERTS, generator=torch.Generator().manual_seed(i))[:4] for i in range(rows)])
    weights = random(rows, 4, seed=3).abs()
    packed = OPS.pack_experts(gate_up, down)
    assert (packed.slots, packed.width, packed.hidden) == (EXPERTS, WIDTH, HIDDEN)
    out = OPS.experts(
        x,
        Routed(slots=slots.int(), weights=weights),
        packed,
        scale=2.5,
        shared=shared if has_shared else None,
        gate=gate if has_gate else None,
    )
    x64, matrices, outs = x.double().numpy(), gate_up.double().numpy(), down.double().numpy()
    expected = np.zeros((rows, HIDDEN))
    for row in range(rows):
        for slot, weight in zip(slots[row].tolist(), weights[row].tolist(), strict=True):
            expected[row] += 2.5 * weight * mlp64(x64[row], matrices[slot], outs[slot])
        if has_shared:
            factor = 1 / (1 + np.exp(-(gate.double().numpy()[0] @ x64[row]))) if has_gate else 1.0
            expected[row] += factor * shared[row].double().numpy()
    assert out.dtype is dtype
    np.testing.assert_allclose(out.double().numpy(), expected, atol=tolerance * np.abs(expected).max())


@pytest.mark.parametrize("limit", [None, 0.7])
def test_a_limit_cuts_gate_from_above_and_up_on_both_sides(limit: float | None) -> None:
    x, gate_up, down = random(9, HIDDEN), random(1, 2 * WIDTH, HIDDEN, seed=1), random(1, HIDDEN, WIDTH, seed=2)
    activation = SILU if limit is None else ActivationSpec(limit=limit)
    routed = Routed(slots=torch.zeros(9, 1, dtype=torch.int32), weights=torch.ones(9, 1))
    packed = OPS.pack_experts(gate_up, down)
    out = OPS.experts(x, routed, packed, scale=1.0, shared=None, gate=None, activation=activation)
    rows, matrices = x.double().numpy(), (gate_up[0].double().numpy(), down[0].double().numpy())
    expected = np.stack([mlp64(row, *matrices, math.inf if limit is None else limit) for row in rows])
    np.testing.assert_allclose(out.double().numpy(), expected, atol=2e-5)
    both = gate_up[0].double().numpy() @ rows.T
    assert both[:WIDTH].max() > 0.7 and both[WIDTH:].max() > 0.7 and both.min() < -0.7  # or nothing was cut


def test_a_row_is_summed_in_its_own_order() -> None:
    """1e8 - 1e8 + 1 is 1 in float32, 1 + 1e8 - 1e8 is 0: the order of the slots, not that of the experts, decides."""
    gate_up = torch.tensor([[[100.0], [1.0]]] * 3)  # silu(100) * 1, exactly 100
    down = torch.tensor([[[0.01]], [[1e6]], [[-1e6]]])
    packed = OPS.pack_experts(gate_up, down)
    x = torch.ones(2, 1)
    slots = torch.tensor([[1, 2, 0], [0, 1, 2]], dtype=torch.int32)
    out = OPS.experts(x, Routed(slots=slots, weights=torch.ones(2, 3)), packed, scale=1.0, shared=None, gate=None)
    assert out[:, 0].tolist() == [1.0, 0.0]
