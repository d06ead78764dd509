"""F6, F7 and F13: shared experts in slots and on their own are one function, whatever scale, count, score or gate.

On tiny random checkpoints; the same against reference checkpoints is tests/families/test_fused_experts.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from proa import LLM, SamplingParams
from proa.arch.layout import ScaleOn, SharedWeight
from proa.errors import WeightError
from proa.loading import build as loading
from proa.plan.planned import Planned
from tests.factories.checkpoints import write_tiny
from tests.factories.headers import planned
from tests.factories.hybrid_checkpoints import HYBRID_FAMILIES, write_hybrid
from tests.factories.mla_checkpoints import MLA_FAMILIES, write_mla
from tests.factories.runners import Rows, built_runner
from tests.features.verbs import edit

# The largest difference, relative to the largest logit.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
PROMPT = [(7 * i * i + 3) % 512 for i in range(24)]
GATED = {"shared_expert_intermediate_size": 64}  # two slots of 32
FAMILIES = ("glm4_moe", "qwen2_moe", *MLA_FAMILIES, "qwen3_next", "qwen3_5_moe", "kimi_linear")


def write(family: str, path: Path, **keys: Any) -> Path:
    if family in MLA_FAMILIES:
        return write_mla(family, path, **keys)
    if family in HYBRID_FAMILIES:
        return write_hybrid(family, path, **keys)
    return write_tiny(family, path, **{**(GATED if family == "qwen2_moe" else {}), **keys})


def logits(plan: Planned) -> torch.Tensor:
    runner = built_runner(plan, num_pages=16)
    said = set(runner.describe()["layout"]["shared_experts"].values()) - {None}
    assert len(said) == 1
    return Rows(runner, 1, 64).prefill(0, PROMPT)


def both(path: Path, dtype: str = "float32") -> tuple[torch.Tensor, torch.Tensor]:
    plans = [planned(path, dtype=dtype, shared_experts=layout).target for layout in ("fused", "separate")]
    assert [all(layout.is_fused for _, layout in plan.plan.layout.moe) for plan in plans] == [True, False]
    fused, separate = map(logits, plans)
    return fused, separate


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return ((one - other).abs().max() / other.abs().max()).item()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("family", FAMILIES)
def test_f6_fused_and_separate_give_the_same_logits(family: str, dtype: str, tmp_path: Path) -> None:
    assert difference(*both(write(family, tmp_path), dtype)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v2", "qwen2_moe"])
def test_f6_the_text_of_both_is_the_same(family: str, tmp_path: Path) -> None:
    path = write(family, tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    answers = []
    for layout in ("fused", "separate"):
        with LLM(path, shared_experts=layout, dtype="float32", threads=1, max_model_len=64) as llm:
            answers.append([output.outputs[0].text for output in llm.generate([PROMPT, [5, 6, 7]], params)])
    assert answers[0] == answers[1]


@pytest.mark.parametrize("scale", [1.0, 2.5, 16.0])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v2", "deepseek_v3"])  # sigmoid, softmax, grouped with a bias
def test_f7_any_scale_and_number_of_shared_experts(family: str, count: int, scale: float, tmp_path: Path) -> None:
    keys = {"routed_scaling_factor": scale, "n_shared_experts": count}
    if family != "deepseek_v2":
        keys["num_nextn_predict_layers"] = 0
    path = write(family, tmp_path, **keys)
    assert difference(*both(path)) <= TOLERANCE["float32"]
    plan = planned(path, shared_experts="fused").target
    assert {len(layout.shared_slots) for _, layout in plan.plan.layout.moe} == {count}


def relaid(plan: Planned, **changes: Any) -> Planned:
    """The plan with another rule for the weight of its shared slots."""
    moe = tuple((index, replace(layout, **changes)) for index, layout in plan.plan.layout.moe)
    return replace(plan, plan=replace(plan.plan, layout=replace(plan.plan.layout, moe=moe)))


@pytest.mark.parametrize("scale", [1.0, 2.5, 16.0])
def test_f7_the_scale_may_be_applied_to_the_sum(scale: float, tmp_path: Path) -> None:
    path = write("glm4_moe", tmp_path, routed_scaling_factor=scale, num_nextn_predict_layers=0)
    fused, separate = (planned(path, dtype="float32", shared_experts=layout).target for layout in ("fused", "separate"))
    on_sum = relaid(fused, scale_on=ScaleOn.OUTPUT, shared_weight=SharedWeight.INVERSE_SCALE)
    assert difference(logits(on_sum), logits(separate)) <= TOLERANCE["float32"]
    assert difference(logits(relaid(separate, scale_on=ScaleOn.OUTPUT)), logits(separate)) <= TOLERANCE["float32"]


BROKEN: dict[str, tuple[str, dict[str, Any]]] = {
    "weight 1 beside a scaled sum": ("glm4_moe", {"scale_on": ScaleOn.OUTPUT}),
    "weight 1/scale beside scaled weights": ("glm4_moe", {"shared_weight": SharedWeight.INVERSE_SCALE}),
    "weight 1 in the place of the token's gate": ("qwen2_moe", {"shared_weight": SharedWeight.ONE}),
}


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(loading, "check_fused_layers", lambda planned, model: None)
        yield


@pytest.mark.parametrize("broken", BROKEN)
def test_f7_a_broken_rule_of_the_weight_is_refused_when_it_is_loaded(broken: str, tmp_path: Path) -> None:
    family, changes = BROKEN[broken]
    path = write(family, tmp_path)
    with pytest.raises(WeightError, match="they do not compute what the checkpoint's tensors mean") as caught:
        logits(relaid(planned(path, dtype="float32", shared_experts="fused").target, **changes))
    assert caught.value.slug == "weights/fused-differs"


@pytest.mark.parametrize("broken", BROKEN)
def test_f7_a_broken_rule_of_the_weight_is_no_rounding(broken: str, tmp_path: Path, unchecked: None) -> None:
    family, changes = BROKEN[broken]
    path = write(family, tmp_path)
    fused, separate = (planned(path, dtype="float32", shared_experts=layout).target for layout in ("fused", "separate"))
    assert difference(logits(relaid(fused, **changes)), logits(separate)) > 0.05


def test_f7_the_scale_in_the_config_matters_in_both_layouts(tmp_path: Path) -> None:
    path = write("glm4_moe", tmp_path, num_nextn_predict_layers=0)
    before = both(path)
    edit(path, routed_scaling_factor=1.0)
    after = both(path)
    assert all(difference(one, other) > 0.05 for one, other in zip(before, after, strict=True))
    assert difference(*after) <= TOLERANCE["float32"]


@pytest.mark.parametrize("scale", [0.3, 1.0, 3.0])
def test_f13_qwen2_moe_loads_as_asked_and_both_layouts_agree(scale: float, tmp_path: Path) -> None:
    """The gate of each token, here for gates near a half and near their ends."""
    from tests.factories.checkpoints import random_tensors, tiny_config, write_checkpoint

    config = tiny_config("qwen2_moe", **GATED)
    tensors = random_tensors(config, 3, torch.float32)
    for name in tensors:
        if name.endswith("shared_expert_gate.weight"):
            tensors[name] *= scale
    path = write_checkpoint(tmp_path, config, tensors)
    assert difference(*both(path)) <= TOLERANCE["float32"]
    auto = planned(path).target.plan.shared_experts
    assert (auto.value.value, auto.rule) == ("separate", "moe.fuse.no_gain")
