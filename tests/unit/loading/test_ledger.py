"""The ledger closes in both directions, and says what is wrong by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from proa.arch.weights import Place, Tied
from proa.errors import WeightError
from proa.loading.ledger import LoadLedger, ledger_document, unclaimed
from tests.factories.checkpoints import tiny_config
from tests.factories.headers import planned, write_headers

QKV = "model.layers.1.self_attn.q_proj.weight"


def ledger_of(path: Path, **asks: object) -> LoadLedger:
    return LoadLedger(planned(path, **asks).target)


def settle(ledger: LoadLedger) -> None:
    """What loading does when nothing goes wrong."""
    for name, entry in ledger.entries.items():
        if isinstance(entry.claim, Place):
            ledger.fill(name)
        elif isinstance(entry.claim, Tied):
            ledger.compare(name, None)


def test_a_ledger_closes_when_every_row_was_filled_once(tiny: Callable[..., Path]) -> None:
    ledger = ledger_of(tiny("llama"))
    settle(ledger)
    ledger.close()
    said = ledger.as_json()
    assert said["tensors"]["placed"] == said["tensors"]["total"] == len(ledger.entries)
    assert said["parameters"]["filled"] == said["parameters"]["total"]
    assert said["unexpected"] == said["missing"] == []


def test_a_tensor_that_was_not_filled_leaves_the_ledger_open(tiny: Callable[..., Path]) -> None:
    ledger = ledger_of(tiny("llama"))
    for name, entry in ledger.entries.items():
        if isinstance(entry.claim, Place) and name != QKV:
            ledger.fill(name)
    with pytest.raises(WeightError, match=r"layers\.1\.attn\.qkv\.weight: missing") as caught:
        ledger.close()
    assert caught.value.slug == "weights/ledger" and not ledger.is_closed


def test_a_tensor_that_was_filled_twice_leaves_the_ledger_open(tiny: Callable[..., Path]) -> None:
    ledger = ledger_of(tiny("llama"))
    settle(ledger)
    ledger.fill(QKV)
    with pytest.raises(WeightError, match=r"layers\.1\.attn\.qkv\.weight: twice"):
        ledger.close()


def test_a_tied_copy_that_was_not_compared_leaves_the_ledger_open(tmp_path: Path) -> None:
    path = write_headers(tmp_path, tiny_config("qwen2"), dtype="F32", add={"lm_head.weight": (512, 64)})
    ledger = ledger_of(path)
    assert ledger.as_json()["tensors"]["tied"] == 1
    for name, entry in ledger.entries.items():
        if isinstance(entry.claim, Place):
            ledger.fill(name)
    with pytest.raises(WeightError, match=r"lm_head\.weight: never compared with embed\.weight"):
        ledger.close()


def test_a_tied_copy_that_differs_is_refused_with_both_names(tmp_path: Path) -> None:
    path = write_headers(tmp_path, tiny_config("qwen2"), dtype="F32", add={"lm_head.weight": (512, 64)})
    with pytest.raises(WeightError, match=r"lm_head\.weight .*model\.embed_tokens\.weight .*row 7") as caught:
        ledger_of(path).compare("lm_head.weight", 7)
    assert caught.value.slug == "weights/tied-differs"


def test_a_closed_ledger_takes_nothing_more(tiny: Callable[..., Path]) -> None:
    ledger = ledger_of(tiny("llama"))
    settle(ledger)
    ledger.close()
    with pytest.raises(RuntimeError, match="not to be filled"):
        ledger.fill(QKV)


def test_the_same_fault_in_every_layer_is_one_line(tmp_path: Path) -> None:
    config = tiny_config("llama", num_hidden_layers=30)
    extra = {f"model.layers.{i}.self_attn.q_proj.bias": (64,) for i in range(30)}
    path = write_headers(tmp_path, config, dtype="F32", add=extra)
    with pytest.raises(WeightError) as caught:
        ledger_of(path).refuse_findings()
    error = caught.value
    assert error.slug == "weights/unclaimed" and error.role == "target" and error.exit_code == 3
    assert "30 tensors are without a place" in error.message
    lines = [fact for fact in error.facts if "q_proj.bias" in fact]
    assert len(lines) == 1 and "(and 29 more like it)" in lines[0]
    assert error.hint is not None and "--allow-unexpected" in error.hint


def test_a_renamed_tensor_is_told_with_the_name_that_was_expected(tmp_path: Path) -> None:
    renamed = "model.layers.1.self_attn.q_projection.weight"
    path = write_headers(tmp_path, tiny_config("llama"), dtype="F32", drop=[QKV], add={renamed: (64, 64)})
    with pytest.raises(WeightError) as caught:
        ledger_of(path).refuse_findings()
    text = str(caught.value)
    assert f"unclaimed: {renamed}" in text and f"missing: {QKV}" in text
    assert f"nearest: {QKV}" in text and f"nearest: {renamed}" in text
    assert "target plan: head = own" in text


def test_a_missing_tensor_names_the_parameter_and_the_rows_that_it_fills(tmp_path: Path) -> None:
    path = write_headers(tmp_path, tiny_config("llama"), dtype="F32", drop=["model.layers.2.self_attn.v_proj.weight"])
    ledger = ledger_of(path)
    with pytest.raises(WeightError, match=r"fills layers\.2\.attn\.qkv\.weight rows 96\.\.128") as caught:
        ledger.refuse_findings()
    assert caught.value.slug == "weights/missing"
    assert ledger.as_json()["missing"] == ["layers.2.attn.qkv.weight"]


def test_the_most_telling_fault_gives_the_error_its_slug(tmp_path: Path) -> None:
    """A wrong shape says more than a stray name."""
    name = "model.norm.weight"
    path = write_headers(tmp_path, tiny_config("llama"), dtype="F32", drop=[name], add={name: (65,), "stray": (1,)})
    with pytest.raises(WeightError, match=r"model\.norm\.weight  F32 \[65\] .* expected \[64\]") as caught:
        ledger_of(path).refuse_findings()
    assert caught.value.slug == "weights/shape" and "unclaimed: stray" in str(caught.value)


def test_left_out_tensors_are_listed_with_their_reason(tmp_path: Path) -> None:
    extra = {"model.rotary_emb.inv_freq": (8,), "extra.one.weight": (2,), "extra.two.weight": (2,)}
    path = write_headers(tmp_path, tiny_config("llama"), dtype="F32", add=extra)
    ledger = ledger_of(path, allow_unexpected=["extra.*"])
    ledger.refuse_findings()
    left_out = {entry["pattern"]: (entry["count"], entry["reason"]) for entry in ledger.as_json()["left_out"]}
    assert left_out["extra.*"] == (2, "allowed by --allow-unexpected")
    assert left_out["model.rotary_emb.inv_freq"][0] == 1


def test_groups_count_tensors_by_template_type_and_shape(tiny: Callable[..., Path]) -> None:
    groups = {group["template"]: group for group in ledger_of(tiny("llama")).as_json()["groups"]}
    assert groups["model.layers.#.self_attn.k_proj.weight"] == {
        "template": "model.layers.#.self_attn.k_proj.weight", "count": 3, "action": "placed",
        "parameter": "layers.#.attn.qkv.weight", "dtype": "F32", "shape": [32, 64],
    }  # fmt: skip


def test_the_union_of_two_ledgers_covers_a_shared_checkpoint(tmp_path: Path, tiny: Callable[..., Path]) -> None:
    """A tensor that one of two runners over the same files accounts for is accounted for."""
    stray = "model.layers.0.self_attn.stray.weight"
    path = write_headers(tmp_path, tiny_config("llama"), dtype="F32", add={stray: (2,)})
    strict, lenient = ledger_of(path), ledger_of(path, allow_unexpected=["*.stray.*"])
    assert unclaimed([strict]) == [stray]
    assert unclaimed([strict, lenient]) == []
    assert unclaimed([ledger_of(tiny("llama")), strict]) == [stray]


@pytest.mark.parametrize("layout", ["fused", "separate"])
def test_target_and_bundled_draft_divide_a_checkpoint_between_them(layout: str, tmp_path: Path) -> None:
    path = write_headers(tmp_path, tiny_config("glm4_moe"), dtype="F32")
    resolved = planned(path, speculative="nextn", shared_experts=layout)
    ledgers = {plan.plan.role.value: LoadLedger(plan) for plan in resolved.runners}
    document = ledger_document(ledgers, [plan.checkpoint for plan in resolved.runners])
    accounts = [document["runners"][role]["tensors"] for role in ("target", "draft")]
    assert sum(account["total"] for account in accounts) == len(resolved.target.checkpoint.tensors)
    assert [account["unexpected"] for account in accounts] == [0, 0] and document["unclaimed"] == []
    shared_parts = 3 if layout == "fused" else 0
    assert [account["fused"] for account in accounts] == [2 * shared_parts, shared_parts]
    assert [account["borrowed"] for account in accounts] == [0, 2]
    for account in accounts:
        assert account["total"] == sum(count for state, count in account.items() if state != "total")


def test_a_draft_that_nobody_asked_for_is_left_out_with_that_reason(tmp_path: Path) -> None:
    ledger = ledger_of(write_headers(tmp_path, tiny_config("glm4_moe"), dtype="F32"))
    account = ledger.as_json()
    last = [name for name in ledger.entries if name.startswith("model.layers.3.")]
    assert account["tensors"]["left_out"] == len(last) > 0
    assert {group["reason"] for group in account["left_out"]} == {"nextn draft, 1 layer, not asked for"}


def test_a_tensor_that_each_runner_takes_for_the_others_is_unclaimed(tmp_path: Path) -> None:
    path = write_headers(tmp_path, tiny_config("glm4_moe"), dtype="F32")
    target, draft = (LoadLedger(plan) for plan in planned(path, speculative="nextn").runners)
    assert unclaimed([target, draft]) == []
    name = "model.layers.3.eh_proj.weight"
    del draft.entries[name]
    draft.elsewhere.add(name)
    assert unclaimed([target, draft]) == [name]


def test_the_document_counts_shared_files_once(tiny: Callable[..., Path]) -> None:
    resolved = planned(tiny("llama"), draft=tiny("llama"))
    ledgers = {plan.plan.role.value: LoadLedger(plan) for plan in resolved.runners}
    document = ledger_document(ledgers, [plan.checkpoint for plan in resolved.runners])
    assert set(document["runners"]) == {"target", "draft"} and document["unclaimed"] == []
    assert document["files"]["shards"] == 1
    assert document["files"]["total_bytes"] == (tiny("llama") / "model.safetensors").stat().st_size
