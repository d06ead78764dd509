"""The data path of experts: slots, halves, block FP8 with ragged blocks, stacked files, and copies in a draft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from proa.errors import WeightError
from proa.loading import apply, files
from proa.loading.build import build, construct
from proa.loading.ledger import LoadLedger
from proa.loading.progress import Silent
from proa.plan.planned import Planned
from tests.factories.checkpoints import random_tensors, tiny_config, write_checkpoint
from tests.factories.fp8 import quantised, with_fp8
from tests.factories.headers import planned
from tests.factories.mla_checkpoints import MLA_FAMILIES, mla_config, mla_tensors
from tests.factories.moe_checkpoints import with_copies

Tensors = dict[str, torch.Tensor]


def checkpoint(family: str, **overrides: Any) -> tuple[dict[str, Any], Tensors]:
    if family in MLA_FAMILIES:
        config = mla_config(family, **overrides)
        return config, mla_tensors(config, 0, torch.float32)
    config = tiny_config(family, **overrides)
    return config, with_copies(config, random_tensors(config, 0, torch.float32))


def loaded(plan: Planned) -> Tensors:
    """The parameters before anything is packed."""
    model, ledger = construct(plan, None, None), LoadLedger(plan)
    parameters = dict(model.named_parameters())
    apply.load_weights(parameters, ledger, Silent())
    ledger.close()
    return parameters


def mlp(tensors: Tensors, prefix: str) -> tuple[torch.Tensor, torch.Tensor]:
    gate, up, down = (tensors[f"{prefix}.{part}_proj.weight"] for part in ("gate", "up", "down"))
    return torch.cat([gate, up]), down


@pytest.mark.parametrize("chunk", [1, 500, apply.CHUNK_ELEMENTS])
@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3", "qwen2_moe"])
def test_fp8_weights_arrive_as_codes_times_scales(
    family: str, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes that no block divides: 40 latent rows of DeepSeek, 48 shared rows and columns of Qwen2, blocks of 32."""
    monkeypatch.setattr(apply, "CHUNK_ELEMENTS", chunk)
    config, tensors = checkpoint(family)
    stored, meant = quantised(tensors)
    assert len(stored) > len(tensors)
    parameters = loaded(planned(write_checkpoint(tmp_path, with_fp8(config), stored), dtype="float32").target)
    layer = "model.layers.1"
    for expert in (0, 7):
        gate_up, down = mlp(meant, f"{layer}.mlp.experts.{expert}")
        assert torch.equal(parameters["layers.1.ffn.experts.gate_up"][expert], gate_up)
        assert torch.equal(parameters["layers.1.ffn.experts.down"][expert], down)
    shared = f"{layer}.mlp.shared_expert" + ("" if family == "qwen2_moe" else "s")
    gate_up, down = mlp(meant, shared)
    assert torch.equal(parameters["layers.1.ffn.shared.gate_up.weight"], gate_up)
    assert torch.equal(parameters["layers.1.ffn.shared.down.weight"], down)
    parts = ("q_a_proj", "kv_a_proj_with_mqa") if family == "deepseek_v3" else ("q_proj", "k_proj", "v_proj")
    merged = torch.cat([meant[f"{layer}.self_attn.{part}.weight"] for part in parts])
    name = "qkv_a" if family == "deepseek_v3" else "qkv"
    assert torch.equal(parameters[f"layers.1.attn.{name}.weight"], merged)


def test_fp8_values_are_rounded_once_to_the_compute_type(tmp_path: Path) -> None:
    config, tensors = checkpoint("glm4_moe")
    stored, meant = quantised(tensors)
    parameters = loaded(planned(write_checkpoint(tmp_path, with_fp8(config), stored), dtype="bfloat16").target)
    gate_up, _ = mlp(meant, "model.layers.1.mlp.experts.3")
    assert torch.equal(parameters["layers.1.ffn.experts.gate_up"][3], gate_up.bfloat16())


def test_scales_in_another_file_are_found(tmp_path: Path) -> None:
    config, tensors = checkpoint("glm4_moe")
    stored, meant = quantised(tensors)
    parameters = loaded(planned(write_checkpoint(tmp_path, with_fp8(config), stored, shards=9), dtype="float32").target)
    gate_up, _ = mlp(meant, "model.layers.2.mlp.experts.5")
    assert torch.equal(parameters["layers.2.ffn.experts.gate_up"][5], gate_up)


