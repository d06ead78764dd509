"""Loading of block FP8 that stays in 8 bits: every code where it belongs, with the scale of its own block."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from proa.loading import apply
from proa.loading.build import construct
from proa.loading.ledger import LoadLedger
from proa.loading.progress import Silent
from proa.plan.planned import Planned
from tests.factories.checkpoints import random_tensors, tiny_config, write_checkpoint
from tests.factories.fp8 import quantised, with_fp8
from tests.factories.headers import SERVER, planned
from tests.factories.mla_checkpoints import MLA_FAMILIES, mla_config, mla_tensors
from tests.factories.native import probed, why_not

FOUND = probed()
WHY_NOT = why_not(FOUND)
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
HOST = replace(SERVER, isa=(*SERVER.isa, "avx512vbmi"))  # the plan's; loading itself runs no kernel

Tensors = dict[str, torch.Tensor]


def checkpoint(family: str, path: Path, **overrides: Any) -> tuple[Path, Tensors]:
    """Written, and the values that it means."""
    if family in MLA_FAMILIES:
        config = mla_config(family, **overrides)
        tensors = mla_tensors(config, 0, torch.float32)
    else:
        config = tiny_config(family, **overrides)
        tensors = random_tensors(config, 0, torch.float32)
    stored, meant = quantised(tensors)
    return write_checkpoint(path, with_fp8(config), stored), meant


def loaded(plan: Planned) -> Tensors:
    """The parameters before anything is packed."""
    model, ledger = construct(plan, FOUND.library, None), LoadLedger(plan)
    parameters: Tensors = dict[str, torch.Tensor](model.named_parameters())
    apply.load_weights(parameters, ledger, Silent())
    ledger.close()
    return parameters


def values_of(parameters: Tensors, name: str, columns: int = 32) -> torch.Tensor:
    """Codes times the scale of their 16 rows and `columns` columns, by an index for each element."""
    codes, scales = parameters[name], parameters[f"{name}_scale"]
    assert codes.dtype == torch.float8_e4m3fn
    rows, inputs = torch.arange(codes.shape[-2]) // 16, torch.arange(codes.shape[-1]) // columns
    return codes.float() * scales[..., rows, :][..., inputs]


def mlp(tensors: Tensors, prefix: str) -> tuple[torch.Tensor, torch.Tensor]:
    gate, up, down = (tensors[f"{prefix}.{part}_proj.weight"] for part in ("gate", "up", "down"))
    return torch.cat([gate, up]), down


@pytest.mark.parametrize("chunk", [1, 500, apply.CHUNK_ELEMENTS])
@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3", "qwen2_moe"])
def test_codes_and_scales_arrive_bit_for_bit(
    family: str, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where no block of 32 divides a part: 48 shared rows and columns of Qwen2, 40 latent rows of DeepSeek."""
    monkeypatch.setattr(apply, "CHUNK_ELEMENTS", chunk)
    path, meant = checkpoint(family, tmp_path)
    parameters = loaded(planned(path, caps=HOST, dtype="float32").target)
    layer = "model.layers.1"
    for expert in (0, 7):
        gate_up, down = mlp(meant, f"{layer}.mlp.experts.{expert}")
        assert torch.equal(values_of(parameters, "layers.1.ffn.experts.gate_up")[expert], gate_up)
        assert torch.equal(values_of(parameters, "layers.1.ffn.experts.down")[expert], down)
    gate_up, down = mlp(meant, f"{layer}.mlp.shared_expert" + ("" if family == "qwen2_moe" else "s"))
    assert torch.equal(values_of(parameters, "layers.1.ffn.shared.gate_up.weight"), gate_up)
    assert torch.equal(values_of(parameters, "layers.1.ffn.shared.down.weight"), down)
    parts = ("q_a_proj", "kv_a_proj_with_mqa") if family == "deepseek_v3" else ("q_proj", "k_proj", "v_proj")
    merged = torch.cat([meant[f"{layer}.self_attn.{part}.weight"] for part in parts])
    name = "qkv_a" if family == "deepseek_v3" else "qkv"
    assert torch.equal(values_of(parameters, f"layers.1.attn.{name}.weight"), merged)


def test_what_is_dequantised_beside_it_has_its_values(tmp_path: Path) -> None:
    path, meant = checkpoint("deepseek_v3", tmp_path)
    parameters = loaded(planned(path, caps=HOST, dtype="float32").target)
    assert torch.equal(parameters["layers.1.attn.kv_b.weight"], meant["model.layers.1.self_attn.kv_b_proj.weight"])
    assert torch.equal(parameters["layers.1.ffn.router.weight"], meant["model.layers.1.mlp.gate.weight"])
    assert not [name for name in parameters if "kv_b" in name and name.endswith("_scale")]


def test_halves_of_shared_experts_in_slots_bring_the_scales_of_their_columns(tmp_path: Path) -> None:
    path, meant = checkpoint("glm4_moe", tmp_path, n_shared_experts=2)
    parameters = loaded(planned(path, caps=HOST, dtype="float32", shared_experts="fused").target)
    prefix = "model.layers.1.mlp.shared_experts"
    gate, up, down = (meant[f"{prefix}.{part}_proj.weight"] for part in ("gate", "up", "down"))
    for slot, half in ((8, slice(0, 32)), (9, slice(32, 64))):
        both = torch.cat([gate[half], up[half]])
        assert torch.equal(values_of(parameters, "layers.1.ffn.experts.gate_up")[slot], both)
        assert torch.equal(values_of(parameters, "layers.1.ffn.experts.down")[slot], down[:, half])


def test_scales_in_bfloat16_are_widened(tmp_path: Path) -> None:
    config = tiny_config("glm4_moe")
    stored, _ = quantised(random_tensors(config, 0, torch.float32))
    stored = {name: t.bfloat16() if name.endswith("_scale_inv") else t for name, t in stored.items()}
    parameters = loaded(
        planned(write_checkpoint(tmp_path, with_fp8(config), stored), caps=HOST, dtype="float32").target
    )
    grid = stored["model.layers.1.self_attn.o_proj.weight_scale_inv"].float()
    found = parameters["layers.1.attn.o.weight_scale"]
    assert found.dtype == torch.float32 and torch.equal(found, grid.repeat_interleave(2, dim=0)[: len(found)])
