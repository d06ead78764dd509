"""F21 and F22 as a user meets them: each stored tensor has one place, each parameter one source, or a named error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.factories.checkpoints import save_sharded, write_checkpoint
from tests.factories.fp8 import quantised, with_fp8
from tests.factories.twins import Tensors, twin
from tests.features.verbs import Verb, edit

BLOCK = "model.layers.{}.mlp.shared_experts."
TARGET, DRAFT = BLOCK.format(0), BLOCK.format(1)
NEXTN = ("--speculative", "nextn")
RUN = ("x", "--raw", "--max-tokens", "2", "--dtype", "float32", "--threads", "1", "--kv-memory", "8MiB")


def write(path: Path, change: Callable[[Tensors], Any] = len, *, shards: int = 1, fp8: bool = False) -> Path:
    config, tensors = twin("glm4_moe")
    if fp8:
        config, tensors = with_fp8(config), quantised(tensors)[0]
    change(tensors)
    return write_checkpoint(path, config, tensors, shards=shards)


def dropped(name: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.pop(name)


def renamed(name: str, other: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({other: tensors.pop(name)})


def added(name: str, *shape: int) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({name: torch.ones(shape)})


def refused(verb: Verb, model: Path, *words: str, slug: str, role: str, says: tuple[str, ...]) -> None:
    """By `inspect` from headers, and by `run` before anything is answered; both with the same message."""
    for ran in (verb("inspect", model, *words), verb("run", model, *RUN, *words)):
        assert ran.code == 3, ran.err
        assert f"WeightError [{slug}]: {role}: " in ran.err
        for text in says:
            assert text in ran.err, ran.err
    assert ran.out == ""


@pytest.mark.parametrize("layout", ["fused", "separate"])
@pytest.mark.parametrize(("role", "block"), [("target", TARGET), ("draft", DRAFT)])
def test_f21_a_renamed_tensor_of_a_shared_expert_is_named_with_what_was_expected(
    role: str, block: str, layout: str, tmp_path: Path, verb: Verb
) -> None:
    right, stray = f"{block}down_proj.weight", f"{block}w2.weight"
    model = write(tmp_path, renamed(right, stray))
    says = (f"unclaimed: {stray}", f"nearest: {right}", f"{role} plan: ", f"shared_experts = {layout}")
    refused(verb, model, *NEXTN, "--shared-experts", layout, slug="weights/unclaimed", role=role, says=says)


def test_f21_a_tensor_too_many_is_an_error_unless_a_glob_leaves_it_out(tmp_path: Path, verb: Verb) -> None:
    extra = "model.layers.0.mlp.experts.0.extra_proj.weight"
    model = write(tmp_path, added(extra, 4, 4))
    refused(verb, model, slug="weights/unclaimed", role="target", says=(extra,))
    glob = ("--allow-unexpected", "*.extra_proj.*")
    found = verb("inspect", model, "--json", *glob)
    assert found.code == 0
    listed = {"pattern": "*.extra_proj.*", "count": 1, "reason": "allowed by --allow-unexpected"}
    assert listed in found.json["runners"]["target"]["left_out"] and found.json["unclaimed"] == []
    assert verb("run", model, *RUN, *glob).code == 0
    other = verb("inspect", model, "--allow-unexpected", "*.another.*")
    assert other.code == 3 and extra in other.err


def test_f21_a_glob_may_not_hide_a_tensor_that_another_layout_would_place(tmp_path: Path, verb: Verb) -> None:
    model = write(tmp_path)
    edit(model, tie_word_embeddings=True)
    ran = verb("inspect", model, "--allow-unexpected", "lm_head.*")
    assert ran.code == 3 and "weights/glob-hides-tensor" in ran.err and "lm_head.weight" in ran.err


def test_f21_a_glob_changes_nothing_about_tensors_that_have_a_place(tmp_path: Path, verb: Verb) -> None:
    model = write(tmp_path)
    for layout in ("fused", "separate"):
        words = ("--json", "--shared-experts", layout, *NEXTN)
        plain, allowed = verb("inspect", model, *words), verb("inspect", model, *words, "--allow-unexpected", "*")
        assert plain.code == allowed.code == 0 and plain.json == allowed.json


@pytest.mark.parametrize("layout", ["fused", "separate"])
@pytest.mark.parametrize(
    ("role", "name"),
    [
        ("target", f"{TARGET}up_proj.weight"),  # one projection of the shared expert alone
        ("target", "model.layers.0.mlp.experts.7.gate_proj.weight"),
        ("target", "model.layers.0.mlp.gate.e_score_correction_bias"),
        ("draft", f"{DRAFT}up_proj.weight"),
        ("draft", "model.layers.1.mlp.experts.0.down_proj.weight"),
        ("draft", "model.layers.1.hnorm.weight"),
        ("draft", "model.layers.1.eh_proj.weight"),
    ],
)
def test_f22_a_missing_tensor_is_named_with_what_it_would_fill(
    role: str, name: str, layout: str, tmp_path: Path, verb: Verb
) -> None:
    model = write(tmp_path, dropped(name))
    refused(verb, model, *NEXTN, "--shared-experts", layout, slug="weights/missing", role=role, says=(name, "fills "))
    found = verb("inspect", model, "--json", *NEXTN, "--shared-experts", layout).json["runners"]
    (hole,) = found[role]["missing"]
    assert hole in verb("inspect", model, *NEXTN, "--shared-experts", layout).err
    assert found["draft" if role == "target" else "target"]["missing"] == []


def test_f22_a_missing_shard_is_named(tmp_path: Path, verb: Verb) -> None:
    model = write(tmp_path, shards=3)
    file = sorted(model.glob("*.safetensors"))[1]
    file.unlink()
    for ran in (verb("inspect", model), verb("run", model, *RUN)):
        assert ran.code == 3 and "checkpoint/missing-shard" in ran.err and file.name in ran.err


def test_f22_weights_that_are_there_twice_are_named(tmp_path: Path, verb: Verb) -> None:
    """Expert by expert, and all experts of the layer in one tensor."""
    model = write(tmp_path, added("model.layers.0.mlp.experts.down_proj", 8, 64, 32))
    says = ("unclaimed: model.layers.0.mlp.experts.0.down_proj.weight", "and 7 more like it")
    refused(verb, model, slug="weights/unclaimed", role="target", says=says)


def test_f22_a_second_copy_in_another_shard_is_listed_and_must_be_equal(tmp_path: Path, verb: Verb) -> None:
    model = write(tmp_path, shards=2)
    first, second = sorted(model.glob("*.safetensors"))
    tensors, name = load_file(second), "model.embed_tokens.weight"
    assert name not in tensors
    save_file({**tensors, name: torch.zeros(512, 64)}, second, {"format": "pt"})
    found = verb("inspect", model, "--json")
    assert found.code == 0 and found.json["files"]["not_in_index"] == [f"{second.name}: {name}"]
    other = verb("run", model, *RUN)
    assert other.code == 3 and "checkpoint/copy-differs" in other.err
    assert f"{second.name}: {name} has other values here than in {first.name}" in other.err
    save_file({**tensors, name: load_file(first)[name]}, second, {"format": "pt"})
    assert verb("run", model, *RUN).code == 0
    save_file({**tensors, "model.embed_tokens.kernel": torch.zeros(512, 64)}, second, {"format": "pt"})
    stray = verb("inspect", model)
    assert stray.code == 3 and "model.embed_tokens.kernel" in stray.err


@pytest.mark.parametrize("name", ["model.layers.0.mlp.experts.3.up_proj.weight", f"{TARGET}down_proj.weight"])
def test_f22_a_missing_scale_is_named(name: str, tmp_path: Path, verb: Verb) -> None:
    model = write(tmp_path, dropped(f"{name}_scale_inv"), fp8=True)
    ran = verb("inspect", model)
    assert ran.code == 3 and f"{name}_scale_inv" in ran.err
    assert verb("run", model, *RUN).code == 3


def test_f22_a_stored_head_that_differs_from_the_embedding_it_is_tied_to_is_named_with_it(
    tmp_path: Path, verb: Verb
) -> None:
    config, tensors = twin("glm4_moe")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    del tensors["model.layers.1.shared_head.head.weight"]  # a copy, and only that
    model = write_checkpoint(tmp_path, config | {"tie_word_embeddings": True}, tensors)
    assert verb("run", model, *RUN).code == 0
    tensors["lm_head.weight"][17, 3] += 0.5
    save_sharded(model, tensors, 1)
    ran = verb("run", model, *RUN)
    assert ran.code == 3 and "weights/tied-differs" in ran.err
    assert "lm_head.weight" in ran.err and "model.embed_tokens.weight" in ran.err and "row 17" in ran.err


@pytest.mark.parametrize(
    ("copy", "source"), [("embed_tokens", "model.embed_tokens.weight"), ("shared_head.head", "lm_head.weight")]
)
def test_f22_a_draft_s_copy_that_differs_from_its_target_is_named_with_it(
    copy: str, source: str, tmp_path: Path, verb: Verb
) -> None:
    name = f"model.layers.1.{copy}.weight"

    def change(tensors: Tensors) -> None:
        tensors[name][400, 1] *= 1.5

    model = write(tmp_path, change)
    assert verb("run", model, *RUN).code == 0  # nobody asked for the draft
    ran = verb("run", model, *RUN, *NEXTN)
    assert (ran.code, ran.out) == (3, "")
    assert "WeightError [weights/borrowed-differs]: draft: " in ran.err
    assert name in ran.err and source in ran.err and "row 400" in ran.err
