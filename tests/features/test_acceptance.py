"""F23 and F24: what a draft is worth is always visible, its collapse is loud, and the answer never depends on it.

The drafts are their targets' own layers (factories.twins), right nearly always, or the same with a fault that loads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from proa import LLM, SamplingParams
from tests.factories.checkpoints import write_checkpoint
from tests.factories.twins import Tensors, another_layer, permuted_experts, twin, write_twin, zeroed_shared_experts
from tests.features.verbs import Verb

K = 3
SETTINGS = {"dtype": "float32", "threads": 1, "max_model_len": 512, "kv_memory": "8MiB"}
NEXTN = {**SETTINGS, "speculative": "nextn", "num_draft_tokens": K}
PROMPTS = [[10 + i, 50 + i, 90 + i] for i in range(4)]
LONG = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
FLOOR = 1.3  # tokens per verify step, of which one comes without any draft (docs/speculative.md)
FAULTS: dict[str, tuple[float, Callable[[Tensors], Tensors]]] = {
    # how much the shared experts count beside the routed ones, and what is wrong with the draft
    "permuted experts": (4.0, permuted_experts),
    "zeroed shared experts": (12.0, zeroed_shared_experts),
    "another target's layer": (4.0, lambda tensors: another_layer(tensors, twin("glm4_moe", seed=5)[1])),
}


def pair(fault: str, folder: Path) -> tuple[Path, Path]:
    """The checkpoint, and the same with a draft that loads and is wrong."""
    shared, spoil = FAULTS[fault]
    config, tensors = twin("glm4_moe", shared=shared)
    return (
        write_checkpoint(folder / "whole", config, tensors), write_checkpoint(folder / "bad", config, spoil(tensors)),
    )  # fmt: skip


def test_f23_a_draft_that_is_its_target_has_nearly_every_token_accepted(tmp_path: Path) -> None:
    for family in ("glm4_moe", "deepseek_v3"):
        with LLM(write_twin(family, tmp_path / family), **NEXTN) as llm:
            metrics = [output.metrics.speculative_decoding for output in llm.generate(PROMPTS, LONG)]
            total, health = llm.stats()["speculative_decoding"], llm.stats()["speculative_health"]
        for found in (*metrics, total):
            assert found["mean_acceptance_length"] > K + 0.8
            assert len(found["acceptance_rate_per_position"]) == K
            assert min(found["acceptance_rate_per_position"]) > 0.9
        assert health["state"] == "healthy" and health["accept_length"] > K + 0.8


@pytest.mark.parametrize("fault", FAULTS)
def test_f23_a_fault_that_loads_is_told_with_numbers_and_changes_the_health(
    fault: str, tmp_path: Path, verb: Verb
) -> None:
    whole, bad = pair(fault, tmp_path)
    words = ("the plan", "--raw", "--temperature", "0", "--ignore-eos", "--max-tokens", "200", "--dtype", "float32")
    words += ("--threads", "1", "--kv-memory", "8MiB", "--speculative", "nextn", "--num-draft-tokens", str(K))
    right, wrong = verb("run", whole, *words), verb("run", bad, *words)
    assert right.code == wrong.code == 0, wrong.err
    assert right.out == wrong.out
    (told,) = [line for line in wrong.err.splitlines() if "speculative/accept-drift" in line]
    found = re.search(r"accept length (\d\.\d\d) over the last (\d+) verify steps \((\d\.\d\d) over all (\d+)\)", told)
    assert found and float(found[1]) < FLOOR and int(found[4]) >= int(found[2]) > 0, told
    assert "accept-drift" not in right.err
    lengths = [float(re.search(r"accept length (\d\.\d\d)", ran.err.splitlines()[-1])[1]) for ran in (right, wrong)]  # type: ignore[index]  # the closing line always tells it
    assert lengths[0] > K + 0.8 and lengths[1] < FLOOR
    states = []
    for model in (whole, bad):
        with LLM(model, **NEXTN) as llm:
            llm.generate(PROMPTS, LONG)
            states.append(llm.stats()["speculative_health"])
    assert [state["state"] for state in states] == ["healthy", "drifting"]
    assert states[1]["accept_length"] < FLOOR


@pytest.mark.parametrize("layout", ["fused", "separate"])
def test_f23_a_slot_that_was_zeroed_collapses_in_both_layouts(layout: str, tmp_path: Path) -> None:
    _, bad = pair("zeroed shared experts", tmp_path)
    with LLM(bad, draft_shared_experts=layout, **NEXTN) as llm:
        llm.generate(PROMPTS, LONG)
        assert llm.stats()["speculative_health"]["state"] == "drifting"


def test_f23_proa_check_calls_a_pair_unhealthy_of_which_nothing_is_accepted(tmp_path: Path, verb: Verb) -> None:
    whole, bad = pair("another target's layer", tmp_path)
    words = ("--speculative", "nextn", "--num-draft-tokens", "2", "--dtype", "float32", "--threads", "1")
    good = verb("check", whole, *words, "--max-model-len", "256", "--kv-memory", "8MiB")
    assert good.code == 0 and good.out.rstrip().endswith("healthy"), good.out + good.err
    assert verb("check", bad, *words, "--max-model-len", "256", "--kv-memory", "8MiB").code == 5


# F24


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One target with four drafts inside: whole, and wrong in the ways above."""
    folder = tmp_path_factory.mktemp("lossless")
    config, tensors = twin("glm4_moe")
    found = {"whole": write_checkpoint(folder / "whole", config, tensors)}
    for number, (_, spoil) in enumerate(FAULTS.values()):
        found[f"wrong {number}"] = write_checkpoint(folder / f"wrong {number}", config, spoil(tensors))
    return found


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8, "seed": 7},
    "sampled with filters": {"temperature": 1.1, "seed": 8, "top_k": 30, "top_p": 0.9, "repetition_penalty": 1.2},
}
DRAFTERS = ("ngram 3", "standalone 3", "nextn 1", "nextn 3", "nextn 3 fused", "nextn auto")


