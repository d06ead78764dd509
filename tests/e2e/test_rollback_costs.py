"""The way of rollback follows from what was measured on this host: once, at start, for the plan that is then made."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from proa import LLM, SamplingParams, explain
from tests.factories.hybrid_runners import write_tiny_hybrid

SETTINGS: dict[str, Any] = {
    "dtype": "float32", "threads": 1, "max_model_len": 128, "kv_memory": "8MiB", "num_draft_tokens": 3,
    "linear_attention": "torch",
}  # fmt: skip
NGRAM = {**SETTINGS, "speculative": "ngram"}
PARAMS = SamplingParams(temperature=1.0, seed=5, max_tokens=24, ignore_eos=True, allowed_token_ids=[7, 8, 9])
PROMPT = [7, 8, 9] * 6


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_hybrid("qwen3_next", tmp_path_factory.mktemp("rollback") / "hybrid")


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of rollback costs, not there yet; what else is cached stays where it is."""
    path = tmp_path / "costs" / "rollback.json"
    for module in ("plan.prepare", "engine.costs"):
        monkeypatch.setattr(f"proa.{module}.rollback_path", lambda _: path)
    return path


def rollback(document: Any, role: str = "target") -> Any:
    return document["runners"][role]["decisions"]["rollback"]


def prefer(path: Path, way: str) -> None:
    """As if that had been measured to be faster, of every case in the file."""
    costs = {other: 0.001 if other == way else 0.004 for other in ("replay", "states")}
    path.write_text(json.dumps(dict.fromkeys(json.loads(path.read_text()), costs)))


def test_a_first_start_measures_and_plans_with_what_it_found(hybrid: Path, file: Path) -> None:
    before = rollback(explain(hybrid, **NGRAM))
    assert "nobody has measured" in before["reason"] and not file.exists()
    with LLM(hybrid, **NGRAM) as llm:
        found = llm.explain()
    ((case, costs),) = json.loads(file.read_text()).items()
    assert "decode torch; verify torch" in case and "3 tokens verified" in case
    assert rollback(found)["inputs"]["measured.rollback"] == costs
    assert rollback(found)["reason"].startswith("measured: ")
    later = rollback(explain(hybrid, **NGRAM))
    assert (later["value"], later["reason"]) == (rollback(found)["value"], rollback(found)["reason"])
    assert found["digest"] == explain(hybrid, **NGRAM)["digest"]


def test_a_later_start_measures_nothing(hybrid: Path, file: Path) -> None:
    with LLM(hybrid, **NGRAM):
        written = file.stat().st_mtime_ns
    with LLM(hybrid, **NGRAM):
        assert file.stat().st_mtime_ns == written


def test_a_table_that_prefers_the_other_way_changes_the_decision_what_runs_and_no_answer(
    hybrid: Path, file: Path
) -> None:
    answers, digests = {}, set()
    with LLM(hybrid, **NGRAM):
        pass
    for way in ("replay", "states"):
        prefer(file, way)
        with LLM(hybrid, **NGRAM) as llm:
            decision = rollback(llm.explain())
            assert (decision["value"], decision["source"]) == (way, "hardware")
            assert ("4 ms a step with replay" in decision["reason"]) == (way == "states")
            answers[way] = llm.generate([PROMPT], PARAMS)[0].outputs[0].token_ids
            replayed = [op for op in llm.stats()["kernel_calls"]["target"] if op.startswith("delta.replay")]
            assert bool(replayed) == (way == "replay")
            digests.add(llm.explain()["digest"])
    assert answers["replay"] == answers["states"] and len(digests) == 1


def test_target_and_draft_are_measured_each_for_its_own_rows(hybrid: Path, file: Path) -> None:
    with LLM(hybrid, draft=hybrid, **SETTINGS) as llm:
        assert rollback(llm.explain(), "draft")["reason"].startswith("measured: ")
    assert {case.split("; ")[-2] for case in json.loads(file.read_text())} == {"3 tokens verified", "3 tokens drafted"}


@pytest.mark.parametrize(
    "asked", [{"speculative": "none"}, {"speculative": "ngram", "rollback": "replay"}, {"num_draft_tokens": 0}]
)
def test_where_nothing_is_open_nothing_is_measured(
    hybrid: Path, tiny: Callable[..., Path], file: Path, asked: dict[str, Any]
) -> None:
    settings = {**SETTINGS, **asked}
    if asked == {"speculative": "none"}:
        del settings["num_draft_tokens"]
    with LLM(hybrid, **settings):
        assert not file.exists()
    del settings["linear_attention"]
    settings.pop("rollback", None)
    with LLM(tiny("llama"), **settings):
        assert not file.exists()


def test_a_damaged_file_is_measured_anew(hybrid: Path, file: Path) -> None:
    file.parent.mkdir()
    file.write_text("{")
    with LLM(hybrid, **NGRAM) as llm:
        assert rollback(llm.explain())["reason"].startswith("measured: ")
    assert len(json.loads(file.read_text())) == 1
