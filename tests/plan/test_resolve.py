"""resolve() as a whole: pure, stable digests, and a draft that never sees a decision of its target."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proa.arch.weights import LeftOut, Unknown
from proa.errors import ConfigError, WeightError
from proa.kernels.caps import DeviceCaps
from proa.plan.decision import Decision
from tests.factories.checkpoints import FAMILIES, tiny_config
from tests.factories.headers import GPU_HOST, LAPTOP, planned, write_headers, write_tiny_headers


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("resolve")
    return {family: write_tiny_headers(root / family, family) for family in FAMILIES}


TARGET_ASKS = {
    "target_dtype": ["auto", "float32", "bfloat16"],
    "target_kv_dtype": ["auto", "float32", "bfloat16"],
    "target_page_size": ["auto", 4, 32],
    "target_attention_decode": ["auto", "reference"],
    "target_matmul_kernel": ["auto", "reference"],
    "target_quantization": ["auto", "none"],
    "target_numerics": ["auto", "fast"],
    "max_num_seqs": ["auto", 1, 8],
    "kv_memory": ["auto", "8MiB"],
}


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    family=st.sampled_from(FAMILIES),
    asks=st.fixed_dictionaries({}, optional={key: st.sampled_from(values) for key, values in TARGET_ASKS.items()}),
)
def test_no_target_changes_the_plan_of_its_draft(models: dict[str, Path], family: str, asks: dict[str, Any]) -> None:
    draft = models["qwen2"]
    alone = planned(draft, draft=draft).plans.draft
    with_target = planned(models[family], draft=draft, **asks).plans.draft
    assert alone is not None and with_target is not None
    assert (with_target, with_target.digest) == (alone, alone.digest)


def test_a_different_draft_changes_nothing_in_its_target(models: dict[str, Path]) -> None:
    alone = planned(models["llama"]).plans.target
    for family in FAMILIES:
        assert planned(models["llama"], draft=models[family], draft_dtype="bfloat16").plans.target == alone


def test_the_same_inputs_give_the_same_plans(models: dict[str, Path]) -> None:
    first, second = (planned(models["llama"], draft=models["qwen3"]).plans for _ in range(2))
    assert (first, first.digest) == (second, second.digest)


@pytest.mark.parametrize(
    "asks",
    [
        {"dtype": "bfloat16"},
        {"page_size": 4},
        {"kv_dtype": "bfloat16"},
        {"attention_decode": "reference"},
        {"device": "meta"},
    ],
)
def test_every_ask_that_changes_the_plan_changes_its_digest(models: dict[str, Path], asks: dict[str, Any]) -> None:
    before, after = planned(models["llama"]).plans, planned(models["llama"], **asks).plans
    assert before.target.digest != after.target.digest and before.digest != after.digest


@pytest.mark.parametrize(
    "asks", [{"max_num_seqs": 3}, {"prefill_chunk": 7}, {"threads": 2}, {"speculative": "ngram"}, {"max_model_len": 64}]
)
def test_what_both_runners_share_changes_the_digest_of_the_whole_only(
    models: dict[str, Path], asks: dict[str, Any]
) -> None:
    before, after = planned(models["llama"]).plans, planned(models["llama"], **asks).plans
    assert before.target.digest == after.target.digest and before.digest != after.digest


def test_free_memory_and_the_place_of_the_files_are_in_no_digest(models: dict[str, Path], tmp_path: Path) -> None:
    before = planned(models["llama"]).plans
    busy = planned(models["llama"], caps=replace(LAPTOP, memory_available=2**30)).plans
    elsewhere = planned(write_tiny_headers(tmp_path / "copy", "llama")).plans
    assert before.memory.target_pages.inputs != busy.memory.target_pages.inputs
    assert before.digest == busy.digest == elsewhere.digest


def test_another_model_has_another_digest(models: dict[str, Path], tmp_path: Path) -> None:
    wider = write_tiny_headers(tmp_path / "wide", "llama", intermediate_size=192)
    assert planned(models["llama"]).plans.target.digest != planned(wider).plans.target.digest


@pytest.mark.parametrize("caps", [LAPTOP, GPU_HOST])
def test_every_leaf_has_a_rule_a_reason_and_the_facts_that_it_read(models: dict[str, Path], caps: DeviceCaps) -> None:
    resolved = planned(models["llama"], draft=models["qwen3"], caps=caps)
    for runner in resolved.runners:
        for knob, decision in runner.plan.decisions().items():
            assert isinstance(decision, Decision)
            assert decision.knob == knob and decision.rule and decision.reason


def test_unknown_config_keys_become_one_warning_each(tmp_path: Path) -> None:
    model = write_headers(tmp_path / "m", tiny_config("llama") | {"harmless": 1, "other": {"a": 1}})
    resolved = planned(model)
    assert [line.split(": ")[0] for line in resolved.warnings] == ["target", "target"]
    assert "unknown key harmless = 1" in resolved.warnings[0] and "config.json" in resolved.warnings[0]
    assert planned(write_tiny_headers(tmp_path / "n", "llama")).warnings == ()


def test_an_error_in_the_drafts_config_names_the_drafts_file(models: dict[str, Path], tmp_path: Path) -> None:
    draft = write_headers(tmp_path / "d", tiny_config("llama") | {"sliding_window": 8})
    with pytest.raises(ConfigError, match=f"{draft}/config.json: sliding_window = 8"):
        planned(models["llama"], draft=draft)


# --allow-unexpected


def test_a_glob_leaves_out_unknown_tensors_only(tmp_path: Path) -> None:
    model = write_headers(tmp_path / "m", tiny_config("llama"), add={"extra.a": (1,), "extra.b": (1,), "other": (1,)})
    names = planned(model, allow_unexpected=["extra.*"]).target.names
    assert isinstance(names.claim("extra.a"), LeftOut) and isinstance(names.claim("extra.b"), LeftOut)
    assert isinstance(names.claim("other"), Unknown)
    assert isinstance(planned(model).target.names.claim("extra.a"), Unknown)


@pytest.mark.parametrize("glob", ["lm_head.weight", "lm_head.*", "*"])
def test_a_glob_may_not_cover_a_tensor_that_another_layout_would_place(tmp_path: Path, glob: str) -> None:
    tied = write_headers(
        tmp_path / "m", tiny_config("llama", tie_word_embeddings=True), add={"lm_head.weight": (512, 64)}
    )
    with pytest.raises(WeightError, match=r"lm_head\.weight") as caught:
        planned(tied, allow_unexpected=[glob])
    assert (caught.value.slug, caught.value.exit_code) == ("weights/glob-hides-tensor", 3)


def test_a_glob_over_placed_tensors_changes_nothing(models: dict[str, Path]) -> None:
    plain, wide = planned(models["llama"]), planned(models["llama"], allow_unexpected=["model.*"])
    assert [plain.target.names.claim(n) for n in plain.target.checkpoint.tensors] == [
        wide.target.names.claim(n) for n in wide.target.checkpoint.tensors
    ]