@pytest.mark.parametrize("chunk", [1, 500, apply.CHUNK_ELEMENTS])
@pytest.mark.parametrize("is_fp8", [False, True], ids=["plain", "fp8"])
def test_two_fused_shared_experts_are_halves_of_one_mlp(
    is_fp8: bool, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apply, "CHUNK_ELEMENTS", chunk)
    config, tensors = checkpoint("glm4_moe", n_shared_experts=2)
    stored, meant = quantised(tensors) if is_fp8 else (tensors, tensors)
    config = with_fp8(config) if is_fp8 else config
    plan = planned(write_checkpoint(tmp_path, config, stored), dtype="float32", shared_experts="fused").target
    parameters = loaded(plan)
    prefix = "model.layers.1.mlp.shared_experts"
    gate, up, down = (meant[f"{prefix}.{part}_proj.weight"] for part in ("gate", "up", "down"))
    assert gate.shape == (64, 64) and down.shape == (64, 64)
    for slot, half in ((8, slice(0, 32)), (9, slice(32, 64))):
        assert torch.equal(parameters["layers.1.ffn.experts.gate_up"][slot], torch.cat([gate[half], up[half]]))
        assert torch.equal(parameters["layers.1.ffn.experts.down"][slot], down[:, half])


def test_a_tensor_that_fills_two_slots_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, tensors = checkpoint("glm4_moe", n_shared_experts=2, num_nextn_predict_layers=0)
    plan = planned(write_checkpoint(tmp_path, config, tensors), shared_experts="fused").target
    reads: list[str] = []
    raw = files.MappedFile.raw

    def counted(self: files.MappedFile, info: Any, rows: Any) -> torch.Tensor:
        reads.append(info.name)
        return raw(self, info, rows)

    monkeypatch.setattr(files.MappedFile, "raw", counted)
    loaded(plan)
    assert sorted(reads) == sorted(tensors)


@pytest.mark.parametrize("chunk", [1, 3000, apply.CHUNK_ELEMENTS])
def test_stacked_experts_keep_their_order(chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apply, "CHUNK_ELEMENTS", chunk)
    config, tensors = checkpoint("mistral4")
    parameters = loaded(planned(write_checkpoint(tmp_path, config, tensors)).target)
    for name in ("gate_up", "down"):
        stacked = tensors[f"model.layers.1.mlp.experts.{name}_proj"]
        assert stacked.ndim == 3 and torch.equal(parameters[f"layers.1.ffn.experts.{name}"], stacked)


def test_a_correction_bias_stays_in_float32(tmp_path: Path) -> None:
    config, tensors = checkpoint("glm4_moe")
    parameters = loaded(planned(write_checkpoint(tmp_path, config, tensors), dtype="bfloat16").target)
    bias = tensors["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert torch.equal(parameters["layers.1.ffn.router.bias"], bias)


# Copies that a bundled draft holds of its target's embedding and head

EMBED, HEAD = "model.layers.3.embed_tokens.weight", "model.layers.3.shared_head.head.weight"


def build_pair(path: Path, config: dict[str, Any], tensors: Tensors, **asks: Any) -> dict[str, Any]:
    """The draft's account."""
    resolved = planned(write_checkpoint(path, config, tensors), speculative="nextn", **asks)
    assert resolved.draft is not None
    target = build(resolved.target, Silent(), None, None)
    return build(resolved.draft, Silent(), None, target.model).ledger.as_json()


@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied head"])
@pytest.mark.parametrize("asks", [{}, {"dtype": "bfloat16"}, {"draft_dtype": "bfloat16"}], ids=str)
def test_equal_copies_are_accepted_and_counted(tied: bool, asks: dict[str, Any], tmp_path: Path) -> None:
    config, tensors = checkpoint("glm4_moe", tie_word_embeddings=tied)
    account = build_pair(tmp_path, config, tensors, **asks)
    assert account["tensors"]["borrowed"] == account["parameters"]["borrowed"] == 2
    assert account["unexpected"] == account["missing"] == []


@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied head"])
@pytest.mark.parametrize("name", [EMBED, HEAD])
def test_a_copy_that_differs_in_one_element_is_refused_with_both_names(
    name: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apply, "CHUNK_ELEMENTS", 6400)
    config, tensors = checkpoint("glm4_moe", tie_word_embeddings=tied)
    tensors[name][301, 5] += 1e-3
    with pytest.raises(WeightError) as caught:
        build_pair(tmp_path, config, tensors)
    source = "lm_head.weight" if name == HEAD and not tied else "model.embed_tokens.weight"
    assert caught.value.slug == "weights/borrowed-differs" and caught.value.role == "draft"
    assert f"{name} should be the same matrix as the target's {source} and differs from row 301" in str(caught.value)


def test_a_draft_without_copies_borrows_all_the_same(tmp_path: Path) -> None:
    config, tensors = checkpoint("glm4_moe")
    del tensors[EMBED], tensors[HEAD]
    account = build_pair(tmp_path, config, tensors)
    assert account["tensors"]["borrowed"] == 0 and account["parameters"]["borrowed"] == 2
