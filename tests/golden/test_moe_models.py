"""Explain and inspect texts of public MoE models, from headers only. The headers are those of the releases, and their
totals are checked against figures that others published before anything of Proa is asked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import pytest

from proa.loading.dry_run import inspect
from proa.plan.planned import Planned, Resolved
from tests.factories.headers import planned
from tests.golden.moe_models import CPU, TEXTS, Stored, cases, stored, texts, write_model
from tests.golden.sources import MODELS, PublicMoE

TOWER = ("vision_tower.", "mm_projector.")
COPIES = (".shared_head.head.weight", ".embed_tokens.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """One model, written and planned."""

    model: PublicMoE
    root: Path
    kinds: list[Stored]
    plans: dict[str, Resolved]
    accounts: dict[str, dict[str, Any]]

    def parameters(self, starts: tuple[str, ...] = ("",), ends: tuple[str, ...] = ("",)) -> int:
        """Published parameters of the templates that begin and end so."""
        kinds = [kind for kind in self.kinds if kind.template.startswith(starts) and kind.template.endswith(ends)]
        return sum(kind.parameters for kind in kinds)


@pytest.fixture(scope="module", params=MODELS, ids=lambda model: model.name)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    model: PublicMoE = request.param
    root = tmp_path_factory.mktemp("moe")
    plans = cases(write_model(root, model), model)
    accounts = {case: inspect(resolved) for case, resolved in plans.items()}
    yield Made(model=model, root=root, kinds=stored(model.name), plans=plans, accounts=accounts)
    (root / model.name / "model.safetensors").unlink()


def filled(runner: Planned | None) -> int:
    """Elements of all parameters that the runner has for itself."""
    return 0 if runner is None else sum(prod(info.shape) for info in runner.parameters.values())


def test_every_model_names_its_sources_and_figures() -> None:
    assert len({model.name for model in MODELS}) == len(MODELS)
    for model in MODELS:
        assert model.config and model.names, model.name
        assert model.is_derived == (not model.figures), model.name


def test_the_tensors_of_the_release_add_up_to_the_published_figures(made: Made) -> None:
    model, kinds = made.model, made.kinds
    counted = {
        "tensors": sum(len(kind.names) for kind in kinds),
        "payload_bytes": sum(kind.nbytes for kind in kinds),
        "parameters": sum(kind.parameters for kind in kinds),
        "elements": sum(kind.elements for kind in kinds),
    }
    published = {figure: getattr(model, figure) for figure in counted if getattr(model, figure) is not None}
    assert {figure: counted[figure] for figure in published} == published


def test_every_tensor_has_a_place_and_no_config_key_is_left_unread(made: Made) -> None:
    total = sum(len(kind.names) for kind in made.kinds)
    for case, account in made.accounts.items():
        runners = account["runners"].values()
        assert sum(runner["tensors"]["total"] for runner in runners) == total, case
        assert account["unclaimed"] == [], case
        for runner in runners:
            assert (runner["tensors"]["unexpected"], runner["parameters"]["missing"]) == (0, 0), case
            assert (runner["wrong"], runner["config"]["unknown"]) == ([], {}), case
        assert made.plans[case].warnings == (), case


def test_the_runners_parameters_are_the_published_ones(made: Made) -> None:
    copies = made.parameters(("model.layers.",), COPIES)
    every = made.parameters() - made.parameters(TOWER)
    for case, resolved in made.plans.items():
        target, draft = filled(resolved.target), filled(resolved.draft)
        if draft or not made.model.has_draft:
            assert target + draft + copies == every, case
        if made.model.main_parameters is not None:
            assert target == made.model.main_parameters, case


def test_a_draft_is_there_where_the_config_says_so_and_borrows_the_stored_copies(made: Made) -> None:
    copies = sum(kind.template.startswith("model.layers.") and kind.template.endswith(COPIES) for kind in made.kinds)
    for case, resolved in made.plans.items():
        asked = case != made.model.name
        assert (resolved.draft is not None) == (asked and made.model.has_draft), case
        if resolved.draft is not None:
            draft = made.accounts[case]["runners"]["draft"]
            assert (draft["tensors"]["borrowed"], draft["parameters"]["borrowed"]) == (copies, 2), case


def test_the_texts_are_those_on_file(made: Made) -> None:
    for name, text in texts(made.plans, made.root):
        assert text == (TEXTS / name).read_text().rstrip("\n"), f"{name}: see moe_models.py to write it again"


def test_no_text_is_on_file_for_another_model() -> None:
    names = [model.name for model in MODELS]
    names += [f"{model.name}.nextn" for model in MODELS if model.has_draft]
    known = {f"{name}.{verb}.txt" for name in names for verb in ("explain", "inspect")}
    known |= {f"{model.name}.cuda.explain.txt" for model in MODELS if model.has_gpu_text}
    assert {path.name for path in TEXTS.glob("*.txt")} == known


def test_a_tensor_that_lacks_and_a_stray_one_are_named_in_a_release_of_full_size(tmp_path: Path) -> None:
    (flash,) = (model for model in MODELS if model.name == "glm-4.7-flash")
    shared, stray = "model.layers.47.mlp.shared_experts.up_proj.weight", "model.layers.47.mlp.shared_gate.weight"
    model = write_model(tmp_path, flash, without=shared, add={stray: (1, 2048)})
    draft = inspect(planned(model, caps=CPU, speculative="nextn"))["runners"]["draft"]
    assert [found["name"] for found in draft["wrong"]] == [stray, shared]
    assert inspect(planned(model, caps=CPU))["runners"]["target"]["unexpected"] == [stray]
