"""Make the benchmark models: one set of bf16 weights per model, in every form that an engine here reads.

`python benchmarks/models.py --into build/benchmarks/models`. SmolLM2-135M-Instruct comes from `proa fetch smollm2`,
dequantised; the others are random weights in a shape. Needs the extras `test` and `oracle`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import hybrid

TIED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
GLOBAL_NAMES: Mapping[str, str] = MappingProxyType(
    {TIED: "token_embd.weight", "model.norm.weight": "output_norm.weight"}
)
LAYER_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
)
"""Hub name within a layer -> GGUF name within a block."""
EXPERT_NAMES: Mapping[str, str] = MappingProxyType(
    {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}
)
"""The same for experts: one hub tensor each, one GGUF tensor for all of a layer."""
ROUTER, ROUTER_GGUF = "mlp.gate", "ffn_gate_inp"
LATENT_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_a_proj": "attn_q_a",
        "self_attn.q_a_layernorm": "attn_q_a_norm",
        "self_attn.q_b_proj": "attn_q_b",
        "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
        "self_attn.kv_a_layernorm": "attn_kv_a_norm",
        "self_attn.kv_b_proj": "attn_kv_b",
        "self_attn.o_proj": "attn_output",
    }
)
"""Instead of LAYER_NAMES' attention, in a model with latent attention."""
SHARED_NAMES: Mapping[str, str] = MappingProxyType(
    {"gate_proj": "ffn_gate_shexp", "up_proj": "ffn_up_shexp", "down_proj": "ffn_down_shexp"}
)
CORRECTION, CORRECTION_GGUF = "mlp.gate.e_score_correction_bias", "exp_probs_b.bias"
SHAPES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        # As Qwen3-0.6B, but for the vocabulary, which is SmolLM2's.
        "qwen3-0.6b": MappingProxyType(
            {
                "model_type": "qwen3",
                "architectures": ["Qwen3ForCausalLM"],
                "hidden_size": 1024,
                "intermediate_size": 3072,
                "num_hidden_layers": 28,
                "num_attention_heads": 16,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "rope_theta": 1000000.0,
            }
        ),
        # 0.94 billion parameters, of which a token reads a fifth beside the embedding.
        "qwen3-moe-1b": MappingProxyType(
            {
                "model_type": "qwen3_moe",
                "architectures": ["Qwen3MoeForCausalLM"],
                "hidden_size": 1024,
                "intermediate_size": 2048,
                "num_hidden_layers": 16,
                "num_attention_heads": 16,
                "num_key_value_heads": 4,
                "head_dim": 128,
                "rope_theta": 1000000.0,
                "num_experts": 32,
                "num_experts_per_tok": 4,
                "moe_intermediate_size": 512,
                "norm_topk_prob": True,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
            }
        ),
        # The kind of GLM-4.7-Flash, a fortieth of its size: latent attention, one dense layer, one shared expert.
        "glm-flash-1b": MappingProxyType(
            {
                "model_type": "glm4_moe_lite",
                "architectures": ["Glm4MoeLiteForCausalLM"],
                "hidden_size": 1024,
                "intermediate_size": 4096,
                "num_hidden_layers": 12,
                "num_attention_heads": 10,
                "num_key_value_heads": 10,
                "q_lora_rank": 384,
                "kv_lora_rank": 512,
                "qk_nope_head_dim": 192,
                "qk_rope_head_dim": 64,
                "v_head_dim": 256,
                "rope_theta": 1000000.0,
                "n_routed_experts": 32,
                "n_shared_experts": 1,
                "num_experts_per_tok": 4,
                "moe_intermediate_size": 512,
                "first_k_dense_replace": 1,
                "n_group": 1,
                "topk_group": 1,
                "topk_method": "noaux_tc",
                "norm_topk_prob": True,
                "routed_scaling_factor": 1.8,
                "num_nextn_predict_layers": 0,
                "tie_word_embeddings": False,
            }
        ),
        "qwen3-next-0.6b": hybrid.SHAPE,
    }
)
QUANTISED = ("Q8_0", "Q4_0")
ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {
        "llama": "llama",
        "qwen3": "qwen3",
        "qwen3_moe": "qwen3moe",
        "glm4_moe_lite": "deepseek2",
        "qwen3_next": "qwen3next",
    }
)
"""`model_type` -> what GGUF calls it."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, default=Path("build/benchmarks/models"))
    parser.add_argument("--gguf", type=Path, help="the fetched SmolLM2 file (default: fetch it)")
    parser.add_argument("--only", choices=("smollm2", *SHAPES), help="this one only")
    args = parser.parse_args()
    recipe = args.gguf or fetched()
    for name in ("smollm2", *SHAPES):
        if args.only in (None, name):
            print(name, flush=True)
            make(name, args.into / name, recipe)
    return 0


def read_manifest(models: Path, model: str) -> int:
    """Bytes of the weights of `model` (NAME-DTYPE) that one decode step of one request must read."""
    name, _, dtype = model.rpartition("-")
    return json.loads((models / name / "manifest.json").read_text(encoding="utf-8"))[dtype]


def fetched() -> Path:
    """As `proa fetch smollm2`."""
    from proa.checkpoint.locate import locate
    from proa.env import read_environment

    return locate("smollm2", read_environment().cache_dir, online=True, note=print)


def make(name: str, folder: Path, recipe: Path) -> None:
    """hub/, BF16.gguf, F16.gguf, Q8_0.gguf, Q4_0.gguf and manifest.json."""
    shutil.rmtree(folder, ignore_errors=True)
    hub = folder / "hub"
    hub.mkdir(parents=True)
    if name == "smollm2":
        config, weights = dequantised(recipe)
    else:
        config = {**common_config(recipe), **SHAPES[name]}
        weights = random_weights(config)
    write_hub(hub, config, weights, recipe)
    sizes = {"bf16": sum(round(tensor.numel() * 2 * read_part(hub, config)) for hub, tensor in weights.items())}
    kinds = {"qwen3-moe-1b": ("BF16", *QUANTISED), "glm-flash-1b": ("BF16",), "qwen3-next-0.6b": ("BF16",)}
    for kind in kinds.get(name, ("BF16", "F16", *QUANTISED)):
        sizes[kind.lower()] = write_gguf(folder / f"{kind}.gguf", kind, config, weights, recipe)
    (folder / "manifest.json").write_text(json.dumps(sizes) + "\n", encoding="utf-8")


def read_part(hub: str, config: Mapping[str, Any]) -> float:
    """How much of a tensor one decode step reads, on average: an expert is chosen by few tokens."""
    if hub == TIED and not config.get("tie_word_embeddings", True):
        return 0.0  # a row of it
    return config["num_experts_per_tok"] / num_experts(config) if ".experts." in hub else 1.0


def num_experts(config: Mapping[str, Any]) -> int:
    return config.get("num_experts", config.get("n_routed_experts", 0))


def common_config(recipe: Path) -> dict[str, Any]:
    fields = read_fields(recipe)
    return {
        "vocab_size": len(fields("tokenizer.ggml.tokens")),
        "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "bos_token_id": fields("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields("tokenizer.ggml.eos_token_id"),
        "torch_dtype": "bfloat16",
    }


def read_fields(recipe: Path) -> Callable[[str], Any]:
    import gguf

    fields = gguf.GGUFReader(recipe).fields
    return lambda key: fields[key].contents()


def dequantised(recipe: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Config and bf16 weights, in the hub's names and row order, of a llama GGUF file with a tied head."""
    import gguf
    import torch

    field = read_fields(recipe)
    heads, kv_heads = field("llama.attention.head_count"), field("llama.attention.head_count_kv")
    config = common_config(recipe) | {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": field("llama.embedding_length"),
        "intermediate_size": field("llama.feed_forward_length"),
        "num_hidden_layers": field("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": field("llama.embedding_length") // heads,
        "rms_norm_eps": float(field("llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": float(field("llama.rope.freq_base")),
    }
    stored = {
        tensor.name: torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type)).bfloat16()
        for tensor in gguf.GGUFReader(recipe).tensors
    }
    weights = {}
    for hub, name in names(config):
        tensor = stored.pop(name, None)
        if tensor is not None:
            weights[hub] = unpermuted(tensor, head_count(hub, config)) if is_rotated(hub) else tensor
    if stored:
        raise SystemExit(f"{recipe}: tensors without a place: {', '.join(stored)}")
    return config, weights


def random_weights(config: Mapping[str, Any]) -> dict[str, Any]:
    import torch

    shapes = latent_shapes(config) if "kv_lora_rank" in config else grouped_shapes(config)
    source = torch.Generator().manual_seed(0)

    def weight(hub: str) -> Any:
        if hub.endswith(CORRECTION):
            return torch.randn((num_experts(config),), generator=source).mul_(0.02)
        if hybrid.is_hybrid(config) and (special := hybrid.special_weight(hub, config, source)) is not None:
            return special
        shape = shapes.get(shape_key(hub, config), (config["hidden_size"],))
        return (
            torch.ones(shape).bfloat16()
            if len(shape) == 1
            else torch.randn(shape, generator=source).mul_(0.02).bfloat16()
        )

    wanted = dict.fromkeys(hub for hub, _ in names(config) if config["model_type"] != "llama" or "_norm." not in hub)
    return {each: weight(each) for hub in wanted for each in hub_names(hub, config)}


def shape_key(hub: str, config: Mapping[str, Any]) -> str:
    """The module's own name; a dense MLP beside experts has other widths than they."""
    own = hub.split(".")[-2]
    is_dense = ".mlp." in hub and ".experts." not in hub and ".shared_expert" not in hub
    return f"dense.{own}" if is_dense and num_experts(config) and own != "gate" else own


def mlp_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    width = config.get("moe_intermediate_size", inner)
    return {
        "gate": (num_experts(config), hidden), "embed_tokens": (config["vocab_size"], hidden),
        "lm_head": (config["vocab_size"], hidden),
        "gate_proj": (width, hidden), "up_proj": (width, hidden), "down_proj": (hidden, width),
        "dense.gate_proj": (inner, hidden), "dense.up_proj": (inner, hidden), "dense.down_proj": (hidden, inner),
    }  # fmt: skip


def grouped_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, dim = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    return mlp_shapes(config) | {
        "q_proj": (queries, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden), "o_proj": (hidden, queries),
        "q_norm": (dim,), "k_norm": (dim,),
    } | (hybrid.shapes(config) if hybrid.is_hybrid(config) else {})  # fmt: skip


def latent_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, heads, rank = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    queries = config["q_lora_rank"]
    return mlp_shapes(config) | {
        "q_a_proj": (queries, hidden), "q_a_layernorm": (queries,), "q_b_proj": (heads * (nope + rope), queries),
        "kv_a_proj_with_mqa": (rank + rope, hidden), "kv_a_layernorm": (rank,),
        "kv_b_proj": (heads * (nope + value), rank), "o_proj": (hidden, heads * value),
    }  # fmt: skip


def hub_names(hub: str, config: Mapping[str, Any]) -> list[str]:
    """The hub tensors that `hub` stands for: `#` is every expert."""
    return [hub.replace("#", str(expert)) for expert in range(num_experts(config))] if "#" in hub else [hub]


def names(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(hub name, GGUF name) of every tensor that these families can have. `#` in a hub name: every expert."""
    inner: list[tuple[str, str]] = []
    for layer in range(config["num_hidden_layers"]):
        inner += [
            (f"model.layers.{layer}.{hub}.weight", f"blk.{layer}.{name}.weight")
            for hub, name in layer_names(config, layer)
        ]
        if hybrid.is_hybrid(config):
            bare = hybrid.bare_names(config, layer)
            inner += [(f"model.layers.{layer}.{hub}", f"blk.{layer}.{name}") for hub, name in bare]
        if "n_routed_experts" in config and layer >= config["first_k_dense_replace"]:
            inner.append((f"model.layers.{layer}.{CORRECTION}", f"blk.{layer}.{CORRECTION_GGUF}"))
    head = {} if config.get("tie_word_embeddings", True) else {HEAD: "output.weight"}
    return [*GLOBAL_NAMES.items(), *head.items(), *inner]


def layer_names(config: Mapping[str, Any], layer: int) -> list[tuple[str, str]]:
    """(hub name, GGUF name) of the matrices and norms of one layer."""
    of_layer = dict(LAYER_NAMES)
    if "kv_lora_rank" in config:
        of_layer = {hub: name for hub, name in of_layer.items() if hub.startswith("mlp.")} | dict(LATENT_NAMES)
    if not num_experts(config) or layer < config.get("first_k_dense_replace", 0):
        return list(of_layer.items())
    of_layer = {hub: name for hub, name in of_layer.items() if not hub.startswith("mlp.")}
    of_layer |= {ROUTER: ROUTER_GGUF} | {f"mlp.experts.#.{hub}": name for hub, name in EXPERT_NAMES.items()}
    if config.get("n_shared_experts"):
        of_layer |= {f"mlp.shared_experts.{hub}": name for hub, name in SHARED_NAMES.items()}
    return hybrid.layer_names(config, layer, of_layer) if hybrid.is_hybrid(config) else list(of_layer.items())


def is_rotated(hub: str) -> bool:
    """GGUF stores these rows of a llama model in the order of its rotary embedding."""
    return hub.endswith(("q_proj.weight", "k_proj.weight"))


def head_count(hub: str, config: Mapping[str, Any]) -> int:
    return config["num_attention_heads" if "q_proj" in hub else "num_key_value_heads"]


def permuted(tensor: Any, heads: int) -> Any:
    rows, columns = tensor.shape
    return tensor.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)


def unpermuted(tensor: Any, heads: int) -> Any:
    rows, columns = tensor.shape
    return tensor.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def write_hub(hub: Path, config: Mapping[str, Any], weights: Mapping[str, Any], recipe: Path) -> None:
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    # Saved first: transformers writes no config.json here, and what it writes must not replace ours.
    AutoTokenizer.from_pretrained(recipe.parent, gguf_file=recipe.name).save_pretrained(hub)
    (hub / "config.json").write_text(json.dumps(dict(config), indent=1) + "\n", encoding="utf-8")
    save_file(
        {name: tensor.contiguous() for name, tensor in weights.items()}, hub / "model.safetensors", {"format": "pt"}
    )


def write_gguf(path: Path, kind: str, config: Mapping[str, Any], weights: Mapping[str, Any], recipe: Path) -> int:
    """One GGUF file with the recipe's tokenizer. Returns the bytes that one decode step reads of it.

    The embedding, which is the head as well, is Q8_0 in a Q4_0 file: what llama.cpp's own quantiser stores for a tied
    head whose width is no multiple of 256.
    """
    import gguf
    import torch

    writer = gguf.GGUFWriter(path, ARCHITECTURES[config["model_type"]])
    add_keys(writer, kind, config)
    for field in gguf.GGUFReader(recipe).fields.values():
        if field.name.startswith("tokenizer."):
            is_array = field.types[0] == gguf.GGUFValueType.ARRAY
            add = (
                writer.add_array
                if is_array
                else lambda key, value, t=field.types[0]: writer.add_key_value(key, value, t)
            )
            add(field.name, field.contents())
    nbytes = 0
    for hub, name in names(config):
        parts = [weights[each] for each in hub_names(hub, config) if each in weights]
        if not parts:
            continue
        tensor = torch.stack(parts) if "#" in hub else parts[0]
        if is_rotated(hub) and config["model_type"] == "llama":
            tensor = permuted(tensor, head_count(hub, config))
        if hybrid.is_hybrid(config):
            tensor = hybrid.stored(hub, name, tensor, config)
        wanted = kind
        if tensor.dim() == 1 or ROUTER_GGUF in name or "conv1d" in name:
            wanted = "F32"
        elif hub == TIED and kind in QUANTISED:
            wanted = "Q8_0"
        stored = gguf.GGMLQuantizationType[wanted]
        data = gguf.quants.quantize(tensor.float().numpy(), stored)
        writer.add_tensor(name, data, raw_dtype=stored)
        nbytes += round(data.nbytes * read_part(hub, config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return nbytes


def add_keys(writer: Any, kind: str, config: Mapping[str, Any]) -> None:
    import gguf

    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    if "kv_lora_rank" in config:
        add_latent_keys(writer, config)
    else:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
        writer.add_rope_dimension_count(int(config["head_dim"] * config.get("partial_rotary_factor", 1)))
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    if num_experts(config):
        writer.add_expert_count(num_experts(config))
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if hybrid.is_hybrid(config):
        hybrid.add_keys(writer, config)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind}"])


def add_latent_keys(writer: Any, config: Mapping[str, Any]) -> None:
    """Those of latent attention and of its family's experts, which GGUF knows under the first one's name."""
    import gguf

    writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(config["kv_lora_rank"])
    writer.add_key_length(config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
    writer.add_value_length(config["v_head_dim"])
    writer.add_rope_dimension_count(config["qk_rope_head_dim"])
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


if __name__ == "__main__":
    sys.exit(main())
