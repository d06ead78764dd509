"""GGUF in the hub's words: config keys, tensor names and row orders of the architectures that Proa reads from GGUF.

Owns the translation only. A metadata key or a tensor that has no translation keeps its stored name, so that it is
listed or refused further on, never dropped.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from proa.checkpoint.gguf import GgufFile
from proa.checkpoint.gguf_latent import latent_config, latent_scaling, latent_tensor
from proa.checkpoint.gguf_names import ARCHES, GATING, KEYS, NAMES, Arch
from proa.checkpoint.types import RopePermuted, TensorInfo
from proa.errors import CheckpointError

_SCALING = "rope.scaling."
_SCALING_KEYS = MappingProxyType(
    {
        "rope.scale_linear": "factor",
        "rope.scaling.factor": "factor",
        "rope.scaling.type": "rope_type",
        "rope.scaling.original_context_length": "original_max_position_embeddings",
    }
)
_MLA_LENGTHS = ("attention.key_length_mla", "attention.value_length_mla")
_GATING = "expert_gating_func"
# Not passed on as keys: compared with other facts, made into other keys, or a remark without effect (finetuned).
_CONSUMED = frozenset(
    (
        "attention.value_length",
        *_MLA_LENGTHS,
        "rope.dimension_count",
        "vocab_size",
        "rope.scaling.finetuned",
        _GATING,
        *_SCALING_KEYS,
    )
)
_TOKEN_GATE = "shared_expert_gate.weight"  # [D] where the converter drops a dimension of one, [1, D] in the hub
_TOKENIZER = "tokenizer.ggml."
_END_IDS = ("eos_token_id", "eot_token_id", "eom_token_id")


def hub_config(gguf: GgufFile) -> dict[str, Any]:
    """What config.json would say. Unknown keys of the architecture's prefix are kept as stored (`llama.foo.bar`)."""
    name = _architecture(gguf)
    arch, prefix = ARCHES[name], f"{name}."
    own = {key[len(prefix) :]: value for key, value in gguf.metadata.items() if key.startswith(prefix)}
    config: dict[str, Any] = {"architectures": [arch.hub], "model_type": name, **arch.unsaid}
    known = {**KEYS, **arch.keys}
    for key, value in own.items():
        if key in known:
            config[known[key]] = value
        elif key not in _CONSUMED and not key.startswith(_SCALING):
            config[prefix + key] = value
    stored = {tensor.name: tensor for tensor in gguf.tensors}
    if "token_embd.weight" in stored:
        config["vocab_size"] = stored["token_embd.weight"].shape[0]
    config["tie_word_embeddings"] = "output.weight" not in stored
    config |= _from_tensors(arch, stored) | _gating(arch, own) | _bundled(config)
    config |= latent_config(own, config, stored) if arch.is_latent else _partial_rotary(own, config)
    config |= _rope(gguf, own, arch, has_factors="rope_freqs.weight" in stored)
    _refuse_contradictions(gguf, own, config, arch)
    return config


def hub_tensors(gguf: GgufFile, config: Mapping[str, Any]) -> dict[str, TensorInfo]:
    """Tensors by hub name. llama's q and k rows are marked as permuted (its converter interleaves the rope halves)."""
    arch = ARCHES[_architecture(gguf)]
    heads = _row_heads(config) if arch.permuted else {}
    tensors: dict[str, TensorInfo] = {}
    for tensor in gguf.tensors:
        name = hub_name(tensor.stored_name, arch)
        if name in tensors:
            names = f"{tensors[name].stored_name} and {tensor.stored_name}"
            raise CheckpointError("checkpoint/duplicate-tensor", f"{gguf.path.name}: {names} both stand for {name}")
        count = heads.get(name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2])
        order = RopePermuted(heads=count) if count is not None else None
        shape = (1, *tensor.shape) if name.endswith(_TOKEN_GATE) and len(tensor.shape) == 1 else tensor.shape
        named = tensor._replace(name=name, shape=shape, row_order=order)
        tensors[name] = latent_tensor(named) if arch.is_latent else named
    return tensors


