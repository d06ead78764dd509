"""F9 and F11: what an engine says depends neither on a draft that could not be built nor on another engine beside it.

Neighbours here hold opposite decisions about shared experts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from proa import LLM, ProaError, SamplingParams
from proa.llm import Stream
from tests.factories.checkpoints import write_checkpoint
from tests.factories.twins import twin, write_twin
from tests.features.verbs import Verb, decisions

SETTINGS = {"dtype": "float32", "threads": 1, "max_model_len": 256, "kv_memory": "8MiB"}
NEXTN = {**SETTINGS, "speculative": "nextn", "num_draft_tokens": 3}
PROMPTS = [[10, 11, 12], [40] * 7]
SAMPLED = SamplingParams(temperature=0.8, seed=3, max_tokens=24, logprobs=2, ignore_eos=True)
GREEDY = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)


def answers(llm: LLM) -> list[Any]:
    return [output.outputs for output in llm.generate(PROMPTS, SAMPLED)]


def everything(llm: LLM) -> tuple[Any, ...]:
    """What it says, and what it says of itself. Free memory, which `explain` shows as well, is no part of a plan."""
    document = llm.explain()
    plan = json.dumps([document["runners"], document["pair"], document["digest"]])
    return answers(llm), plan, llm.ledger(), llm.descriptions()


# F9


def cut(model: Path) -> None:
    """The last shard loses its end."""
    file = sorted(model.glob("*.safetensors"))[-1]
    file.write_bytes(file.read_bytes()[:-64])


def lose(model: Path) -> None:
    """A shard is not there."""
    sorted(model.glob("*.safetensors"))[0].unlink()


def copies_differ(model: Path) -> None:
    """Found only when data are read, after the target is built: the draft's copy of the embedding is another."""
    file = model / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.embed_tokens.weight"][300, 5] += 1.0
    save_file(tensors, file, {"format": "pt"})


FAULTS: dict[str, tuple[Any, int, str]] = {
    "a truncated shard": (cut, 2, "checkpoint/truncated"),
    "a missing shard": (lose, 2, "checkpoint/missing-shard"),
    "an embedding of another target": (copies_differ, 1, "weights/borrowed-differs"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_f9_a_draft_that_cannot_be_built_leaves_its_target_as_it_was_byte_for_byte(fault: str, tmp_path: Path) -> None:
    damage, shards, slug = FAULTS[fault]
    config, tensors = twin("glm4_moe")
    target = write_checkpoint(tmp_path / "target", config, tensors)
    donor = write_checkpoint(tmp_path / "donor", config, tensors, shards=shards)
    with LLM(target, draft=donor, **NEXTN) as llm:
        with_draft = decisions(llm.explain())
    with LLM(target, **SETTINGS) as llm:
        before = everything(llm)
        stream = llm.stream([10, 11, 12], GREEDY)
        begun = [next(stream) for _ in range(5)]
        damage(donor)
        with pytest.raises(ProaError, match=slug):
            LLM(target, draft=donor, **NEXTN)
        # The engine in the middle of an answer did not notice, and one that is built anew is the same.
        begun += list(stream)
        assert everything(llm) == before
        assert "".join(begun) == llm.generate([10, 11, 12], GREEDY)[0].outputs[0].text
    with LLM(target, **SETTINGS) as llm:
        assert everything(llm) == before
        assert decisions(llm.explain()) == with_draft


def test_f9_from_the_command_line_a_truncated_draft_is_an_error_and_the_target_answers_without_it(
    tmp_path: Path, verb: Verb
) -> None:
    target, donor = write_twin("glm4_moe", tmp_path / "target"), write_twin("glm4_moe", tmp_path / "donor")
    words = ("--raw", "--temperature", "0", "--dtype", "float32", "--threads", "1", "--max-tokens", "8", "--json")
    digest = verb("explain", target, "--json").json["runners"]["target"]["digest"]
    before = verb("run", target, "x", *words)
    cut(donor)
    failed = verb("run", target, "x", *words, "--speculative", "nextn", "--draft", donor)
    assert (failed.code, failed.out) == (3, "") and str(donor) in failed.err
    after = verb("run", target, "x", *words)
    assert before.code == after.code == 0 and before.json["outputs"] == after.json["outputs"]
    assert verb("explain", target, "--json").json["runners"]["target"]["digest"] == digest


# F11


OPPOSITE = (
    {"target_shared_experts": "fused", "draft_shared_experts": "separate"},
    {"target_shared_experts": "separate", "draft_shared_experts": "fused"},
)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_twin("deepseek_v3", tmp_path_factory.mktemp("mixed"))


def engine(model: Path, number: int) -> LLM:
    return LLM(model, **OPPOSITE[number], **NEXTN)


@pytest.fixture(scope="module")
def solo(mixed: Path) -> list[tuple[list[Any], str]]:
    """What each engine says when it is alone in the process."""
    found = []
    for number in range(2):
        with engine(mixed, number) as llm:
            found.append((answers(llm), llm.stream(PROMPTS[0], GREEDY)))
            found[-1] = (found[-1][0], "".join(found[-1][1]))
    return found


def test_f11_two_engines_with_opposite_answers_take_turns_token_by_token(
    mixed: Path, solo: list[tuple[list[Any], str]]
) -> None:
    with engine(mixed, 0) as first, engine(mixed, 1) as second:
        said = ["", ""]
        streams: list[Stream] = [llm.stream(PROMPTS[0], GREEDY) for llm in (first, second)]
        running: list[Iterator[str]] = [iter(stream) for stream in streams]
        while pieces := [next(stream, "") for stream in running]:
            said = [text + piece for text, piece in zip(said, pieces, strict=True)]
            if not any(pieces):
                break
        assert said == [text for _, text in solo]
        assert [answers(llm) for llm in (second, first)] == [solo[1][0], solo[0][0]]
        layouts = [{r: set(s["layout"]["shared_experts"].values()) for r, (s, _) in llm.descriptions().items()}
                   for llm in (first, second)]  # fmt: skip
    assert layouts == [
        {"target": {"fused"}, "draft": {"separate"}}, {"target": {"separate"}, "draft": {"fused"}},
    ]  # fmt: skip


def test_f11_two_engines_with_opposite_answers_run_on_two_threads(
    mixed: Path, solo: list[tuple[list[Any], str]]
) -> None:
    def serve(number: int) -> list[list[Any]]:
        with engine(mixed, number) as llm:
            return [answers(llm) for _ in range(3)]

    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(serve, range(2)))
    assert together == [[alone] * 3 for alone, _ in solo]
