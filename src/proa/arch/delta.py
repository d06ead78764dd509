"""Linear attention by the delta rule: config parsers, and weight rules in every stored form (GDN flat, grouped; KDA).

Imports values.py and rules.py, never common.py, which dispatches to the rules here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType

from proa.arch.blocks import NormSpec
from proa.arch.delta_blocks import Decay, DeltaSpec, OutputGate
from proa.arch.rules import Rows, cut_rule, layer_rule
from proa.arch.values import named, positive
from proa.arch.weights import WeightRule
from proa.checkpoint.hf_config import HFView
from proa.errors import ConfigError

DeltaRules = Callable[[DeltaSpec, int, Collection[int]], Iterator[WeightRule]]
"""The rules of layers with one mixer: of it, the hidden width and the layers."""

MAX_HEADS = 65536  # a config is untrusted: the rules of 10^9 heads must not be built before the error
_GATES: Mapping[str, OutputGate] = MappingProxyType({"swish": OutputGate.SILU, "silu": OutputGate.SILU})
_GDN, _KDA = "linear_attn", "self_attn"


def gdn(c: HFView, norm: NormSpec) -> DeltaSpec:
    """Gated DeltaNet as the `linear_*` keys say; `norm` is that of a head's result."""
    keys = positive(c, "linear_num_key_heads", at_most=MAX_HEADS)
    values = positive(c, "linear_num_value_heads", at_most=MAX_HEADS)
    if values % keys:
        raise ConfigError(
            "config/value",
            f"{c.where}: linear_num_value_heads = {values} is not a multiple of linear_num_key_heads = {keys}",
        )
    return DeltaSpec(
        key_heads=keys,
        value_heads=values,
        key_dim=positive(c, "linear_key_head_dim"),
        value_dim=positive(c, "linear_value_head_dim"),
        taps=positive(c, "linear_conv_kernel_dim"),
        decay=Decay.HEAD,
        gate=named(c, "output_gate_type", _GATES, default="swish"),
        norm=norm,
        rank=None,
    )


def kda(c: HFView, norm: NormSpec) -> DeltaSpec:
    """Kimi Delta Attention as `linear_attn_config` (`c`) says: heads of one width, which the low-rank maps have too."""
    heads, dim = positive(c, "num_heads", at_most=MAX_HEADS), positive(c, "head_dim")
    return DeltaSpec(
        key_heads=heads,
        value_heads=heads,
        key_dim=dim,
        value_dim=dim,
        taps=positive(c, "short_conv_kernel_size"),
        decay=Decay.CHANNEL,
        gate=OutputGate.SIGMOID,
        norm=norm,
        rank=dim,
    )


def flat_rules(spec: DeltaSpec, hidden: int, layers: Collection[int]) -> Iterator[WeightRule]:
    """GDN whose projections have all query heads, then all key heads, then all value heads (Qwen3.5)."""
    at = 0
    for name, rows in (
        ("in_proj_qkv", spec.channels),
        ("in_proj_b", spec.value_heads),
        ("in_proj_a", spec.decays),
        ("in_proj_z", spec.values),
    ):
        yield _linear(_GDN, name, "proj", (rows, hidden), layers, (at, at + rows))
        at += rows
    yield from _gdn_rules(spec, hidden, layers)


def grouped_rules(spec: DeltaSpec, hidden: int, layers: Collection[int]) -> Iterator[WeightRule]:
    """GDN whose projections have all of a key head together: query, key, its value heads, their gates z; and b, then a,
    of its value heads (Qwen3-Next)."""
    shared = spec.value_heads // spec.key_heads
    q, k, v = 0, spec.keys, 2 * spec.keys
    b = spec.channels
    a = b + spec.value_heads
    z = a + spec.decays
    wide = shared * spec.value_dim
    for name, pieces in (
        ("in_proj_qkvz", ((q, spec.key_dim), (k, spec.key_dim), (v, wide), (z, wide))),
        ("in_proj_ba", ((b, shared), (a, shared))),
    ):
        cuts = list(_group_cuts(spec.key_heads, pieces))
        shape = (cuts[-1][1][1], hidden)
        yield cut_rule(f"{_GDN}.{name}.weight", "attn.proj.weight", shape, layers, cuts, is_linear=True)
    yield from _gdn_rules(spec, hidden, layers)


def _group_cuts(groups: int, pieces: Collection[tuple[int, int]]) -> Iterator[tuple[Rows, Rows]]:
    """Stored rows are, group by group, one run of each piece. A piece is (where its first group goes, rows of each)."""
    stored = 0
    for group in range(groups):
        for start, rows in pieces:
            at = start + group * rows
            yield (at, at + rows), (stored, stored + rows)
            stored += rows


def _gdn_rules(spec: DeltaSpec, hidden: int, layers: Collection[int]) -> Iterator[WeightRule]:
    yield layer_rule(f"{_GDN}.conv1d.weight", "attn.conv.weight", (spec.channels, 1, spec.taps), layers)
    yield layer_rule(f"{_GDN}.A_log", "attn.a_log", (spec.value_heads,), layers)
    yield layer_rule(f"{_GDN}.dt_bias", "attn.dt_bias", (spec.decays,), layers)
    yield layer_rule(f"{_GDN}.norm.weight", "attn.norm.weight", (spec.value_dim,), layers)
    yield _linear(_GDN, "out_proj", "o", (hidden, spec.values), layers, None)


def kda_rules(spec: DeltaSpec, hidden: int, layers: Collection[int]) -> Iterator[WeightRule]:
    """KDA: projections and convolutions of their own for q, k and v, low-rank maps for the decay (f) and the gate (g).
    `A_log` is stored with three dimensions of one element around the heads."""
    if spec.rank is None:
        raise ValueError("KDA has low-rank maps, and their rank is not given")
    at = 0
    for name, rows in (("q", spec.keys), ("k", spec.keys), ("v", spec.values)):
        span = (at, at + rows)
        yield _linear(_KDA, f"{name}_proj", "proj", (rows, hidden), layers, span)
        yield layer_rule(f"{_KDA}.{name}_conv1d.weight", "attn.conv.weight", (rows, 1, spec.taps), layers, span)
        at += rows
    yield _linear(_KDA, "b_proj", "proj", (spec.value_heads, hidden), layers, (at, at + spec.value_heads))
    for name, to, rows in (("f", "a", spec.decays), ("g", "z", spec.values)):
        yield _linear(_KDA, f"{name}_a_proj", f"{to}_down", (spec.rank, hidden), layers, None)
        yield _linear(_KDA, f"{name}_b_proj", f"{to}_up", (rows, spec.rank), layers, None)
    yield layer_rule(f"{_KDA}.A_log", "attn.a_log", (1, 1, spec.value_heads, 1), layers)
    yield layer_rule(f"{_KDA}.dt_bias", "attn.dt_bias", (spec.decays,), layers)
    yield layer_rule(f"{_KDA}.o_norm.weight", "attn.norm.weight", (spec.value_dim,), layers)
    yield _linear(_KDA, "o_proj", "o", (hidden, spec.values), layers, None)


def _linear(
    module: str, name: str, parameter: str, shape: tuple[int, int], layers: Collection[int], rows: Rows | None
) -> WeightRule:
    source, target = f"{module}.{name}.weight", f"attn.{parameter}.weight"
    return layer_rule(source, target, shape, layers, rows, is_linear=True)
