"""Measured draft lengths from end to end: the cost table's file, what users see of it, and what it never changes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from proa import LLM, SamplingParams
from proa.cli.main import main
from proa.kernels.cost import CostTable, cost_path

SETTINGS = {"dtype": "float32", "threads": 1, "max_model_len": 512}
FLAGS = ("--dtype", "float32", "--threads", "1", "--max-model-len", "512")
LOOP = [7, 8, 9] * 6
PARAMS = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True, allowed_token_ids=[20, 21, 22])


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of cost tables, empty; what else is cached (compiled kernels) stays where it is."""
    monkeypatch.setattr("proa.plan.costs.cost_path", lambda _, *key: cost_path(tmp_path, *key))
    return tmp_path / "costs"


@pytest.fixture
def proa(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[str, str]]:
    """Runs a command line that succeeds; its stdout and stderr."""

    def run(*words: str | Path) -> tuple[str, str]:
        code = main([str(word) for word in words])
        captured = capsys.readouterr()
        assert code == 0, captured.err
        return captured.out, captured.err

    return run


def steep(path: Path) -> CostTable:
    """In the place of a measured table, one under which no proposal pays."""
    table = CostTable(rows=(1, 64), seconds=(0.001, 0.064))
    path.write_text(json.dumps(table.to_json()))
    return table


def test_costs_are_measured_once_and_kept(tiny: Callable[..., Path], cache: Path) -> None:
    with LLM(tiny("llama"), speculative="ngram", **SETTINGS) as llm:
        first = llm.costs["target"]
        assert llm.explain()["costs"] == {"target": first.to_json()}
        digest = llm.explain()["digest"]
    (path,) = cache.iterdir()
    written = path.stat().st_mtime_ns
    with LLM(tiny("llama"), speculative="ngram", **SETTINGS) as llm:
        assert llm.costs["target"] == first and path.stat().st_mtime_ns == written
    steep(path)
    with LLM(tiny("llama"), speculative="ngram", **SETTINGS) as llm:
        assert llm.costs["target"] != first and llm.explain()["digest"] == digest


def test_a_draft_has_a_table_of_its_own(tiny: Callable[..., Path], cache: Path) -> None:
    with LLM(tiny("llama"), draft=tiny("qwen3", seed=3), **SETTINGS) as llm:
        assert set(llm.costs) == {"target", "draft"}
        assert llm.stats()["draft_length"]["costs"]["draft"] == llm.costs["draft"].digest
    assert len(list(cache.iterdir())) == 2


@pytest.mark.parametrize("asked", [{}, {"speculative": "ngram", "num_draft_tokens": 3}, {"num_draft_tokens": 0}])
def test_where_no_length_is_open_nothing_is_measured(tiny: Callable[..., Path], cache: Path, asked) -> None:
    with LLM(tiny("llama"), **asked, **SETTINGS) as llm:
        assert not llm.costs and not cache.exists()
        length = llm.stats()["draft_length"]
        assert length == ({"mode": "fixed", "longest": 3} if "speculative" in asked else None)


def test_where_speculation_does_not_pay_the_answer_stays_and_stats_say_so(
    tiny: Callable[..., Path], cache: Path
) -> None:
    with LLM(tiny("llama"), speculative="none", **SETTINGS) as llm:
        wanted = llm.generate([LOOP], PARAMS)[0].outputs[0].token_ids
    with LLM(tiny("llama"), speculative="ngram", **SETTINGS) as llm:
        assert llm.generate([LOOP], PARAMS)[0].outputs[0].token_ids == wanted
    (path,) = cache.iterdir()
    table = steep(path)
    with LLM(tiny("llama"), speculative="ngram", **SETTINGS) as llm:
        assert llm.generate([LOOP], PARAMS)[0].outputs[0].token_ids == wanted
        found = llm.stats()["draft_length"]
    assert not found["pays"] and found["mean"] == 0 and found["costs"]["target"] == table.digest


def test_the_command_line_shows_costs_beside_the_plan(tiny: Callable[..., Path], cache: Path, proa) -> None:
    model, ask = tiny("llama"), ("--speculative", "ngram", *FLAGS)
    run = ("run", model, "one two one two", "--raw", "--temperature", "0", "--ignore-eos", "--max-tokens", "150", *ask)
    assert "per forward, measured" not in proa("explain", model, *ask)[0]
    closing = proa(*run)[1].rstrip().splitlines()[-1]
    (path,) = cache.iterdir()
    digest = json.loads(path.read_text())["digest"]
    assert closing.endswith(f"target costs {digest[:8]}")
    *_, plan, costs = proa("explain", model, *ask)[0].splitlines()
    assert plan.startswith("plan ") and costs.startswith("target per forward, measured: 1 row ") and digest[:8] in costs
    assert json.loads(proa("explain", model, "--json", *ask)[0])["costs"]["target"]["digest"] == digest
    assert f"costs {digest[:8]}" in proa("check", model, *ask)[0]
    steep(path)
    noted = proa(*run)[1]
    assert noted.count("speculative/does-not-pay: ") == 1
    assert "speculation does not pay here: plain decoding" in noted.rstrip().splitlines()[-1]


def test_a_damaged_table_is_named_and_measured_anew(tiny: Callable[..., Path], cache: Path, proa) -> None:
    run = ("run", tiny("llama"), "one two", "--speculative", "ngram", "--raw", "--max-tokens", "4", *FLAGS)
    proa(*run)
    (path,) = cache.iterdir()
    path.write_text('{"rows": [1, 2')
    assert f"{path}: not a cost table" in proa(*run)[1]
    assert json.loads(path.read_text())["rows"][0] == 1
