"""GGUF files of models with experts, written from a hub checkpoint with gguf's own tables of names, as llama.cpp's
converter lays them out: the experts of a projection stacked, one-dimensional tensors and routers in float32."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quants
from safetensors.torch import load_file, save_file

Keys = Callable[[GGUFWriter, Mapping[str, Any]], None]


def write_moe_gguf(
    path: Path,
    hub: Path,
    kind: str,
    *,
    forms: Mapping[str, str] = MappingProxyType({}),
    without: tuple[str, ...] = (),
    split: bool = False,
    gating: gguf.ExpertGatingFuncType | None = None,
) -> Path:
    """`kind` is the type of every matrix whose rows are whole blocks of it; vectors and routers are float32. `forms`:
    other types by a part of the GGUF name. Tensors whose hub name has a part of `without` are left away. `split`:
    kv_b_proj as two tensors. `gating`: said beside what the config means."""
    config = json.loads((hub / "config.json").read_text())
    arch, keys = ARCHES[config["model_type"]]
    writer = GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    _common_keys(writer, config)
    keys(writer, config)
    if split:
        _mla_keys(writer, config)
    if gating is not None:
        writer.add_expert_gating_func(gating)
    names = gguf.get_tensor_name_map(arch, blocks(config))
    values = stacked(load_file(hub / "model.safetensors"), config)
    for name, value in (split_kv(values, config) if split else values).items():
        if any(part in name for part in without) or f".layers.{blocks(config)}." in name:
            continue
        stored = gguf_name(names, name)
        if stored.endswith("ffn_gate_inp_shexp.weight"):
            value = value[0]
        own = next((own for part, own in forms.items() if part in stored), None)
        form = form_of(stored, value.shape, kind) if own is None else GGMLQuantizationType[own]
        writer.add_tensor(stored, blocks_of(stored, value, form), raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def blocks(config: Mapping[str, Any]) -> int:
    """GGUF counts the layer of a bundled draft too, where it has one: not in the files of latent attention."""
    if "kv_lora_rank" in config:
        return config["num_hidden_layers"]
    return config["num_hidden_layers"] + config.get("num_nextn_predict_layers", 0)


def form_of(stored: str, shape: tuple[int, ...], kind: str) -> GGMLQuantizationType:
    form = GGMLQuantizationType[kind]
    is_plain = len(shape) < 2 or "ffn_gate_inp" in stored or shape[-1] % gguf.GGML_QUANT_SIZES[form][0]
    return GGMLQuantizationType.F32 if is_plain else form


def stacked(tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Float32 by hub name; the experts of a projection are one tensor, whose name lacks the number."""
    found: dict[str, list[np.ndarray]] = {}
    count = config.get("num_experts") or config["n_routed_experts"]
    for layer in range(blocks(config)):
        for part in ("gate_proj", "up_proj", "down_proj"):
            prefix = f"model.layers.{layer}.mlp.experts"
            listed = [f"{prefix}.{expert}.{part}.weight" for expert in range(count)]
            if listed[0] in tensors:
                found[f"{prefix}.{part}.weight"] = [tensors[name].float().numpy() for name in listed]
    whole = {name: t.float().numpy() for name, t in tensors.items() if ".experts." not in name}
    return whole | {name: np.stack(parts) for name, parts in found.items()}


def write_dequantised(hub: Path, source: Path, kind: str) -> Path:
    """The hub checkpoint `source` with the values that gguf's own code makes of its `kind` blocks, in float32."""
    config = json.loads((source / "config.json").read_text())
    names = gguf.get_tensor_name_map(ARCHES[config["model_type"]][0], blocks(config))
    tensors: dict[str, torch.Tensor] = {}
    for name, value in stacked(load_file(source / "model.safetensors"), config).items():
        stored = gguf_name(names, name)
        form = form_of(stored, value.shape, kind)
        values = torch.from_numpy(quants.dequantize(blocks_of(stored, value, form), form).reshape(value.shape))
        if ".experts." in name:
            head, tail = name.split(".experts.")
            tensors |= {f"{head}.experts.{expert}.{tail}": one.clone() for expert, one in enumerate(values)}
        else:
            tensors[name] = values.clone()
    hub.mkdir()
    (hub / "config.json").write_text(json.dumps({**config, "torch_dtype": "float32"}))
    save_file(tensors, hub / "model.safetensors")
    return hub


