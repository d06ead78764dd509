"""Two ranks, planned on a host that is described by a file: GLM-4.7-Flash as released, with its bundled draft."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.features.verbs import Verb, decisions
from tests.golden.moe_models import write_model
from tests.golden.sources import MODELS

Host = tuple[str, Path]
RANKS = ("--expert-parallel", "2")
WHY = "the experts are divided over 2 ranks, and none has a slot for the shared ones"


@pytest.fixture(scope="module")
def flash(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """MODEL and the ask for its draft. 47 layers, of which the first is dense; the draft is layer 47."""
    (model,) = [one for one in MODELS if one.name == "glm-4.7-flash"]
    folder = write_model(tmp_path_factory.mktemp("flash"), model)
    config = json.loads((folder / "config.json").read_text())
    assert (config["num_hidden_layers"], config["first_k_dense_replace"]) == (47, 1)
    return str(folder), "--speculative", "nextn"


def test_on_one_rank_both_runners_fuse(flash: tuple[str, ...], gpu: Host, verb: Verb) -> None:
    ran = verb("explain", *flash, *gpu, "--json")
    assert ran.code == 0, ran.err
    for role in ("target", "draft"):
        found = decisions(ran.json, role)["shared_experts"]
        assert (found["value"], found["source"], found["rule"]) == ("fused", "default", "moe.fuse.ok")
    table = verb("explain", *flash, *gpu).out
    (line,) = [line for line in table.splitlines() if line.startswith("shared_experts ")]
    assert line.split()[1:3] == ["fused", "fused"] and "ranks" not in line


def test_on_two_ranks_neither_does_and_there_are_two_reasons(flash: tuple[str, ...], gpu: Host, verb: Verb) -> None:
    document = verb("explain", *flash, *gpu, *RANKS, "--json").json
    for role, layers in (("target", "layers 1..46"), ("draft", "layer 47")):
        found = decisions(document, role)["shared_experts"]
        assert (found["value"], found["source"], found["rule"]) == (
            "separate", "constraint", "moe.fuse.expert_parallel",
        )  # fmt: skip
        assert found["reason"] == f"{layers}: {WHY}" and found["inputs"]["parallel.expert"] == 2
    table = verb("explain", *flash, *gpu, *RANKS).out
    (line,) = [line for line in table.splitlines() if line.startswith("shared_experts ")]
    assert f"target: layers 1..46: {WHY}" in line and f"draft: layer 47: {WHY}" in line
    why = verb("explain", *flash, *gpu, *RANKS, "--why", "shared_experts").out
    blocked = [one for one in why.splitlines() if "moe.fuse.expert_parallel (always) blocked" in one]
    assert len(blocked) == 2


@pytest.mark.parametrize("role", ["target", "draft"])
def test_on_two_ranks_an_ask_for_slots_is_an_error_of_the_runner_that_it_names(
    role: str, flash: tuple[str, ...], gpu: Host, verb: Verb
) -> None:
    ran = verb("explain", *flash, *gpu, *RANKS, f"--{role}.shared-experts", "fused")
    assert (ran.code, ran.out) == (2, "")
    assert f"PlanError [plan/shared-experts]: {role}: " in ran.err and "moe.fuse.expert_parallel" in ran.err


def test_every_tensor_has_its_place_in_both_plans(flash: tuple[str, ...], verb: Verb) -> None:
    for ranks in ((), RANKS):
        ran = verb("inspect", *flash, *ranks, "--json")
        assert ran.code == 0, ran.err
        assert ran.json["unclaimed"] == []
        assert all(one["unexpected"] == one["missing"] == [] for one in ran.json["runners"].values())
