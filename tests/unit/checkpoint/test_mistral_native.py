"""Mistral's native layout: params.json and consolidated names in the hub's words.

The renaming is checked both ways against a table written from the published loaders, not from the code under test.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from proa.arch.blocks import GroupScore, MLASpec, MoESpec, Score
from proa.arch.registry import Reading, read_config
from proa.arch.weights import LeftOut, NameMap, Unknown
from proa.checkpoint.mistral_native import hub_name
from proa.checkpoint.open import open_checkpoint
from proa.errors import CheckpointError, ConfigError
from tests.factories.layouts import layout_of
from tests.factories.mla_checkpoints import mla_config, mla_shapes

# Mistral Large 3's params.json, with tiny sizes.
PARAMS: dict[str, Any] = {
    "dim": 64, "n_layers": 3, "hidden_dim": 128, "n_heads": 4, "n_kv_heads": 4, "norm_eps": 1e-6, "vocab_size": 512,
    "rope_theta": 10000.0, "tied_embeddings": False, "max_position_embeddings": 1024, "q_lora_rank": 32,
    "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "llama_4_scaling": {"original_max_position_embeddings": 64, "beta": 0.1},
    "yarn": {"original_max_position_embeddings": 64, "factor": 4, "apply_scale": False, "beta": 32, "alpha": 1},
    "moe": {
        "expert_parallel": 1, "expert_model_parallel": 1, "route_every_n": 1, "first_k_dense_replace": 1,
        "num_experts": 8, "num_experts_per_tok": 2, "num_expert_groups": 1, "num_expert_groups_per_tok": 1,
        "routed_scale": 1.0, "expert_hidden_dim": 32, "num_shared_experts": 1,
    },
}  # fmt: skip
SPELLED = (
    ("model.embed_tokens.", "tok_embeddings."), ("lm_head.", "output."), ("model.norm.", "norm."),
    ("model.layers.", "layers."), (".input_layernorm.", ".attention_norm."),
    (".post_attention_layernorm.", ".ffn_norm."),
    (".self_attn.q_a_proj.", ".attention.wq_a."), (".self_attn.q_b_proj.", ".attention.wq_b."),
    (".self_attn.q_a_layernorm.", ".attention.q_a_norm."), (".self_attn.kv_a_layernorm.", ".attention.kv_a_norm."),
    (".self_attn.kv_a_proj_with_mqa.", ".attention.wkv_a_with_mqa."), (".self_attn.kv_b_proj.", ".attention.wkv_b."),
    (".self_attn.o_proj.", ".attention.wo."), (".mlp.gate.e_score_correction_bias", ".router_biases"),
    (".mlp.gate.", ".gate."), (".mlp.shared_experts.", ".shared_experts."), (".mlp.experts.", ".experts."),
    (".mlp.", ".feed_forward."), (".gate_proj.", ".w1."), (".down_proj.", ".w2."), (".up_proj.", ".w3."),
)  # fmt: skip
TOWER = {
    "vision_encoder.patch_conv.weight": "vision_tower.patch_conv.weight",
    "vision_language_adapter.w_in.weight": "multi_modal_projector.w_in.weight",
    "patch_merger.merging_layer.weight": "multi_modal_projector.patch_merger.merging_layer.weight",
    "pre_mm_projector_norm.weight": "multi_modal_projector.norm.weight",
}


def native(name: str) -> str:
    for hub, stored in SPELLED:
        name = name.replace(hub, stored)
    return name


def write(path: Path, params: dict[str, Any], *, biased: bool, vision: bool = False, shards: int = 1) -> Path:
    config = mla_config("deepseek_v3", num_nextn_predict_layers=0, topk_method="noaux_tc" if biased else "greedy")
    tensors = {native(name): torch.ones(shape) for name, shape in mla_shapes(config).items()}
    tensors |= {name: torch.ones(2) for name in TOWER} if vision else {}
    (path / "params.json").write_text(json.dumps(params))
    if shards == 1:
        save_file(tensors, path / "consolidated.safetensors")
        return path
    owners: dict[str, str] = {}
    for shard in range(shards):
        file = f"consolidated-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensor for at, (name, tensor) in enumerate(tensors.items()) if at % shards == shard}
        save_file(part, path / file)
        owners |= dict.fromkeys(part, file)
    (path / "consolidated.safetensors.index.json").write_text(json.dumps({"weight_map": owners}))
    return path


def read(path: Path) -> Reading:
    return read_config(open_checkpoint(path).config)


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("biased", [False, True])
def test_every_tensor_is_found_under_its_hub_name(tmp_path: Path, biased: bool, shards: int) -> None:
    checkpoint = open_checkpoint(write(tmp_path, PARAMS, biased=biased, shards=shards))
    found = read_config(checkpoint.config)
    names = NameMap(found.weights(found.spec, layout_of(found.spec, fused=[])), found.prefixes)
    assert set(names.expected()) == set(checkpoint.tensors)
    assert checkpoint.tensors["model.layers.0.mlp.up_proj.weight"].stored_name == "layers.0.feed_forward.w3.weight"


@pytest.mark.parametrize("name", mla_shapes(mla_config("deepseek_v3", num_nextn_predict_layers=0)))
def test_names_are_translated_and_hub_names_stay(name: str) -> None:
    assert hub_name(native(name)) == name
    assert hub_name(name) == name


@pytest.mark.parametrize(
    "name",
    ["layers.0.attention.wq_a.qscale_weight", "layers.x.gate.weight", "layers.0.experts.a.w1.weight",
     "layers.0.experts.0.w4.weight", "layers.0.attention.wq_c.weight", "norm.bias", "eagle_linear.weight"],
)  # fmt: skip
def test_a_name_without_translation_stays_to_be_refused(name: str) -> None:
    assert hub_name(name) == name


def test_parameters_become_the_hubs_keys(tmp_path: Path) -> None:
    found = read(write(tmp_path, PARAMS, biased=False))
    mixer, experts = found.spec.layers[-1].mixer, found.spec.layers[-1].ffn
    assert found.family.name == "deepseek_v3" and found.report.unknown == {}
    assert found.body.where == str(tmp_path / "params.json")
    assert isinstance(mixer, MLASpec) and isinstance(experts, MoESpec)
    assert (mixer.q_rank, mixer.kv_rank, mixer.nope_dim, mixer.rope_dim, mixer.value_dim) == (32, 32, 16, 8, 16)
    assert mixer.rope is not None and mixer.rope.is_interleaved and mixer.rope.factor == 4
    assert mixer.query_scale is not None and (mixer.query_scale.beta, mixer.query_scale.original) == (0.1, 64)
    assert (experts.num_experts, experts.top_k, experts.width) == (8, 2, 32)
    assert experts.shared is not None and experts.shared.count == 1
    assert [layer.index for layer in found.spec.moe_layers] == [1, 2]


def test_router_biases_mean_sigmoid_scores_and_their_absence_a_softmax(tmp_path: Path) -> None:
    for biased, score in ((False, Score.SOFTMAX), (True, Score.SIGMOID)):
        folder = tmp_path / str(biased)
        folder.mkdir()
        experts = read(write(folder, PARAMS, biased=biased)).spec.layers[-1].ffn
        assert isinstance(experts, MoESpec)
        router = experts.router
        assert (router.score, router.has_bias, router.renormalise) == (score, biased, True)
        assert router.group_score is GroupScore.NONE


def test_the_scale_of_yarn_is_applied_only_if_the_file_says_so(tmp_path: Path) -> None:
    scales: list[float] = []
    for apply in (False, True):
        folder = tmp_path / str(apply)
        folder.mkdir()
        mixer = read(write(folder, PARAMS | {"yarn": PARAMS["yarn"] | {"apply_scale": apply}}, biased=False)).spec
        first = mixer.layers[0].mixer
        assert isinstance(first, MLASpec) and first.rope is not None and first.rope.yarn is not None
        assert first.rope.yarn.magnitude == 1.0
        scales.append(first.scale)
    assert scales[0] == pytest.approx(24**-0.5)
    assert scales[1] == pytest.approx(24**-0.5 * 1.1386294361119891**2)  # 0.1 ln 4 + 1, squared


@pytest.mark.parametrize("key", ["vision_encoder", "multimodal"])
def test_with_a_vision_tower_it_is_pixtral_around_the_same_text_model(tmp_path: Path, key: str) -> None:
    checkpoint = open_checkpoint(write(tmp_path, PARAMS | {key: {"hidden_size": 8}}, biased=False, vision=True))
    found = read_config(checkpoint.config)
    names = NameMap(found.weights(found.spec, layout_of(found.spec, fused=[])), found.prefixes)
    assert found.family.name == "deepseek_v3"
    for stored, hub in TOWER.items():
        assert checkpoint.tensors[hub].stored_name == stored
        assert isinstance(names.claim(hub), LeftOut)
    assert not any(isinstance(names.claim(name), Unknown) for name in checkpoint.tensors)
    assert all(name.startswith("language_model.") for name in names.expected())


@pytest.mark.parametrize(
    ("change", "slug"),
    [
        ({"quantization": {"qformat_weight": "fp8_e4m3"}}, "config/unimplemented"),
        ({"moe": None}, "checkpoint/wrong-form"),
        ({"moe": PARAMS["moe"] | {"num_expert_groups": 2}}, "config/unimplemented"),
        ({"llama_4_scaling": {"original_max_position_embeddings": 32, "beta": 0.1}}, "config/rope-contradiction"),
        ({"yarn": 4}, "config/wrong-type"),
        ({"activation": "gelu"}, "config/unimplemented"),
    ],
)
def test_what_has_no_meaning_here_is_refused(tmp_path: Path, change: dict[str, Any], slug: str) -> None:
    with pytest.raises((ConfigError, CheckpointError), match=r"params\.json") as caught:
        read(write(tmp_path, PARAMS | change, biased=False))
    assert caught.value.slug == slug


def test_a_key_without_translation_is_reported(tmp_path: Path) -> None:
    assert read(write(tmp_path, PARAMS | {"new_key": 3}, biased=False)).report.unknown == {"new_key": 3}


def test_the_hubs_layout_is_preferred_where_both_are_there(tmp_path: Path) -> None:
    write(tmp_path, PARAMS, biased=False)
    (tmp_path / "config.json").write_text(json.dumps(mla_config("deepseek_v3")))
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path)
    assert caught.value.slug == "checkpoint/no-weights"
    assert any("consolidated.safetensors" in fact for fact in caught.value.facts)