def drafted(drafter: str, model: Path) -> dict[str, Any]:
    algorithm, *more = drafter.split()
    asks: dict[str, Any] = {**SETTINGS, "speculative": algorithm}
    if algorithm == "standalone":
        asks["draft"] = model
    if more and more[0] != "auto":
        asks["num_draft_tokens"] = int(more[0])
    return asks | ({"draft_shared_experts": "fused"} if "fused" in more else {})


@pytest.fixture(scope="module")
def plain(models: dict[str, Path]) -> Iterator[LLM]:
    with LLM(models["whole"], speculative="none", **SETTINGS) as llm:
        yield llm


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_f24_answers_are_those_of_plain_decoding_whatever_the_draft_does(
    drafter: str, models: dict[str, Path], plain: LLM
) -> None:
    expected = {way: said(plain, way) for way in WAYS}
    for name, model in models.items():
        if name != "whole" and drafter != "nextn 3":
            continue
        with LLM(model, **drafted(drafter, model)) as llm:
            for way, answers in expected.items():
                assert said(llm, way) == answers, (name, way)
            if drafter != "nextn auto":
                assert llm.stats()["speculative_decoding"]["num_draft_tokens"] > 0


def said(llm: LLM, way: str) -> list[Any]:
    params = SamplingParams(max_tokens=32, logprobs=1, ignore_eos=True, **WAYS[way])
    return [[(one.token_ids, one.text) for one in output.outputs] for output in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize("model", ["whole", "wrong 0"])
def test_f24_rejection_sampling_with_a_bundled_draft_follows_the_targets_distribution(
    model: str, models: dict[str, Path], plain: LLM
) -> None:
    """The second and third token together, of three ids each, against how often plain sampling says each pair."""
    from scipy.stats import chi2_contingency

    allowed = [20, 21, 22]
    params = [
        SamplingParams(temperature=2.5, seed=seed, max_tokens=3, allowed_token_ids=allowed, ignore_eos=True)
        for seed in range(300)
    ]
    with LLM(models[model], verification="rejection", **NEXTN) as llm:
        counts = torch.stack([pairs(llm, params), pairs(plain, [one_later(one) for one in params])])
    used = counts[:, counts.sum(0) > 10]
    assert used.shape[1] >= 4
    assert chi2_contingency(used.numpy()).pvalue > 1e-4


def one_later(params: SamplingParams) -> SamplingParams:
    """Another seed, so that the two samples are independent."""
    from dataclasses import replace

    return replace(params, seed=params.seed + 100_000)


def pairs(llm: LLM, params: list[SamplingParams]) -> torch.Tensor:
    counts = torch.zeros(9, dtype=torch.int64)
    for output in llm.generate([PROMPTS[0]] * len(params), params):
        first, second = output.outputs[0].token_ids[1:3]
        counts[3 * (first - 20) + second - 20] += 1
    return counts


@pytest.mark.parametrize("algorithm", ["eagle3", "dflash", "dspark"])
def test_f24_an_algorithm_that_is_not_there_yet_is_refused_by_name_and_nothing_else_drafts(
    algorithm: str, models: dict[str, Path], verb: Verb
) -> None:
    ran = verb("run", models["whole"], "x", "--speculative", algorithm)
    assert (ran.code, ran.out) == (2, "") and f"speculative = {algorithm}" in ran.err
