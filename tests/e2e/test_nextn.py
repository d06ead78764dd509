"""A checkpoint that bundles a next-token layer, from the command line: what is told of it, and when it goes wrong."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from proa import LLM, SamplingParams
from proa.kernels.cost import cost_path
from tests.e2e.command_line import proa
from tests.factories.foresight import write_foreseeing

SETTINGS = ("--dtype", "float32", "--threads", "1", "--max-model-len", "512", "--kv-memory", "8MiB")
ASK = ("--raw", "--temperature", "0", "--ignore-eos", "--speculative", "nextn")


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_foreseeing("glm4_moe", tmp_path_factory.mktemp("right"))


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Loads without a word, and is no better than chance."""
    return write_foreseeing("glm4_moe", tmp_path_factory.mktemp("wrong"), is_right=False)


def test_run_ends_with_the_two_runners_decisions_and_the_accept_length(right: Path) -> None:
    done = proa("run", right, "the plan", *ASK, "--num-draft-tokens", "3", "--max-tokens", "120", *SETTINGS)
    assert done.returncode == 0, done.stderr
    target, draft, last = done.stderr.rstrip().splitlines()[-3:]
    for line, role in ((target, r"target \(glm4_moe\)"), (draft, r"draft \(glm4_moe/nextn\)")):
        words = r"dtype float32, quantization none, shared_experts separate, moe_kernel \w+, matmul_kernel \w+"
        assert re.fullmatch(rf"{role}: {words}, attention \w+", line), line
    found = re.match(r"120 tokens, [\d.]+ tok/s, accept length (\d\.\d\d) \((\d+%)( \d+%)*\), ledger closed", last)
    assert found, last
    assert 1.3 < float(found[1]) <= 4.0
    assert "accept-drift" not in done.stderr


def test_the_draft_s_own_decision_stands_in_its_own_line(right: Path) -> None:
    ask = (*ASK, "--num-draft-tokens", "1", "--max-tokens", "4", "--draft.shared-experts", "fused", *SETTINGS)
    done = proa("run", right, "x", *ask)
    assert done.returncode == 0, done.stderr
    target, draft, _ = done.stderr.rstrip().splitlines()[-3:]
    assert "shared_experts separate" in target and "shared_experts fused" in draft


def test_a_draft_that_loads_and_is_never_right_is_told_once_with_figures(right: Path, wrong: Path) -> None:
    ask = (*ASK, "--num-draft-tokens", "2", "--max-tokens", "200", *SETTINGS)
    bad, good = proa("run", wrong, "the plan", *ask), proa("run", right, "the plan", *ask)
    assert bad.returncode == good.returncode == 0, bad.stderr
    assert bad.stdout == good.stdout  # the targets are the same, and a draft changes no text
    told = [line for line in bad.stderr.splitlines() if "speculative/accept-drift" in line]
    assert len(told) == 1
    assert re.search(r"accept length 1\.[0-2]\d over the last 64 verify steps \(1\.[0-2]\d over all \d+\)", told[0])
    assert "speculative/accept-drift" not in good.stderr


def test_stats_tell_a_draft_that_drifts_from_one_that_does_not(right: Path, wrong: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    found = {}
    for path in (right, wrong):
        with LLM(path, speculative="nextn", num_draft_tokens=2, dtype="float32", threads=1, kv_memory="8MiB") as llm:
            nothing = {"state": "unknown", "accept_length": None, "best_accept_length": None}
            assert llm.stats()["speculative_health"] == nothing
            llm.generate([10, 11, 12], params)
            found[path] = llm.stats()["speculative_health"]
    assert found[right]["state"] == "healthy" and found[right]["accept_length"] > 1.3
    assert found[wrong]["state"] == "drifting" and found[wrong]["accept_length"] < 1.3
    with LLM(right, speculative="ngram", dtype="float32", threads=1, kv_memory="8MiB") as llm:
        assert llm.stats()["speculative_health"] is None


def test_the_costs_of_a_layer_that_begins_with_hidden_rows_are_measured(
    right: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proa.plan.costs.cost_path", lambda _, *key: cost_path(tmp_path, *key))
    with LLM(right, speculative="nextn", dtype="float32", threads=1, max_model_len=512, kv_memory="8MiB") as llm:
        assert set(llm.costs) == {"target", "draft"}
        assert llm.stats()["draft_length"]["costs"]["draft"] == llm.costs["draft"].digest
        assert min(llm.costs["draft"].seconds) > 0
    assert len(list((tmp_path / "costs").iterdir())) == 2


def test_a_plan_for_more_ranks_is_shown_and_not_run(right: Path) -> None:
    ask = ("--speculative", "nextn", "--expert-parallel", "2", *SETTINGS)
    assert proa("explain", right, *ask).returncode == 0
    done = proa("run", right, "x", *ask)
    assert (done.returncode, done.stdout) == (4, "")
    assert "plan/more-ranks" in done.stderr
