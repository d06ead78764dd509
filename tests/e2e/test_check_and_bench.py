"""`proa check` tells a good pair from a bad one; `proa bench` prints figures that add up."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.command_line import proa
from tests.factories.scripts import script, write_script

SETTINGS = ("--dtype", "float32", "--threads", "1", "--max-model-len", "256")
SCRIPT = list(range(300, 360))


def test_a_model_without_a_draft_is_checked_with_ngrams(tiny: Callable[..., Path]) -> None:
    done = proa("check", tiny("llama"), *SETTINGS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("healthy")
    assert "ngram against plain: identical" in done.stdout
    assert "self-test of onednn kernels: " in done.stdout


def test_a_pair_is_checked_greedy_and_sampled_and_both_ledgers_are_told(tiny: Callable[..., Path]) -> None:
    done = proa("check", tiny("llama"), "--draft", tiny("llama"), "--json", *SETTINGS)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["healthy"] is True
    assert "onednn" in told["self_tests"]
    assert set(told["lossless"]) == {"greedy", "sampled"}
    assert set(told["ledger"]["runners"]) == {"target", "draft"}


def test_a_draft_that_is_never_right_makes_the_pair_unhealthy_with_exit_code_5(tmp_path: Path) -> None:
    target = write_script(tmp_path / "target", script(SCRIPT))
    draft = write_script(tmp_path / "draft", [270] * 512)
    done = proa("check", target, "--draft", draft, *SETTINGS)
    assert done.returncode == 5
    assert "none of" in done.stderr
    assert "check/unhealthy" in done.stderr
    assert done.stdout.rstrip().endswith("unhealthy")


def test_bench_tells_speeds_and_the_accept_length(tiny: Callable[..., Path]) -> None:
    figures = ("--peer", "none", "--rounds", "3", "--prompt-tokens", "16", "--new-tokens", "48", "--batch", "1", "2")
    done = proa("bench", tiny("llama"), "--speculative", "ngram", "--json", *figures, *SETTINGS)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert set(told["tokens_per_second"]) == {"prefill", "decode b1", "decode b2"}
    assert all(figure["proa"] > 0 and figure["peer"] is None for figure in told["tokens_per_second"].values())
    assert told["speculative_decoding"]["mean_acceptance_length"] >= 1.0
    assert told["peer"] is None
    assert list(told["kernel_calls"]) == ["target"] and all(told["kernel_calls"]["target"].values())
    table = proa("bench", tiny("llama"), *figures, *SETTINGS)
    assert "decode b2" in table.stdout
    [roof] = [line for line in table.stdout.splitlines() if line.startswith("  weights")]
    assert float(roof.split("GB/s")[0].split()[-1]) >= 0 and "probed" in roof


@pytest.mark.oracle
@pytest.mark.slow
def test_bench_measures_transformers_in_turns_where_it_is_installed(tiny: Callable[..., Path]) -> None:
    pytest.importorskip("transformers")
    figures = ("--rounds", "2", "--prompt-tokens", "16", "--new-tokens", "24", "--batch", "1")
    done = proa("bench", tiny("llama"), "--json", *figures, *SETTINGS)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["peer"]["name"] == "transformers"
    for figure in told["tokens_per_second"].values():
        assert figure["peer"] > 0 and figure["proa"] > 0 and figure["ratio"] > 0
