"""Forms in which releases of hybrids are stored and that no reference checkpoint has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from proa import LLM, SamplingParams, WeightError
from tests.factories.foresight import write_foreseeing

SETTINGS = {"dtype": "float32", "threads": 1, "max_model_len": 256, "kv_memory": "8MiB"}
PARAMS = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=1)
BLOCK = "mtp.layers.0.mlp.experts"


def with_listed_draft(model: Path) -> Path:
    """As Qwen3.5 was released: experts of the layers stacked, those of `mtp.*` one by one."""
    tensors = load_file(model / "model.safetensors")
    both, down = tensors.pop(f"{BLOCK}.gate_up_proj"), tensors.pop(f"{BLOCK}.down_proj")
    for expert, (gate, up) in enumerate(one.chunk(2) for one in both):
        for name, value in (("gate_proj", gate), ("up_proj", up), ("down_proj", down[expert])):
            tensors[f"{BLOCK}.{expert}.{name}.weight"] = value.clone()
    save_file(tensors, model / "model.safetensors")
    return model


def drafted(model: Path) -> tuple[Any, ...]:
    """Answers, how the draft fared, and its account of tensors."""
    with LLM(model, speculative="nextn", num_draft_tokens=3, **SETTINGS) as llm:
        outputs = [output.outputs for output in llm.generate([[10, 11, 12], [40] * 70], PARAMS)]
        return outputs, llm.stats()["speculative_decoding"], llm.ledger()["runners"]["draft"]["tensors"]


@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_5_moe_text"])
def test_a_draft_whose_experts_are_listed_beside_stacked_ones_of_its_target_is_the_same_draft(
    family: str, tmp_path: Path
) -> None:
    stacked = drafted(write_foreseeing(family, tmp_path / "stacked"))
    listed = drafted(with_listed_draft(write_foreseeing(family, tmp_path / "listed")))
    assert listed[:2] == stacked[:2]
    assert stacked[1]["num_accepted_tokens"] > 10
    assert listed[2]["placed"] == stacked[2]["placed"] + 3 * 8 - 2


def test_an_expert_that_lacks_in_such_a_draft_is_named(tmp_path: Path) -> None:
    model = with_listed_draft(write_foreseeing("qwen3_5_moe", tmp_path))
    tensors = load_file(model / "model.safetensors")
    del tensors[f"{BLOCK}.5.up_proj.weight"]
    tensors[f"{BLOCK}.5.up.weight"] = torch.zeros(2)
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(WeightError, match=rf"{BLOCK}\.5\.up"):
        drafted(model)
