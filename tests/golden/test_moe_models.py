"""Explain and inspect texts of public MoE models, from headers only. The headers are those of the releases, and their
totals are checked against figures that others published before anything of Proa is asked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from proa.loading.dry_run import inspect
from tests.factories.headers import planned
from tests.golden.checks import (
    Made,
    check_drafts,
    check_figures,
    check_parameters,
    check_places,
    check_sources,
    made_of,
)
from tests.golden.moe_models import CPU, TEXTS, cases, texts
from tests.golden.releases import write_model
from tests.golden.sources import MODELS, PublicMoE

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=MODELS, ids=lambda model: model.name)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    model: PublicMoE = request.param
    root = tmp_path_factory.mktemp("moe")
    with made_of(model, root, cases(write_model(root, model), model)) as made:
        yield made


def test_every_model_names_its_sources_and_figures() -> None:
    check_sources(MODELS)


def test_the_tensors_of_the_release_add_up_to_the_published_figures(made: Made) -> None:
    check_figures(made)


def test_every_tensor_has_a_place_and_no_config_key_is_left_unread(made: Made) -> None:
    check_places(made)


def test_the_runners_parameters_are_the_published_ones(made: Made) -> None:
    check_parameters(made)


def test_a_draft_is_there_where_the_config_says_so_and_borrows_the_stored_copies(made: Made) -> None:
    check_drafts(made)


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
