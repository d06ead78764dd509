"""Runners of models with experts and latent rows: what was built is what was promised, in both layouts of the shared
experts; a row's logits do not depend on how its request was cut, nor on what others left in the cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from proa.arch.layout import MoELayout, WeightLayout
from proa.loading.build import construct
from proa.runner.describe import promised
from proa.units import Phase
from tests.factories.headers import planned
from tests.factories.mla_checkpoints import MLA_FAMILIES, write_mla
from tests.factories.moe_checkpoints import MOE_FAMILIES
from tests.factories.runners import Rows, built_runner, runner_of

PROMPT = [(7 * i * i + 3) % 512 for i in range(40)]
FUSABLE = ("glm4_moe", *(family for family in MLA_FAMILIES))


@pytest.fixture(scope="session")
def written(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("latent")

    def write(family: str) -> Path:
        if family not in MLA_FAMILIES:
            return tiny(family)
        path = root / family
        return path if path.exists() else write_mla(family, path)

    return write


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", [*MOE_FAMILIES, *MLA_FAMILIES])
def test_a_built_runner_is_what_its_plan_promised(family: str, dtype: str, written: Callable[[str], Path]) -> None:
    plan = planned(written(family), dtype=dtype).target
    said = built_runner(plan, num_pages=9).describe()
    assert said == promised(plan.plan, plan.spec, plan.parameters, 9)
    assert said["moe_kernel"] == "reference"


@pytest.mark.parametrize("layout", ["fused", "separate"])
@pytest.mark.parametrize("family", FUSABLE)
def test_the_layout_of_shared_experts_is_told_by_the_layers(
    family: str, layout: str, written: Callable[[str], Path]
) -> None:
    plan = planned(written(family), dtype="float32", shared_experts=layout).target
    said = built_runner(plan, num_pages=9).describe()
    assert said == promised(plan.plan, plan.spec, plan.parameters, 9)
    assert set(said["layout"]["shared_experts"].values()) == {layout}
    model = construct(plan, None, None)
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == {
        name: info.shape for name, info in plan.parameters.items()
    }
    kept = [value for module in model.modules() for value in vars(module).values()]
    assert not [value for value in kept if isinstance(value, MoELayout | WeightLayout)]


@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "mistral4"])
def test_chunks_and_verify_rows_give_the_logits_of_the_whole(family: str, written: Callable[[str], Path]) -> None:
    runner = runner_of(written(family), dtype="float32", page_size=4)
    rows = Rows(runner, 3, 64)
    whole = rows.prefill(0, PROMPT)
    for tensor in runner._kv.tensors():
        tensor.fill_(float("nan"))
    parts = [rows.prefill(1, PROMPT[at : at + 7]) for at in range(0, 35, 7)]
    spans = [rows.span(1, Phase.VERIFY, PROMPT[35:])]
    rows.prefill(2, PROMPT[:11])
    spans.append(rows.span(2, Phase.VERIFY, PROMPT[11:13]))
    verified = runner.forward(spans).logits
    torch.testing.assert_close(torch.cat((*parts, verified[:5])), whole, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(verified[5:], whole[11:13], atol=1e-4, rtol=1e-4)
