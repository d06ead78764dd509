"""Explain and inspect texts of public models, from headers only. Counts are checked against published figures first."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest

from proa.loading.dry_run import inspect
from proa.plan.planned import Resolved
from tests.factories.headers import planned
from tests.golden.public_models import HERE, MODELS, SERVER, PublicModel, texts, write_model


def by_arithmetic(config: dict[str, Any]) -> int:
    """Parameters of a dense decoder, from its config alone."""
    hidden, width, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    dim, kv = config.get("head_dim") or hidden // heads, config["num_key_value_heads"]
    attention = 2 * hidden * heads * dim + 2 * hidden * kv * dim
    attention += (heads + 2 * kv) * dim if config["model_type"] == "qwen2" else 0
    attention += 2 * dim if config["model_type"] == "qwen3" else 0
    layer = attention + 3 * hidden * width + 2 * hidden
    matrices = 1 if config["tie_word_embeddings"] else 2
    return matrices * config["vocab_size"] * hidden + config["num_hidden_layers"] * layer + hidden


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("public")


def resolved(root: Path, model: PublicModel) -> Resolved:
    return planned(write_model(root, model), caps=SERVER)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_the_parameters_add_up_to_the_published_number(root: Path, model: PublicModel) -> None:
    config = json.loads((HERE / "configs" / f"{model.name}.json").read_text())
    found = resolved(root, model)
    assert by_arithmetic(config) == model.parameters
    assert sum(prod(info.shape) for info in found.target.parameters.values()) == model.parameters
    assert found.plans.memory.weights_bytes == {"target": 2 * model.parameters}
    row = 2 * config["num_hidden_layers"] * config["num_key_value_heads"]
    row *= config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    assert found.plans.memory.page_bytes == {"target": 2 * 16 * row}


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_every_tensor_has_a_place_and_no_config_key_is_left_unread(root: Path, model: PublicModel) -> None:
    found = resolved(root, model)
    account = inspect(found)
    tensors, parameters = (account["runners"]["target"][key] for key in ("tensors", "parameters"))
    tied = int(model.stores_tied_copy)
    assert (tensors["placed"], tensors["tied"], tensors["unexpected"]) == (tensors["total"] - tied, tied, 0)
    assert (parameters["filled"], parameters["missing"]) == (parameters["total"], 0)
    assert account["unclaimed"] == [] and found.warnings == ()


def test_the_texts_are_those_on_file(root: Path) -> None:
    made = dict(texts(root))
    stored = {path.name: path.read_text().rstrip("\n") for path in (HERE / "texts").glob("*.txt")}
    assert set(made) == set(stored)
    for name, text in made.items():
        assert text == stored[name], f"{name}: see tests/golden/public_models.py to write it again"
