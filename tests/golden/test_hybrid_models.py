"""Explain and inspect texts of public models with linear attention, from headers only, as in test_moe_models.py; and
what a request's state and a cached row take, against the published sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

import pytest

from proa.plan.planned import Resolved
from tests.golden.checks import (
    Made,
    check_drafts,
    check_figures,
    check_parameters,
    check_places,
    check_sources,
    made_of,
)
from tests.golden.hybrid_models import DEVICES, MODELS, TEXTS, cases, file_names, texts
from tests.golden.releases import write_model
from tests.golden.sources import PublicMoE

pytestmark = pytest.mark.slow
KIMI = "kimi-linear-48b-a3b-instruct"
# Elements that one layer keeps of a request (delta state, and the last three rows into a convolution of four), those
# it caches of a row, and how many layers there are of either kind, as the model cards give the sizes.
NEXT = (32 * 128 * 128, 3 * (2 * 16 * 128 + 32 * 128), 2 * 2 * 256, 36, 12)
SIZES: Mapping[str, tuple[int, int, int, int, int]] = MappingProxyType(
    {
        "qwen3-next-80b-a3b-instruct": NEXT,
        "qwen3-next-80b-a3b-instruct-fp8": NEXT,
        "qwen3.5-35b-a3b": (32 * 128 * 128, 3 * (2 * 16 * 128 + 32 * 128), 2 * 2 * 256, 30, 10),
        KIMI: (32 * 128 * 128, 3 * 3 * 32 * 128, 512 + 64, 20, 7),
    }
)


@pytest.fixture(scope="module", params=MODELS, ids=lambda model: model.name)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    model: PublicMoE = request.param
    root = tmp_path_factory.mktemp("hybrid")
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


def test_a_draft_is_there_where_the_checkpoint_holds_one(made: Made) -> None:
    check_drafts(made)


def test_states_and_rows_take_what_the_published_sizes_say(made: Made) -> None:
    delta, conv, row, linear, full = SIZES[made.model.name]
    for case, resolved in made.plans.items():
        memory, wide = resolved.plans.memory, 2 if case.endswith(".asked") else 4
        assert memory.state_bytes["target"] == linear * (wide * delta + 2 * conv), case
        assert memory.page_bytes["target"] == 2 * 16 * full * row, case
    if made.model.name == KIMI:
        assert linear * 4 * delta == 41_943_040  # "KDA recurrent pool", as quoted of an engine for this model


def test_linear_attention_runs_on_every_device_and_in_no_draft(made: Made) -> None:
    for case, resolved in made.plans.items():
        assert None not in kernels(resolved, "target"), case
        if resolved.draft is not None:
            assert kernels(resolved, "draft") == (None,) * 3, case


def test_which_kernel_runs_linear_attention_follows_device_and_family(made: Made) -> None:
    is_kda = made.model.name == KIMI
    found = {name: kernels(made.plans[f"{made.model.name}.{name}"], "target") for name in DEVICES}
    triton = ("triton",) * 3
    assert found == {
        "avx2": ("native",) * 3,
        "avx512": ("native",) * 3,
        "sm90": triton if is_kda else ("flashinfer", "triton", "triton"),
        "sm100": triton,  # FlashInfer wants states in bfloat16 there
    }
    if not is_kda:
        asked = made.plans[f"{made.model.name}.sm100.asked"]
        assert kernels(asked, "target")[0] == "flashinfer"
        assert asked.target.plan.linear_attention.prefill.requested.is_auto


def kernels(resolved: Resolved, role: str) -> tuple[str | None, ...]:
    (plan,) = (runner.plan.linear_attention for runner in resolved.runners if runner.plan.role.value == role)
    return plan.prefill.value, plan.decode.value, plan.verify.value


def test_the_texts_are_those_on_file(made: Made) -> None:
    for name, text in texts(made.model, made.plans, made.root):
        assert text == (TEXTS / name).read_text().rstrip("\n"), f"{name}: see hybrid_models.py to write it again"


def test_no_text_is_on_file_for_another_model() -> None:
    known = {f"{case}.{verb}.txt" for model in MODELS for case, verb in file_names(model)}
    assert {path.name for path in TEXTS.glob("*.txt")} == known
