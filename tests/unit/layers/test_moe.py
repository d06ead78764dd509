"""An MoE layer as its layout says: fused and separate shared experts are one function, a wrong weight is another."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from proa.arch.blocks import SILU, ActivationSpec, GroupScore, MoESpec, RouterSpec, Score, SharedSpec
from proa.arch.layout import ExpertFiles, MoELayout, ScaleOn, SharedWeight
from proa.arch.parameters import moe_parameters
from proa.layers.moe import MoE
from proa.units import DType
from tests.factories.layers import finish, layer_context

EXPERTS, TOP_K, WIDTH, HIDDEN = 8, 3, 16, 32
TOLERANCE = {DType.F32: 1e-5, DType.BF16: 2e-2}
LISTED = torch.tensor([[2, 0, 7], [1, 6, 5], [3, 3, 4], [7, 2, 1]])  # the experts of four tokens
NO_TABLE = torch.zeros(1, dtype=torch.int64)
RULE = {ScaleOn.WEIGHTS: SharedWeight.ONE, ScaleOn.OUTPUT: SharedWeight.INVERSE_SCALE}


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def moe_spec(*, count: int, is_gated: bool, scale: float, score: Score = Score.SIGMOID) -> MoESpec:
    router = RouterSpec(
        score=score, has_bias=True, num_groups=1, top_groups=1, group_score=GroupScore.NONE, renormalise=True,
        scale=scale,
    )  # fmt: skip
    shared = SharedSpec(count=count, width=WIDTH, is_gated=is_gated) if count else None
    return MoESpec(num_experts=EXPERTS, top_k=TOP_K, width=WIDTH, router=router, shared=shared)


def layout(*, fused: int, weight: SharedWeight, scale_on: ScaleOn) -> MoELayout:
    slots = tuple(range(EXPERTS, EXPERTS + fused))
    return MoELayout(
        num_routed=EXPERTS, shared_slots=slots, shared_weight=weight, scale_on=scale_on, files=ExpertFiles.LISTED
    )


def layer(spec: MoESpec, arranged: MoELayout, dtype: DType) -> MoE:
    """The same numbers whatever the layout: one shared MLP of count * width, cut into slots where it is fused."""
    context = layer_context(moe_parameters(spec, arranged, HIDDEN), dtype=dtype, is_latent=False)
    built = MoE(context, spec, arranged)
    parameters = dict(built.named_parameters())
    count = 0 if spec.shared is None else spec.shared.count
    gate, up = (random(count * WIDTH, HIDDEN, seed=seed) / HIDDEN**0.5 for seed in (1, 2))
    down = random(HIDDEN, count * WIDTH, seed=3) / WIDTH**0.5
    with torch.no_grad():
        parameters["router.weight"].copy_(random(EXPERTS, HIDDEN, seed=4) / HIDDEN**0.5)
        if "router.bias" in parameters:
            parameters["router.bias"].copy_(random(EXPERTS, seed=5))
        if "router.table" in parameters:
            parameters["router.table"].copy_(LISTED)
        parameters["experts.gate_up"][:EXPERTS].copy_(random(EXPERTS, 2 * WIDTH, HIDDEN, seed=6) / HIDDEN**0.5)
        parameters["experts.down"][:EXPERTS].copy_(random(EXPERTS, HIDDEN, WIDTH, seed=7) / WIDTH**0.5)
        if "shared_gate.weight" in parameters:
            parameters["shared_gate.weight"].copy_(random(1, HIDDEN, seed=8) / HIDDEN**0.5)
        for number, slot in enumerate(arranged.shared_slots):
            part = slice(number * WIDTH, (number + 1) * WIDTH)
            parameters["experts.gate_up"][slot].copy_(torch.cat((gate[part], up[part])))
            parameters["experts.down"][slot].copy_(down[:, part])
        if "shared.gate_up.weight" in parameters:
            parameters["shared.gate_up.weight"].copy_(torch.cat((gate, up)))
            parameters["shared.down.weight"].copy_(down)
    finish(built, context)
    return built


def difference(spec: MoESpec, one: MoELayout, other: MoELayout, dtype: DType) -> float:
    """Relative to the largest element."""
    x = random(17, HIDDEN, seed=9).to(torch.float32 if dtype is DType.F32 else torch.bfloat16)
    first, second = (layer(spec, arranged, dtype)(x, NO_TABLE).double() for arranged in (one, other))
    return ((first - second).abs().max() / first.abs().max()).item()


SCALES = tuple(product((1.0, 2.5, 16.0), ScaleOn))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(("scale", "scale_on"), SCALES)
def test_fused_shared_experts_give_what_separate_ones_do(
    scale: float, scale_on: ScaleOn, count: int, dtype: DType
) -> None:
    spec = moe_spec(count=count, is_gated=False, scale=scale)
    separate = layout(fused=0, weight=SharedWeight.ONE, scale_on=ScaleOn.WEIGHTS)
    fused = layout(fused=count, weight=RULE[scale_on], scale_on=scale_on)
    assert difference(spec, separate, fused, dtype) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("scale", [1.0, 2.5, 16.0])
@pytest.mark.parametrize("count", [1, 2])
def test_a_gated_shared_expert_enters_with_the_gate_of_the_token(count: int, scale: float, dtype: DType) -> None:
    spec = moe_spec(count=count, is_gated=True, scale=scale, score=Score.SOFTMAX)
    separate = layout(fused=0, weight=SharedWeight.TOKEN_GATE, scale_on=ScaleOn.WEIGHTS)
    fused = layout(fused=count, weight=SharedWeight.TOKEN_GATE, scale_on=ScaleOn.WEIGHTS)
    assert difference(spec, separate, fused, dtype) <= TOLERANCE[dtype]


@pytest.mark.parametrize("scale_on", ScaleOn)
def test_separate_shared_experts_are_not_scaled(scale_on: ScaleOn) -> None:
    """Another unit of the router's scale adds the routed sum once more, and leaves the shared part alone."""
    x, arranged = random(5, HIDDEN, seed=9), layout(fused=0, weight=SharedWeight.ONE, scale_on=scale_on)

    def output(count: int, scale: float) -> torch.Tensor:
        return layer(moe_spec(count=count, is_gated=False, scale=scale), arranged, DType.F32)(x, NO_TABLE)

    routed, one, two, three = output(0, 1.0), output(1, 1.0), output(1, 2.0), output(1, 3.0)
    torch.testing.assert_close(three - two, two - one, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(two - one, routed, atol=1e-5, rtol=1e-4)
    assert (one - routed).abs().max() > 0.1


@pytest.mark.parametrize(
    ("weight", "scale_on"),
    [(SharedWeight.ONE, ScaleOn.OUTPUT), (SharedWeight.INVERSE_SCALE, ScaleOn.WEIGHTS)],
)
@pytest.mark.parametrize("scale", [2.5, 16.0])
def test_the_wrong_shared_weight_is_wrong_by_the_size_of_the_output(
    scale: float, weight: SharedWeight, scale_on: ScaleOn
) -> None:
    """The reverse: no tolerance hides a shared weight that does not fit where the scale is applied."""
    spec = moe_spec(count=1, is_gated=False, scale=scale)
    separate = layout(fused=0, weight=SharedWeight.ONE, scale_on=ScaleOn.WEIGHTS)
    assert difference(spec, separate, layout(fused=1, weight=weight, scale_on=scale_on), DType.F32) > 5e-2


def gated64(x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray, limit: float) -> np.ndarray:
    opened, width = np.minimum(gate @ x, limit), np.clip(up @ x, -limit, limit)
    return down @ (opened / (1 + np.exp(-opened)) * width)


@pytest.mark.parametrize("fused", [0, 2])
def test_listed_experts_with_a_limit_are_the_formula(fused: int) -> None:
    """Hash routing as DeepSeek V4's: experts by the table, weights by their scores; gate and up are cut."""
    limit, tokens = 0.5, torch.tensor([0, 3, 1, 1, 2, 0, 2])
    spec = moe_spec(count=2, is_gated=False, scale=1.5, score=Score.SQRT_SOFTPLUS)
    activation = ActivationSpec(limit=limit)
    assert spec.shared is not None
    spec = replace(
        spec, router=replace(spec.router, has_bias=False, table=len(LISTED)), activation=activation,
        shared=replace(spec.shared, activation=activation),
    )  # fmt: skip
    x, arranged = random(7, HIDDEN, seed=9), layout(fused=fused, weight=SharedWeight.ONE, scale_on=ScaleOn.WEIGHTS)
    built = layer(spec, arranged, DType.F32)
    separate = layer(spec, replace(arranged, shared_slots=()), DType.F32)
    held = {name: value.double().numpy() for name, value in separate.named_parameters()}
    both, down, wide = held["experts.gate_up"], held["experts.down"], held["shared.gate_up.weight"]
    for row, token, out in zip(x.double().numpy(), tokens.tolist(), built(x, tokens).double().numpy(), strict=True):
        scores = np.sqrt(np.log1p(np.exp(held["router.weight"] @ row)))[LISTED[token].numpy()]
        expected = gated64(row, wide[: 2 * WIDTH], wide[2 * WIDTH :], held["shared.down.weight"], limit)
        for expert, weight in zip(LISTED[token].tolist(), 1.5 * scores / scores.sum(), strict=True):
            expected = expected + weight * gated64(row, both[expert, :WIDTH], both[expert, WIDTH:], down[expert], limit)
        np.testing.assert_allclose(out, expected, atol=1e-5)
    assert dict(built.named_parameters())["router.table"].dtype is torch.int64
    plain = layer(replace(spec, activation=SILU), arranged, DType.F32)(x, tokens)
    assert (plain - built(x, tokens)).abs().max() > 0.05  # the limit cut something


def test_a_gate_that_is_forgotten_is_noticed() -> None:
    spec = moe_spec(count=1, is_gated=True, scale=1.0)
    separate = layout(fused=0, weight=SharedWeight.TOKEN_GATE, scale_on=ScaleOn.WEIGHTS)
    fused = layout(fused=1, weight=SharedWeight.ONE, scale_on=ScaleOn.WEIGHTS)
    assert difference(spec, separate, fused, DType.F32) > 5e-2


@pytest.mark.parametrize("fused", [0, 2])
def test_packing_in_another_arrangement_leaves_one_copy_of_the_experts(fused: int) -> None:
    spec = moe_spec(count=2, is_gated=False, scale=1.0)
    arranged = layout(fused=fused, weight=SharedWeight.ONE, scale_on=ScaleOn.WEIGHTS)
    context = layer_context(moe_parameters(spec, arranged, HIDDEN), dtype=DType.F32, is_latent=False)
    reference = context.kernels.pack_experts
    context.kernels.pack_experts = lambda gate_up, down: reference(gate_up.clone(), down.clone())  # type: ignore[method-assign]  # a fake backend
    built = MoE(context, spec, arranged)
    stored = built.experts.gate_up.nbytes + built.experts.down.nbytes
    finish(built, context)
    assert built.experts.gate_up.is_meta and built.experts.down.is_meta
    assert sum(nbytes for _, nbytes in built.experts.held()) == stored
    assert tuple(built.experts.gate_up.shape) == (EXPERTS + fused, 2 * WIDTH, HIDDEN)


def test_the_layer_keeps_no_layout() -> None:
    spec = moe_spec(count=1, is_gated=False, scale=1.0)
    built = layer(spec, layout(fused=1, weight=SharedWeight.ONE, scale_on=ScaleOn.WEIGHTS), DType.F32)
    kept = [value for part in built.modules() for value in vars(part).values()]
    assert not [value for value in kept if isinstance(value, MoELayout)]
