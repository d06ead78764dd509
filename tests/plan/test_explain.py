"""How plans read. Shapes and words are those of the interfaces text; goldens of public models are in tests/golden."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from proa.errors import ConfigError
from proa.kernels.cost import CostTable
from proa.plan.explain import cost_lines, explain_diff, explain_json, explain_table, explain_why, why_json
from tests.factories.headers import planned, write_tiny_headers

KNOBS = {
    "shared_experts", "linear_attention.decode", "linear_attention.prefill", "linear_attention.verify",
    "attention.decode", "attention.prefill", "attention.verify", "quantization", "moe_kernel", "matmul_kernel",
    "kv_dtype", "dtype", "numerics", "parallel",
}  # fmt: skip
SOURCES = {"asked", "checkpoint", "hardware", "constraint", "default"}
DECISION = {"value", "requested", "source", "rule", "reason", "inputs", "rejected", "notes"}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_headers(tmp_path_factory.mktemp("explain") / "llama", "llama")


def document(llama: Path, **settings: Any) -> dict[str, Any]:
    return json.loads(json.dumps(explain_json(planned(llama, **settings).plans, {})))


def test_the_json_has_the_keys_of_the_interfaces_text(llama: Path) -> None:
    found = document(llama, draft=llama)
    assert {"runners", "pair", "digest"} <= set(found)
    assert set(found["runners"]) == {"target", "draft"}
    for role, runner in found["runners"].items():
        assert {"family", "role", "checkpoint", "digest", "num_layers", "dtype", "decisions"} == set(runner)
        assert (runner["role"], runner["family"], runner["num_layers"], runner["dtype"]) == (
            role,
            "llama",
            3,
            "float32",
        )
        assert set(runner["decisions"]) >= KNOBS
        for decision in runner["decisions"].values():
            assert set(decision) == DECISION and decision["source"] in SOURCES
            assert all(set(entry) == {"value", "rule", "reason"} for entry in decision["rejected"])
    assert {"algorithm", "num_draft_tokens", "taps", "borrows", "vocab_map", "notes"} <= set(found["pair"])
    assert (found["pair"]["algorithm"], found["pair"]["num_draft_tokens"]) == ("standalone", 7)


def test_without_a_draft_the_json_says_null(llama: Path) -> None:
    found = document(llama)
    assert (found["runners"]["draft"], found["pair"]) == (None, None)


def test_a_knob_that_does_not_apply_says_so_in_the_documented_form(llama: Path) -> None:
    decision = document(llama)["runners"]["target"]["decisions"]["linear_attention.decode"]
    assert {key: decision[key] for key in ("value", "source", "reason")} == {
        "value": None, "source": "checkpoint", "reason": "0 linear-attention layers",
    }  # fmt: skip


def test_requested_shows_the_ask_beside_the_value(llama: Path) -> None:
    decisions = document(llama, dtype="bfloat16")["runners"]["target"]["decisions"]
    assert (decisions["dtype"]["requested"], decisions["dtype"]["value"]) == ("bfloat16", "bfloat16")
    assert decisions["kv_dtype"]["requested"] == "auto"


def test_the_table_has_a_line_per_decision_and_both_runners_side_by_side(llama: Path) -> None:
    plans = planned(llama, draft=llama, flags={"--draft.dtype": "bfloat16"}).plans
    lines = explain_table(plans).splitlines()
    assert "target (llama, 3 layers" in lines[0] and "draft (llama, 3 layers" in lines[0] and lines[0].endswith("why")
    (dtype,) = [line for line in lines if line.startswith("dtype ")]
    assert dtype.split()[:3] == ["dtype", "float32", "bfloat16"] and "draft: asked (--draft.dtype)" in dtype
    for knob in plans.target.decisions():
        assert any(line.startswith(f"{knob} ") for line in lines)
    assert any(line.startswith("linear_attention.decode") and "not applicable" in line for line in lines)
    assert any("pages" in line and line.startswith("memory") for line in lines)
    assert lines[-1] == f"plan {plans.digest}"


def test_the_table_of_one_runner_has_no_column_for_the_other(llama: Path) -> None:
    assert "draft" not in explain_table(planned(llama).plans).splitlines()[0]


def test_why_prints_every_condition_with_verdict_and_facts(llama: Path) -> None:
    text = explain_why(planned(llama).plans, "attention.decode")
    assert "target: attention.decode = reference" in text
    assert "native: kernel.native.isa (always) blocked: native needs avx2, fma and f16c" in text
    assert "triton: kernel.triton.device (always) blocked: triton needs a CUDA device" in text
    assert "[plan.device = cpu]" in text
    assert "native: kernel.native.compiler (always) holds  [caps.has_compiler = True]" in text


def test_why_answers_for_both_runners_and_for_all_phases_of_a_base_name(llama: Path) -> None:
    text = explain_why(planned(llama, draft=llama).plans, "attention")
    for role in ("target", "draft"):
        for phase in ("prefill", "decode", "verify"):
            assert f"{role}: attention.{phase} = reference" in text


def test_why_says_who_asked_and_what_was_overridden(llama: Path) -> None:
    text = explain_why(planned(llama, flags={"--threads": "64"}).plans, "threads")
    assert "requested 64 (flag --threads)" in text and "note threads.within_cores" in text


@pytest.mark.parametrize("knob", ["max_model_len", "memory.target_pages", "speculative", "kv-dtype", "head"])
def test_why_knows_what_the_runners_share_and_both_spellings(llama: Path, knob: str) -> None:
    assert knob.replace("-", "_") in explain_why(planned(llama).plans, knob)


def test_why_pair_prints_the_check_of_the_two_runners(llama: Path) -> None:
    assert "pair.ids_agree: holds" in explain_why(planned(llama, draft=llama).plans, "pair")
    assert "no draft runner" in explain_why(planned(llama).plans, "pair")


def test_why_of_an_unknown_knob_names_the_nearest(llama: Path) -> None:
    with pytest.raises(ConfigError, match=r"nearest: .*attention\.decode") as caught:
        explain_why(planned(llama).plans, "attention.decod")
    assert caught.value.slug == "plan/unknown-knob"


def test_why_as_json_has_what_the_text_has(llama: Path) -> None:
    (found,) = json.loads(json.dumps(why_json(planned(llama).plans, "matmul_kernel")))
    assert (found["runner"], found["knob"], found["value"]) == ("target", "matmul_kernel", "reference")
    assert {check["condition"] for check in found["checked"]} >= {"kernel.native.isa", "kernel.reference.self_test"}


def test_diff_shows_only_what_differs(llama: Path) -> None:
    lines = explain_diff(planned(llama, draft=llama, draft_page_size=4).plans).splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["page_size"]
    assert "same value" in explain_diff(planned(llama, draft=llama).plans)
    assert "no draft runner" in explain_diff(planned(llama).plans)


def test_measured_costs_stand_beside_the_plan_and_change_nothing_in_it(llama: Path) -> None:
    plans = planned(llama).plans
    table = CostTable(rows=(1, 4), seconds=(0.002, 0.003))
    bare, costed = explain_json(plans, {}), explain_json(plans, {"target": table})
    assert costed["costs"] == {"target": {"rows": [1, 4], "seconds": [0.002, 0.003], "digest": table.digest}}
    assert {**costed, "costs": {}} == bare
    assert cost_lines({"target": table}) == [
        f"target per forward, measured: 1 row 2 ms, 4 x1.50 (costs {table.digest[:8]})"
    ]
