"""The load-time check of fused shared experts: true layouts pass, and each way of being wrong is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from proa.arch.blocks import GroupScore, RouterSpec, Score
from proa.arch.layout import ScaleOn, SharedWeight
from proa.arch.weights import NameMap, WeightRule
from proa.errors import WeightError
from proa.loading import self_check
from proa.loading.build import build
from proa.loading.progress import Silent
from proa.loading.self_check import MIN_SHARE, routed
from proa.plan.planned import Planned, Resolved
from tests.factories.checkpoints import random_tensors, tiny_config, write_checkpoint
from tests.factories.fp8 import quantised, with_fp8
from tests.factories.headers import planned
from tests.factories.mla_checkpoints import MLA_FAMILIES, mla_config, mla_tensors
from tests.factories.moe_checkpoints import with_copies

Tensors = dict[str, torch.Tensor]
WIDE = {"shared_expert_intermediate_size": 64}  # Qwen2-MoE's own 48 is no whole number of slots


def fused(
    path: Path, family: str, *, is_fp8: bool = False, asks: dict[str, Any] | None = None, **keys: Any
) -> Resolved:
    if family in MLA_FAMILIES:
        config = mla_config(family, **keys)
        tensors = mla_tensors(config, 0, torch.float32)
    else:
        config = tiny_config(family, **{**(WIDE if family == "qwen2_moe" else {}), **keys})
        tensors = with_copies(config, random_tensors(config, 0, torch.float32))
    if is_fp8:
        config, tensors = with_fp8(config), quantised(tensors)[0]
    write_checkpoint(path, config, tensors)
    return planned(path, **{"shared_experts": "fused", "dtype": "float32", **(asks or {})})


def load(plan: Planned) -> None:
    build(plan, Silent(), None, None)


def relaid(plan: Planned, **changes: Any) -> Planned:
    """The plan with another layout of its experts, as a wrong rule might have made it."""
    moe = tuple((index, replace(layout, **changes)) for index, layout in plan.plan.layout.moe)
    return replace(plan, plan=replace(plan.plan, layout=replace(plan.plan.layout, moe=moe)))


def reruled(plan: Planned, change: Callable[[WeightRule], WeightRule]) -> Planned:
    """The plan with other weight rules for what it loads."""
    rules = [change(rule) for rule in plan.weights(plan.spec, plan.plan.layout)]
    return replace(plan, names=NameMap(rules))


@pytest.fixture
def shares(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The shared experts' parts on the vectors that were used, in the order of the checks."""
    seen: list[float] = []
    best = self_check._best

    def noted(*args: Any) -> Any:
        sample = best(*args)
        seen.append(sample.share)
        return sample

    monkeypatch.setattr(self_check, "_best", noted)
    return seen


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scale", [1.0, 2.5, 16.0])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v2", "deepseek_v3", "mistral4"])
def test_true_layouts_pass_on_a_telling_vector(
    family: str, count: int, scale: float, dtype: str, tmp_path: Path, shares: list[float]
) -> None:
    keys = {"n_shared_experts": count, "routed_scaling_factor": scale}
    load(fused(tmp_path, family, asks={"dtype": dtype}, **keys).target)
    assert len(shares) == 1 and shares[0] >= MIN_SHARE


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gated_shared_expert_passes(dtype: str, tmp_path: Path, shares: list[float]) -> None:
    load(fused(tmp_path, "qwen2_moe", asks={"dtype": dtype}).target)
    assert shares[0] >= MIN_SHARE


@pytest.mark.parametrize("is_fp8", [False, True], ids=["plain", "fp8"])
def test_a_bundled_draft_is_checked_by_its_own_tensors(is_fp8: bool, tmp_path: Path, shares: list[float]) -> None:
    resolved = fused(tmp_path, "deepseek_v3", is_fp8=is_fp8, asks={"speculative": "nextn"})
    assert resolved.draft is not None
    target = build(resolved.target, Silent(), None, None)
    build(resolved.draft, Silent(), None, target.model)
    assert len(shares) == 2


def test_a_separate_layout_is_not_checked(tmp_path: Path, shares: list[float]) -> None:
    load(fused(tmp_path, "glm4_moe", asks={"shared_experts": "separate"}).target)
    assert not shares


def test_the_scale_may_be_applied_to_the_output(tmp_path: Path) -> None:
    plan = fused(tmp_path, "glm4_moe").target
    load(relaid(plan, scale_on=ScaleOn.OUTPUT, shared_weight=SharedWeight.INVERSE_SCALE))


def halves_swapped(rule: WeightRule) -> WeightRule:
    """Gate rows of the shared slot where up rows belong, and the reverse."""
    if not rule.is_shared_slot or "down" in rule.source:
        return rule
    shift = 32 if "gate_proj" in rule.source else -32
    fills = [one._replace(rows=(one.rows[0] + shift, one.rows[1] + shift)) for one in rule.fills if one.rows]
    return replace(rule, fills=tuple(fills))


def columns_swapped(rule: WeightRule) -> WeightRule:
    """The down columns of one shared expert in the slot of the other."""
    if not rule.is_shared_slot or "down" not in rule.source:
        return rule
    parts = reversed([one.part for one in rule.fills])
    fills = [one._replace(part=part) for one, part in zip(rule.fills, parts, strict=True)]
    return replace(rule, fills=tuple(fills))