def gguf_name(names: gguf.TensorNameMap, hub: str) -> str:
    """As the converter asks for it."""
    stored = names.get_name(hub.replace("correction_bias", "correction.bias"), try_suffixes=(".weight", ".bias"))
    assert stored is not None, hub
    return stored


def blocks_of(stored: str, value: np.ndarray, form: GGMLQuantizationType) -> np.ndarray:
    """`value` in blocks; of K formats, which gguf does not quantise, any small values' blocks instead, by name."""
    if form not in (GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q6_K):
        return quants.quantize(value, form)
    rng, (elements, nbytes) = np.random.default_rng(zlib.crc32(stored.encode())), gguf.GGML_QUANT_SIZES[form]
    found = rng.integers(0, 256, (*value.shape[:-1], value.shape[-1] // elements, nbytes), dtype=np.uint8)
    # Values of Q4_K are d * scale * (0 to 15) - m * minimum: half of 15 for m centres them.
    for at, size in ((0, 1e-4), (2, 7.5e-4)) if form is GGMLQuantizationType.Q4_K else ((208, 2e-5),):
        factors = (size + 0.2 * size * rng.random(found.shape[:-1])).astype(np.float16)
        found[..., at : at + 2] = factors[..., None].view(np.uint8)
    return found.reshape(*value.shape[:-1], -1)


def split_kv(values: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """kv_b_proj as the converter divides it for absorbed attention: keys transposed per head, values as they are."""
    found: dict[str, np.ndarray] = {}
    for name, value in values.items():
        if "kv_b_proj" not in name:
            found[name] = value
            continue
        heads, nope = config["num_attention_heads"], config["qk_nope_head_dim"]
        both = value.reshape(heads, nope + config["v_head_dim"], -1)
        found[name.replace("kv_b", "k_b")] = np.ascontiguousarray(both[:, :nope].transpose(0, 2, 1))
        found[name.replace("kv_b", "v_b")] = np.ascontiguousarray(both[:, nope:])
    return found


def _mla_keys(writer: GGUFWriter, config: Mapping[str, Any]) -> None:
    """The sizes of the shared rows take the place of the heads'."""
    for key, value in (
        ("attention.key_length", config["kv_lora_rank"] + config["qk_rope_head_dim"]),
        ("attention.value_length", config["kv_lora_rank"]),
        ("attention.head_count_kv", 1),
    ):
        writer.kv_data[0][f"deepseek2.{key}"].value = value
    writer.add_key_length_mla(config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
    writer.add_value_length_mla(config["v_head_dim"])


def _common_keys(writer: GGUFWriter, config: Mapping[str, Any]) -> None:
    writer.add_block_count(blocks(config))
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def _qwen3_keys(writer: GGUFWriter, config: Mapping[str, Any]) -> None:
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_expert_count(config["num_experts"])


def _qwen2_keys(writer: GGUFWriter, config: Mapping[str, Any]) -> None:
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


def _glm_keys(writer: GGUFWriter, config: Mapping[str, Any]) -> None:
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(int(config["head_dim"] * config["partial_rotary_factor"]))
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    writer.add_nextn_predict_layers(config["num_nextn_predict_layers"])


def _latent_keys(writer: GGUFWriter, config: Mapping[str, Any]) -> None:
    if config["q_lora_rank"]:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(config["kv_lora_rank"])
    writer.add_key_length(config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
    writer.add_value_length(config["v_head_dim"])
    writer.add_rope_dimension_count(config["qk_rope_head_dim"])
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_group_count(config["n_group"])
    writer.add_expert_group_used_count(config["topk_group"])
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType[config["scoring_func"].upper()])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    if scaling := config["rope_scaling"]:
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling["type"]))
        writer.add_rope_scaling_factor(scaling["factor"])
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_log_mul(0.1 * scaling["mscale_all_dim"])


ARCHES: Mapping[str, tuple[gguf.MODEL_ARCH, Keys]] = {
    "qwen3_moe": (gguf.MODEL_ARCH.QWEN3MOE, _qwen3_keys),
    "qwen2_moe": (gguf.MODEL_ARCH.QWEN2MOE, _qwen2_keys),
    **dict.fromkeys(("deepseek_v2", "deepseek_v2_lite", "deepseek_v3"), (gguf.MODEL_ARCH.DEEPSEEK2, _latent_keys)),
    "glm4_moe": (gguf.MODEL_ARCH.GLM4_MOE, _glm_keys),
}
