"""Parsers that the families of DeepSeek's shape share: latent attention, dense layers, then layers with experts."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

from proa.arch import common, moe, nextn
from proa.arch.blocks import FFNSpec, MLASpec, MoESpec, RouterSpec
from proa.arch.decoder import DecoderSpec
from proa.arch.family import BundledDraft
from proa.checkpoint.hf_config import HFView
from proa.errors import ConfigError
from proa.units import Algorithm

NEXTN = MappingProxyType({Algorithm.NEXTN: BundledDraft(derive=nextn.derive, weights=nextn.nextn_rules)})
_SPARSE, _DENSE = "sparse", "dense"


def decoder(c: HFView, family: str, *, mixers: Sequence[MLASpec], router: RouterSpec, dense: int) -> DecoderSpec:
    """`dense`: how many layers before the first one with experts, where the config does not say."""
    experts = moe.moe(
        c,
        experts="n_routed_experts",
        top_k="num_experts_per_tok",
        width="moe_intermediate_size",
        router=router,
        shared=moe.shared(c, "n_shared_experts", "moe_intermediate_size"),
    )
    return common.decoder(c, family, mixers=mixers, ffns=_ffns(c, experts, dense))


def alike(c: HFView, mixer: MLASpec) -> tuple[MLASpec, ...]:
    """The same attention in every layer."""
    return (mixer,) * common.num_layers(c)


def _ffns(c: HFView, experts: MoESpec, dense: int) -> tuple[FFNSpec | MoESpec, ...]:
    """As `mlp_layer_types` says where there is one, else experts from layer `first_k_dense_replace` on, in every
    `moe_layer_freq`-th layer."""
    count, mlp = common.num_layers(c), common.ffn(c, bias=False)
    first, every = c.int("first_k_dense_replace", default=dense), c.int("moe_layer_freq", default=1)
    kinds = c.list("mlp_layer_types", default=None)
    if first < 0 or every < 1:
        raise ConfigError(
            "config/value", f"{c.where}: first_k_dense_replace = {first} or moe_layer_freq = {every} is out of range"
        )
    if kinds is None:
        return tuple(experts if index >= first and index % every == 0 else mlp for index in range(count))
    if len(kinds) != count or not all(kind in (_SPARSE, _DENSE) for kind in kinds):
        raise ConfigError(
            "config/value", f"{c.where}: mlp_layer_types must say {_SPARSE} or {_DENSE} for each of {count} layers"
        )
    return tuple(experts if kind == _SPARSE else mlp for kind in kinds)
