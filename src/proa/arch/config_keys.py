"""Which config keys may be left unread. Owns the three tables of that policy; reads no checkpoint file itself.

A key that some model family gives a meaning, that this family does not implement and whose value is not the neutral
one would change the model silently: an error. A key that nobody knows is reported. Bookkeeping keys are neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from proa.checkpoint.hf_config import HFView
from proa.errors import ConfigError

NEUTRAL: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "attention_bias": (False,),
        "attention_chunk_size": (0,),
        "attention_multiplier": (),
        "attn_logit_softcapping": (0,),
        "attn_output_gate": (False,),
        "attn_type_list": (),
        "clip_qkv": (),
        "decoder_sparse_step": (0, 1),
        "embedding_multiplier": (1,),
        "final_logit_softcapping": (0,),
        "first_k_dense_replace": (0,),
        "full_attention_interval": (0, 1),
        "hidden_act": ("silu",),
        "hidden_activation": ("silu",),
        "index_topk": (0,),
        "kv_lora_rank": (0,),
        "layer_types": (),
        "layernorm_full_attention_beta": (1,),
        "layernorm_linear_attention_beta": (1,),
        "layernorm_mlp_beta": (1,),
        "linear_attn_config": (),
        "linear_num_value_heads": (0,),
        "logit_scale": (1,),
        "logits_scaling": (1,),
        "mamba_ssm_dtype": ("float32",),
        "mla_use_nope": (False,),
        "mlp_bias": (False,),
        "mlp_only_layers": ((),),
        "moe_intermediate_size": (0,),
        "moe_layer_freq": (1,),
        "moe_renormalize": (),
        "moe_router_activation_func": (),
        "mtp_num_hidden_layers": (0,),
        "mtp_use_dedicated_embeddings": (False,),
        "n_group": (0, 1),
        "n_routed_experts": (0,),
        "n_shared_experts": (0,),
        "no_rope_layers": ((),),
        "norm_topk_prob": (),
        "norm_type": ("rms_norm", "rmsnorm"),
        "num_expert_group": (0, 1),
        "num_experts": (0,),
        "num_experts_per_tok": (0,),
        "num_experts_per_token": (0,),
        "num_hash_layers": (0,),
        "num_local_experts": (0,),
        "num_mtp_modules": (0,),
        "num_nextn_predict_layers": (0,),
        "num_shared_experts": (0,),
        "output_gate_type": (),
        "parallel_attn": (False,),
        "partial_rotary_factor": (1,),
        "pretraining_tp": (1,),
        "q_lora_rank": (0,),
        "qk_layernorm": (False,),
        "qk_norm": (False,),
        "qk_norm_type": (),
        "qkv_bias": (False,),
        "query_pre_attn_scalar": (),
        "residual_multiplier": (1,),
        "rope_interleave": (False,),
        "rope_interleaved": (False,),
        "rope_parameters": (),
        "rope_scaling": (),
        "rotary_dim": (),
        "rotary_pct": (1,),
        "routed_scaling_factor": (1,),
        "scoring_func": (),
        "shared_expert_intermediate_size": (0,),
        "shared_intermediate_size": (0,),
        "sliding_window": (),
        "swiglu_limit": (0,),
        "tie_word_embeddings": (False,),
        "topk_group": (0, 1),
        "topk_method": (),
        "use_mrope": (False,),
        "use_mtp": (False,),
        "use_parallel_residual": (False,),
        "use_qk_norm": (False,),
        "use_qkv_bias": (False,),
        "use_routing_bias": (False,),
        "use_sliding_window": (False,),
    }
)
"""Key -> values beside null that mean `not used`. A family that reads the key implements it and is not asked here."""

NEUTRAL_ROPE: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "attention_factor": (1,),
        "beta_fast": (),
        "beta_slow": (),
        "factor": (1,),
        "high_freq_factor": (),
        "long_factor": (),
        "low_freq_factor": (),
        "mrope_section": (),
        "mscale": (),
        "mscale_all_dim": (),
        "original_max_position_embeddings": (),
        "partial_rotary_factor": (1,),
        "short_factor": (),
        "truncate": (),
    }
)
"""The same for the rope object: what a rope kind does not read must not be there."""

QUANTIZATION = "quantization_config"  # judged by checkpoint/quant.py, together with the stored tensors

BOOKKEEPING = frozenset(
    (
        "_attn_implementation", "_attn_implementation_autoset", "_commit_hash", "_flash_attn_2_enabled",
        "_name_or_path", "add_bos_token", "add_cross_attention", "architectures", "attention_dropout", "attn_dropout",
        "attn_implementation", "auto_map", "aux_loss_alpha", "bad_words_ids", "begin_suppress_tokens", "bos_token_id",
        "chunk_size_feed_forward", "classifier_dropout", "cross_attention_hidden_size", "decoder_start_token_id",
        "diversity_penalty", "do_sample", "dtype", "early_stopping", "embd_pdrop", "encoder_no_repeat_ngram_size",
        "eos_token_id", "ep_size", "exponential_decay_length_penalty", "finetuning_task", "forced_bos_token_id",
        "forced_eos_token_id", "hidden_dropout", "id2label", "initializer_range", "is_decoder", "is_encoder_decoder",
        "is_llama_config", "keys_to_ignore_at_inference", "label2id", "length_penalty", "max_length",
        "max_window_layers", "min_length", "model_max_length", "model_type", "no_repeat_ngram_size", "num_beam_groups",
        "num_beams", "num_return_sequences", "output_attentions", "output_hidden_states", "output_router_logits",
        "output_scores", "pad_token_id", "prefix", "problem_type", "pruned_heads", "remove_invalid_values",
        "repetition_penalty", "resid_pdrop", "return_dict", "return_dict_in_generate", "router_aux_loss_coef",
        "router_jitter_noise", "sep_token_id", "seq_aux", "suppress_tokens", "task_specific_params", "temperature",
        "tf_legacy_loss", "tie_encoder_decoder", "tokenizer_class", "top_k", "top_p", "torch_dtype", "torchscript",
        "transformers_version", "typical_p", "unk_token_id", "use_bfloat16", "use_cache",
    )
)  # fmt: skip
"""Keys about files, training, tokenizer or other programs: they do not change what the model computes.