def hub_name(stored: str, arch: Arch) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; a name without translation stays as it is."""
    body, _, kind = stored.rpartition(".")
    if kind not in ("weight", "bias"):
        return stored
    if body in NAMES:
        return f"{NAMES[body]}.{kind}"
    block, _, inner = body.removeprefix("blk.").partition(".")
    if body.startswith("blk.") and block.isdecimal():
        if inner in arch.layer:
            return f"model.layers.{block}.{arch.layer[inner]}.{kind}"
        if f"{inner}.{kind}" in arch.layer:
            return f"model.layers.{block}.{arch.layer[f'{inner}.{kind}']}"
    return stored


def hub_generation(gguf: GgufFile) -> dict[str, Any]:
    """What generation_config.json would say: where text begins and which ids end it."""
    ends = [gguf.metadata[_TOKENIZER + key] for key in _END_IDS if _TOKENIZER + key in gguf.metadata]
    unique = list(dict.fromkeys(ends))
    generation: dict[str, Any] = {"eos_token_id": unique[0] if len(unique) == 1 else unique} if unique else {}
    for key, stored in (("bos_token_id", "bos_token_id"), ("pad_token_id", "padding_token_id")):
        if _TOKENIZER + stored in gguf.metadata:
            generation[key] = gguf.metadata[_TOKENIZER + stored]
    return generation


def tokenizer_metadata(gguf: GgufFile) -> dict[str, Any]:
    """`tokenizer.ggml.*` without that prefix."""
    return {key.removeprefix(_TOKENIZER): value for key, value in gguf.metadata.items() if key.startswith(_TOKENIZER)}


def _architecture(gguf: GgufFile) -> str:
    kind, arch = gguf.metadata.get("general.type", "model"), gguf.metadata.get("general.architecture")
    if kind != "model":
        raise CheckpointError("checkpoint/wrong-form", f"{gguf.path.name}: is a GGUF {kind}, not a model")
    if gguf.metadata.get("split.count", 1) not in (0, 1):
        raise CheckpointError(
            "checkpoint/gguf-split",
            f"{gguf.path.name}: is one part of {gguf.metadata['split.count']} (split.count); split GGUF is not read",
            hint="merge the parts into one file first (llama-gguf-split --merge)",
        )
    if not isinstance(arch, str) or arch not in ARCHES:
        raise CheckpointError(
            "checkpoint/gguf-architecture",
            f"{gguf.path.name}: the architecture {arch!r} is not read from GGUF",
            facts=[f"read: {', '.join(ARCHES)}"],
        )
    return arch


def _from_tensors(arch: Arch, stored: Collection[str]) -> dict[str, bool]:
    """Config keys that follow from tensors."""
    kinds = {name.rpartition(".")[0].rpartition(".")[2] for name in stored if name.endswith(".bias")}
    flags: dict[str, bool] = {}
    if not arch.has_biases and kinds & {"attn_q", "attn_k", "attn_v", "attn_output"}:
        flags["attention_bias"] = True
    if kinds & {"ffn_gate", "ffn_up", "ffn_down"}:
        flags["mlp_bias"] = True
    if arch.has_qk_norm_key:
        flags["use_qk_norm"] = any(name.endswith(".attn_q_norm.weight") for name in stored)
    return flags


def _bundled(config: Mapping[str, Any]) -> dict[str, Any]:
    """GGUF counts the layers of a bundled draft among its blocks, the hub beside them."""
    blocks, drafts = config.get("num_hidden_layers"), config.get("num_nextn_predict_layers")
    return {"num_hidden_layers": blocks - drafts} if type(blocks) is int and type(drafts) is int else {}


def _gating(arch: Arch, own: Mapping[str, Any]) -> dict[str, Any]:
    """How the router scores: said in the hub's key, unless it is what the architecture means anyway."""
    if _GATING not in own:
        return {}
    said = GATING.get(own[_GATING], own[_GATING])
    return {} if said == arch.gating else {"scoring_func": said}


def _rope(gguf: GgufFile, own: Mapping[str, Any], arch: Arch, *, has_factors: bool) -> dict[str, Any]:
    """rope_scaling, when there is any. Stored factors (rope_freqs.weight) are a scaling of their own."""
    named = {_SCALING_KEYS[key]: own[key] for key in _SCALING_KEYS if key in own}
    named |= {key.removeprefix(_SCALING): own[key] for key in own if key.startswith(_SCALING) and key not in _CONSUMED}
    # A factor without a kind is a linear one, as in ggml.
    kind = named.setdefault("rope_type", "linear" if "factor" in named else "none")
    if has_factors and kind != "none":
        raise _contradiction(gguf, f"rope.scaling.type is {kind!r}, but rope_freqs.weight is stored too")
    if has_factors:
        return {"rope_scaling": {"rope_type": "factors"}}
    return {} if kind == "none" else {"rope_scaling": latent_scaling(named) if arch.is_latent else named}


def _refuse_contradictions(gguf: GgufFile, own: Mapping[str, Any], config: Mapping[str, Any], arch: Arch) -> None:
    """Facts that are stored twice must agree."""
    head_dim, rows = _head_dim(config), config.get("vocab_size")
    if not arch.is_latent and own.get("attention.value_length", head_dim) != head_dim:
        raise _contradiction(gguf, f"attention.value_length is {own['attention.value_length']}, key_length {head_dim}")
    if own.get("vocab_size", rows) != rows:
        raise _contradiction(gguf, f"vocab_size is {own['vocab_size']}, but token_embd.weight has {rows} rows")


def _partial_rotary(own: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """partial_rotary_factor, when fewer (or more) dimensions than the head's are rotated."""
    head_dim = _head_dim(config)
    rotated = own.get("rope.dimension_count", head_dim)
    if rotated == head_dim:
        return {}
    numbers = type(rotated) is int and type(head_dim) is int and head_dim > 0
    return {"partial_rotary_factor": rotated / head_dim if numbers else rotated}


def _head_dim(config: Mapping[str, Any]) -> Any:
    """The stored head size, else hidden / heads; None where the metadata does not allow to say."""
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    if config.get("head_dim") is None and type(heads) is int and type(hidden) is int and heads > 0:
        return hidden // heads
    return config.get("head_dim")


def _row_heads(config: Mapping[str, Any]) -> dict[str, int]:
    """Head counts by which q and k rows are permuted. A count of another type is the config view's error, later."""
    query = config.get("num_attention_heads")
    keys = config.get("num_key_value_heads", query)
    return {name: count for name, count in (("q_proj", query), ("k_proj", keys)) if type(count) is int and count > 0}


def _contradiction(gguf: GgufFile, what: str) -> CheckpointError:
    return CheckpointError("checkpoint/gguf-contradiction", f"{gguf.path.name}: {what}")
