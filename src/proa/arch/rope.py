"""The rotary embedding of a config as a spec. Which part of a head is rotated is the caller's `dim`."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

from proa.arch.blocks import QueryScale, RopeKind, RopeSpec, YarnSpec
from proa.arch.config_keys import refuse_rope_leftovers
from proa.arch.values import above, positive
from proa.checkpoint.hf_config import HFView
from proa.errors import ConfigError

PARTIAL = "partial_rotary_factor"
LLAMA4_KEYS = ("llama_4_scaling_beta", "original_max_position_embeddings")
"""Keys of the rope object that `query_scale` reads."""


def rope(c: HFView, dim: int, *, is_partial: bool = False, read_elsewhere: Collection[str] = ()) -> RopeSpec:
    """The rotary embedding, in the old or the new spelling. A kind or a parameter without code here is an error, unless
    the caller gives it a meaning of its own: `is_partial` (`dim` is a part of the head), `read_elsewhere`."""
    given = c.rope()
    if is_partial:
        given.get(PARTIAL, None)
    spec = RopeSpec(kind=_rope_kind(given), base=above(given, "rope_theta", 0.0), dim=dim)
    match spec.kind:
        case RopeKind.LINEAR:
            spec = replace(spec, factor=above(given, "factor", 0.0))
        case RopeKind.LLAMA3:
            low = above(given, "low_freq_factor", 0.0)
            spec = replace(
                spec,
                factor=above(given, "factor", 0.0),
                low_freq_factor=low,
                high_freq_factor=above(given, "high_freq_factor", low),
                original_max_position=positive(given, "original_max_position_embeddings"),
            )
        case RopeKind.YARN:
            spec = _yarn(c, given, spec)
        case RopeKind.DEFAULT | RopeKind.FACTORS:
            pass
    for key in read_elsewhere:
        given.get(key, None)
    refuse_rope_leftovers(given)
    return spec


def partial_dim(c: HFView, head: int, *, default: float) -> int:
    """How many of a head's `head` elements are rotated, by the config's or its rope object's partial factor."""
    given = c.rope()
    factor = (given if given.has(PARTIAL) else c).float(PARTIAL, default=default)
    c.get(PARTIAL, None)
    dim = int(head * factor)
    if not 0 < dim <= head or dim % 2:
        raise ConfigError(
            "config/value", f"{c.where}: {PARTIAL} = {factor:g} leaves no even part of a head of {head} to rotate"
        )
    return dim


def _yarn(c: HFView, given: HFView, spec: RopeSpec) -> RopeSpec:
    """`magnitude` is `attention_factor` where it is given, else it follows from the factor and the two mscales."""
    original = positive(given, "original_max_position_embeddings")
    if given.has("max_position_embeddings"):  # a copy of the config's own that some files keep here
        positive(given, "max_position_embeddings")
    ratio = positive(c, "max_position_embeddings") / original
    factor = above(given, "factor", 0.0) if given.has("factor") else ratio
    mscale, all_dim = (given.float(key, default=0.0) for key in ("mscale", "mscale_all_dim"))
    stated = given.float("attention_factor", default=None)
    own = yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim) if mscale and all_dim else yarn_mscale(factor, 1.0)
    yarn = YarnSpec(
        beta_fast=given.float("beta_fast", default=0.0) or 32.0,
        beta_slow=given.float("beta_slow", default=0.0) or 1.0,
        magnitude=own if stated is None else stated,
        truncate=given.flag("truncate", default=True),
    )
    if yarn.beta_fast < yarn.beta_slow or yarn.magnitude <= 0 or spec.base <= 1:
        raise ConfigError(
            "config/value",
            f"{c.where}: rope_scaling: yarn needs beta_fast >= beta_slow, attention_factor > 0 and rope_theta > 1, "
            f"but has {yarn.beta_fast:g}, {yarn.beta_slow:g}, {yarn.magnitude:g} and {spec.base:g}",
        )
    return replace(spec, factor=factor, original_max_position=original, yarn=yarn)


def yarn_mscale(factor: float, mscale: float) -> float:
    """How much longer rows count at `factor` times the original context (Peng et al. 2023, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def query_scale(c: HFView) -> QueryScale | None:
    """What `llama_4_scaling_beta` of the rope object says, if it is there."""
    given = c.rope()
    beta = given.float("llama_4_scaling_beta", default=None)
    if beta is None:
        return None
    if beta < 0:
        raise ConfigError("config/value", f"{c.where}: llama_4_scaling_beta = {beta:g} must not be negative")
    return QueryScale(beta=beta, original=positive(given, "original_max_position_embeddings"))


def _rope_kind(given: HFView) -> RopeKind:
    name = given.str("rope_type")
    try:
        return RopeKind(name)
    except ValueError:
        raise ConfigError(
            "config/unimplemented",
            f"{given.where}: rope_scaling: rope_type = {name!r} is not implemented",
            facts=("implemented: default, linear, llama3, yarn",),
        ) from None