`auto_map` names Python code inside the checkpoint; Proa never executes it. `max_window_layers` acts through
`use_sliding_window` only, which is not in this list.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigReport:
    """What is left over of the config file `where`: unknown keys with their values, and remarks."""

    where: str
    unknown: Mapping[str, Any]
    notes: tuple[str, ...]


def review(config: HFView, family: str) -> ConfigReport:
    """Judge every key that `parse` did not read.

    Raises ConfigError `config/unimplemented` naming file, key and value.
    """
    unknown: dict[str, Any] = {}
    for key in config.keys():  # noqa: SIM118  (HFView is not a mapping)
        if key in config.read or key in BOOKKEEPING or key == QUANTIZATION:
            continue
        if key in NEUTRAL:
            _refuse(config, key, config.get(key, None), NEUTRAL[key], f"the {family} family")
        else:
            unknown[key] = config.get(key, None)
    return ConfigReport(where=config.where, unknown=MappingProxyType(unknown), notes=_notes(config))


def refuse_rope_leftovers(rope: HFView) -> None:
    """The same judgement over the rope object, whose kind has read what it implements."""
    kind = rope.str("rope_type")
    for key in set(rope.keys()) - rope.read:
        if key == "original_max_position_embeddings" and kind in ("default", "linear"):
            continue  # a remark there: these kinds do not depend on the original context length
        _refuse(rope, key, rope.get(key, None), NEUTRAL_ROPE.get(key, ()), f"rope type {kind}")


def refuse_leftovers(config: HFView, who: str) -> None:
    """The same over a nested object that `who` knows whole: what was not read of it must be null."""
    for key in config.keys():  # noqa: SIM118  (HFView is not a mapping)
        if key not in config.read:
            _refuse(config, key, config.get(key, None), (), who)


def _refuse(config: HFView, key: str, value: Any, neutral: tuple[Any, ...], who: str) -> None:
    if value is None or value in neutral:
        return
    raise ConfigError(
        "config/unimplemented",
        f"{config.where}: {key} = {value!r} changes the model, and {who} does not implement it",
        facts=(f"neutral here: {', '.join(['null', *map(str, neutral)])}",),
    )


def _notes(config: HFView) -> tuple[str, ...]:
    notes: list[str] = []
    if config.has("auto_map"):
        notes.append("auto_map names code inside the checkpoint; it is never executed")
    if not any(config.has(key) for key in ("rope_theta", "rope_parameters")):
        notes.append("rope_theta is absent; 10000 is assumed, as the hub does")
    return tuple(notes)