BROKEN: dict[str, tuple[str, dict[str, Any], Callable[[Planned], Planned]]] = {
    "weight 1 under a scale on the output": (
        "glm4_moe", {}, lambda plan: relaid(plan, scale_on=ScaleOn.OUTPUT, shared_weight=SharedWeight.ONE)
    ),
    "weight 1/scale under a scale on the weights": (
        "deepseek_v3", {}, lambda plan: relaid(plan, shared_weight=SharedWeight.INVERSE_SCALE)
    ),
    "no token gate": ("qwen2_moe", {}, lambda plan: relaid(plan, shared_weight=SharedWeight.ONE)),
    "a routed expert's slot": ("glm4_moe", {}, lambda plan: relaid(plan, shared_slots=(3,), num_routed=8)),
    "one of two slots": ("glm4_moe", {"n_shared_experts": 2}, lambda plan: relaid(plan, shared_slots=(8, 8))),
    "gate and up swapped": ("glm4_moe", {}, lambda plan: reruled(plan, halves_swapped)),
    "columns swapped": ("glm4_moe", {"n_shared_experts": 2}, lambda plan: reruled(plan, columns_swapped)),
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("broken", BROKEN)
def test_a_wrong_layout_is_refused_with_layer_runner_and_error(broken: str, dtype: str, tmp_path: Path) -> None:
    family, keys, wrong = BROKEN[broken]
    keys = {"num_nextn_predict_layers": 0, **keys} if family != "qwen2_moe" else keys
    plan = fused(tmp_path, family, asks={"dtype": dtype}, **keys).target
    load(plan)
    with pytest.raises(WeightError) as caught:
        load(wrong(plan))
    layer = plan.spec.moe_layers[0].index
    said = str(caught.value)
    assert caught.value.slug == "weights/fused-differs" and caught.value.role == "target"
    assert f"layer {layer}: " in said and "relative error 0." in said or "relative error 1" in said, said
    assert "--shared-experts separate" in said


def test_a_shared_expert_that_does_nothing_passes(tmp_path: Path) -> None:
    """A zeroed slot is a fault of the checkpoint's quality, not of the layout: it shows in the accept length."""
    config = tiny_config("glm4_moe")
    tensors = with_copies(config, random_tensors(config, 0, torch.float32))
    for name in tensors:
        if "shared_experts" in name:
            tensors[name] = torch.zeros_like(tensors[name])
    load(planned(write_checkpoint(tmp_path, config, tensors), shared_experts="fused").target)


def test_shared_experts_too_faint_to_be_checked_are_refused(tmp_path: Path) -> None:
    config = tiny_config("glm4_moe")
    tensors = with_copies(config, random_tensors(config, 0, torch.float32))
    for name in tensors:
        if "shared_experts" in name:
            tensors[name] *= 1e-3
    with pytest.raises(WeightError, match="no vector was found on which they could be checked") as caught:
        load(planned(write_checkpoint(tmp_path, config, tensors), shared_experts="fused").target)
    assert caught.value.slug == "weights/fused-differs"


def router(**changes: Any) -> RouterSpec:
    plain = RouterSpec(
        score=Score.SIGMOID, has_bias=False, num_groups=1, top_groups=1, group_score=GroupScore.NONE, renormalise=False,
        scale=1.0,
    )  # fmt: skip
    return replace(plain, **changes)


LOGITS = torch.tensor([2.0, -1.0, 0.0, 1.0], dtype=torch.float64)
SIGMOIDS = (0.8807970779778823, 0.2689414213699951, 0.5, 0.7310585786300049)  # 1 / (1 + exp(-x)) by hand


def test_scores_choice_and_weights_are_those_of_the_router() -> None:
    slots, weights, _ = routed(LOGITS, None, router(), 2)
    assert slots.tolist() == [0, 3] and weights.tolist() == pytest.approx([SIGMOIDS[0], SIGMOIDS[3]])
    slots, weights, _ = routed(LOGITS, torch.tensor([-1.0, 0, 0.5, 0], dtype=torch.float64), router(), 2)
    assert slots.tolist() == [2, 3] and weights.tolist() == pytest.approx([SIGMOIDS[2], SIGMOIDS[3]])
    _, weights, _ = routed(LOGITS, None, router(renormalise=True, scale=3.0), 2)
    assert weights.tolist() == pytest.approx(
        [3 * SIGMOIDS[0] / 1.6118556566078872, 3 * SIGMOIDS[3] / 1.6118556566078872]
    )


def test_only_experts_of_the_best_groups_are_chosen() -> None:
    """Groups {0, 1} and {2, 3}: the best single score is in the first, the best sum of two in the second."""
    groups = {"num_groups": 2, "top_groups": 1}
    best = routed(LOGITS, None, router(group_score=GroupScore.MAX, **groups), 2)[0]
    summed = routed(LOGITS, None, router(group_score=GroupScore.TOP2_SUM, **groups), 2)[0]
    assert (best.tolist(), summed.tolist()) == ([0, 1], [3, 2])


def test_equal_scores_are_taken_by_index_and_a_close_choice_says_so() -> None:
    slots, _, margin = routed(torch.zeros(4, dtype=torch.float64), None, router(), 2)
    assert slots.tolist() == [0, 1] and margin == float("inf")
    close = torch.tensor([1.0, 0.0, 1e-6, -1.0], dtype=torch.float64)
    assert routed(close, None, router(), 2)[2] < 1e-5 < routed(LOGITS, None, router(), 2)[2]
