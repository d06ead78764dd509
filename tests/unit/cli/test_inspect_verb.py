"""`proa inspect` as typed: the account of every tensor from headers, and exit 3 for what a load would refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from proa.cli.main import main
from tests.factories.checkpoints import tensor_shapes, tiny_config
from tests.factories.headers import write_headers, write_tiny_headers

TENSORS = {
    "total", "placed", "fused", "borrowed", "tied", "left_out", "unexpected",
}  # fmt: skip
PARAMETERS = {"total", "filled", "tied", "borrowed", "computed", "missing", "twice"}


def proa(*words: str | Path) -> int:
    return main([str(word) for word in words])


def account(capsys: pytest.CaptureFixture[str], *words: str | Path, code: int = 0) -> dict[str, Any]:
    assert proa("inspect", *words, "--json") == code
    return json.loads(capsys.readouterr().out)


def test_the_json_has_the_keys_of_the_interfaces_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_tiny_headers(tmp_path / "m", "llama")
    found = account(capsys, model)
    assert {"runners", "files", "unclaimed"} <= set(found) and found["unclaimed"] == []
    runner = found["runners"]["target"]
    assert (set(runner["tensors"]), set(runner["parameters"])) == (TENSORS, PARAMETERS)
    assert {"unexpected", "missing", "left_out", "groups"} <= set(runner)
    assert runner["tensors"]["total"] == runner["tensors"]["placed"] == len(dict(tensor_shapes(tiny_config("llama"))))
    assert all({"template", "count", "action", "parameter", "dtype", "shape"} == set(g) for g in runner["groups"])
    assert {"total_bytes", "shards", "not_in_index", "damaged"} == set(found["files"])


def test_a_draft_has_an_account_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, draft = write_tiny_headers(tmp_path / "t", "llama"), write_tiny_headers(tmp_path / "d", "qwen2")
    found = account(capsys, target, "--draft", draft)
    assert set(found["runners"]) == {"target", "draft"}
    assert found["runners"]["draft"]["tensors"]["total"] == len(dict(tensor_shapes(tiny_config("qwen2"))))


def test_an_unexpected_tensor_exits_with_3_and_comes_with_the_nearest_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    extra = {f"model.layers.{layer}.mlp.up_prj.weight": (128, 64) for layer in range(3)}
    model = write_headers(tmp_path / "m", tiny_config("llama"), add=extra)
    assert proa("inspect", model) == 3
    err = capsys.readouterr().err
    assert "weights/unclaimed" in err and "and 2 more like it" in err and "model.layers.0.mlp.up_proj.weight" in err
    found = account(capsys, model, code=3)
    assert set(found["unclaimed"]) == set(extra) == set(found["runners"]["target"]["unexpected"])
    assert {entry["kind"] for entry in found["runners"]["target"]["wrong"]} == {"unclaimed"}


def test_a_missing_tensor_exits_with_3_and_names_the_parameter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_headers(tmp_path / "m", tiny_config("llama"), drop=["model.layers.1.self_attn.k_proj.weight"])
    assert account(capsys, model, code=3)["runners"]["target"]["missing"] == ["layers.1.attn.qkv.weight"]
    assert proa("inspect", model) == 3
    assert "model.layers.1.self_attn.k_proj.weight" in capsys.readouterr().err


def test_an_untied_config_without_a_head_exits_with_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_headers(tmp_path / "m", tiny_config("llama"), drop=["lm_head.weight"])
    assert proa("inspect", model) == 3
    err = capsys.readouterr().err
    assert "lm_head.weight" in err and "head = own" in err


def test_a_wrong_shape_exits_with_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_headers(tmp_path / "m", tiny_config("llama"), add={"model.norm.weight": (65,)})
    assert proa("inspect", model) == 3
    err = capsys.readouterr().err
    assert "weights/shape" in err and "model.norm.weight" in err and "[65]" in err and "[64]" in err


def test_allowed_tensors_are_listed_as_left_out_with_the_glob(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_headers(tmp_path / "m", tiny_config("llama"), add={"extra.a": (1,), "extra.b": (1,)})
    assert proa("inspect", model) == 3
    capsys.readouterr()
    found = account(capsys, model, "--allow-unexpected", "extra.*")["runners"]["target"]
    assert found["left_out"] == [{"pattern": "extra.*", "count": 2, "reason": "allowed by --allow-unexpected"}]
    assert (found["tensors"]["left_out"], found["tensors"]["unexpected"]) == (2, 0)


def test_a_glob_that_hides_a_tensor_of_another_layout_exits_with_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config("llama", tie_word_embeddings=True)
    model = write_headers(tmp_path / "m", config, add={"lm_head.weight": (512, 64)})
    assert proa("inspect", model, "--allow-unexpected", "lm_head*") == 3
    assert "weights/glob-hides-tensor" in capsys.readouterr().err


def test_left_out_tensors_come_with_their_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stale = {"model.layers.0.self_attn.rotary_emb.inv_freq": (8,)}
    model = write_headers(tmp_path / "m", tiny_config("llama"), add=stale)
    assert proa("inspect", model) == 0
    assert "computed from the config" in capsys.readouterr().out


def test_unread_config_keys_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_headers(tmp_path / "m", tiny_config("llama") | {"harmless": {"a": [1]}})
    assert account(capsys, model)["runners"]["target"]["config"]["unknown"] == {"harmless": {"a": [1]}}
    assert proa("inspect", model) == 0
    assert "nobody reads harmless" in capsys.readouterr().out


def test_weights_prints_a_line_per_group_and_layers_an_outline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_tiny_headers(tmp_path / "m", "qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1)
    assert proa("inspect", model, "--weights", "--layers") == 0
    out = capsys.readouterr().out
    assert "model.layers.#.self_attn.q_proj.weight" in out and "layers.#.attn.qkv.weight" in out
    assert "  layer 0\n" in out and "  layer 1\n" in out and "window 8" in out


def test_a_stored_copy_of_a_tied_head_is_counted_as_tied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_headers(
        tmp_path / "m", tiny_config("llama", tie_word_embeddings=True), add={"lm_head.weight": (512, 64)}
    )
    assert account(capsys, model)["runners"]["target"]["tensors"]["tied"] == 1
