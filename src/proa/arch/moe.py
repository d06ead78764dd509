"""Experts: config parsers, and the weight rules of MoE layers in every stored form. Spellings are arguments."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from proa.arch.blocks import FFNSpec, GroupScore, MoESpec, RouterSpec, Score, SharedSpec
from proa.arch.layout import ExpertFiles, MoELayout
from proa.arch.rules import PROJECTIONS, Triple, cut_rule, ffn_rules, layer_rule
from proa.arch.values import above, named, positive
from proa.arch.weights import Action, Fill, Part, WeightRule
from proa.checkpoint.hf_config import HFView
from proa.errors import ConfigError, WeightError

MAX_EXPERTS = 65536  # a config is untrusted: rules for 10^9 experts must not be built before the error

SCORES: Mapping[str, Score] = MappingProxyType(
    {"softmax": Score.SOFTMAX, "sigmoid": Score.SIGMOID, "sqrtsoftplus": Score.SQRT_SOFTPLUS}
)
METHODS: Mapping[str, tuple[bool, GroupScore]] = MappingProxyType(
    {
        "greedy": (False, GroupScore.NONE),
        "group_limited_greedy": (False, GroupScore.MAX),
        "noaux_tc": (True, GroupScore.TOP2_SUM),
    }
)
"""`topk_method` -> whether there is a correction bias, and what a group is worth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoENames:
    """How a checkpoint spells the block. Triples are the gate, up and down projection.

    `module` is its name in a layer, `bias` the correction bias, `shared` the shared experts' MLP, `table` each token's
    experts, all within `module`. A token gate is `{shared}_gate`.
    """

    module: str
    experts: Triple
    bias: str
    shared: str
    shared_parts: Triple
    table: str = "gate.tid2eid"


HUB = MoENames(
    module="mlp",
    experts=PROJECTIONS,
    bias="gate.e_score_correction_bias",
    shared="shared_experts",
    shared_parts=PROJECTIONS,
)
QWEN = replace(HUB, shared="shared_expert")


def moe(c: HFView, *, experts: str, top_k: str, width: str, router: RouterSpec, shared: SharedSpec | None) -> MoESpec:
    """The block whose sizes stand under the given keys. Raises ConfigError for sizes that cannot be together."""
    count = positive(c, experts, at_most=MAX_EXPERTS)
    chosen = positive(c, top_k, at_most=MAX_EXPERTS)
    if count % router.num_groups:
        raise ConfigError(
            "config/value", f"{c.where}: {experts} = {count} does not divide into n_group = {router.num_groups} groups"
        )
    size = count // router.num_groups
    if chosen > size * router.top_groups:
        places = f"the {size * router.top_groups} experts of {router.top_groups} of {router.num_groups} groups"
        raise ConfigError("config/value", f"{c.where}: {top_k} = {chosen} is more than {places} ({experts} = {count})")
    if router.group_score is GroupScore.TOP2_SUM and size < 2:
        raise ConfigError(
            "config/value",
            f"{c.where}: n_group = {router.num_groups} leaves one of {count} experts per group: no sum of its best two",
        )
    return MoESpec(num_experts=count, top_k=chosen, width=positive(c, width), router=router, shared=shared)


def plain_router(*, score: Score, has_bias: bool, renormalise: bool) -> RouterSpec:
    """No groups and no scale."""
    return RouterSpec(
        score=score,
        has_bias=has_bias,
        num_groups=1,
        top_groups=1,
        group_score=GroupScore.NONE,
        renormalise=renormalise,
        scale=1.0,
    )


def grouped_router(c: HFView, *, score: str, method: str) -> RouterSpec:
    """The router of `scoring_func`, `topk_method`, `n_group`, `topk_group`, `norm_topk_prob`, `routed_scaling_factor`.

    `score` and `method` are what the family means where the config does not say.
    """
    has_bias, group_score = named(c, "topk_method", METHODS, default=method)
    groups, top = expert_groups(c, "n_group", "topk_group")
    if group_score is GroupScore.NONE or groups == 1:
        groups, top, group_score = 1, 1, GroupScore.NONE
    return RouterSpec(
        score=named(c, "scoring_func", SCORES, default=score),
        has_bias=has_bias,
        num_groups=groups,
        top_groups=top,
        group_score=group_score,
        renormalise=c.flag("norm_topk_prob"),
        scale=above(c, "routed_scaling_factor", 0.0),
    )


def expert_groups(c: HFView, key: str, top_key: str) -> tuple[int, int]:
    """How many groups of experts there are, and how many of them a token chooses from."""
    groups, top = c.int(key, default=1), c.int(top_key, default=1)
    if groups < 1 or not 1 <= top <= groups:
        raise ConfigError("config/value", f"{c.where}: {top_key} = {top} of {key} = {groups} groups cannot be")
    return groups, top


def interleaved(c: HFView, count: int, moe: MoESpec, dense: FFNSpec) -> tuple[FFNSpec | MoESpec, ...]:
    """Experts in every `decoder_sparse_step`-th of `count` layers, but for those of `mlp_only_layers`."""
    step, only = c.int("decoder_sparse_step", default=1), c.list("mlp_only_layers", default=())
    if step < 1:
        raise ConfigError("config/value", f"{c.where}: decoder_sparse_step = {step} must be 1 or more")
    wrong = [index for index in only if type(index) is not int or not 0 <= index < count]
    if wrong:
        raise ConfigError(
            "config/value", f"{c.where}: mlp_only_layers names {wrong[0]!r}, but there are {count} layers"
        )
    return tuple(dense if index in only or (index + 1) % step else moe for index in range(count))


def behind_dense(c: HFView, count: int, moe: MoESpec, dense: FFNSpec) -> tuple[FFNSpec | MoESpec, ...]:
    """Experts in all of `count` layers but the `first_k_dense_replace` first ones."""
    first = c.int("first_k_dense_replace")
    if not 0 <= first <= count:
        raise ConfigError(
            "config/value", f"{c.where}: first_k_dense_replace = {first} is out of range (0..{count} layers)"
        )
    return (dense,) * first + (moe,) * (count - first)


def shared(c: HFView, key: str, width: str) -> SharedSpec | None:
    """As many ungated shared experts as `key` says (0 or null: none), each of the width under `width`."""
    count = c.int(key, default=0)
    if not 0 <= count <= MAX_EXPERTS:
        raise ConfigError("config/value", f"{c.where}: {key} = {count} is out of range (0..{MAX_EXPERTS})")
    return SharedSpec(count=count, width=positive(c, width), is_gated=False) if count else None


def moe_rules(
    spec: MoESpec, layout: MoELayout, names: MoENames, hidden: int, layers: Collection[int]
) -> Iterator[WeightRule]:
    """The rules of layers that have this block in this layout."""
    module = names.module
    router = (spec.num_experts, hidden)
    yield layer_rule(f"{module}.gate.weight", "ffn.router.weight", router, layers, is_linear=True)
    if spec.router.has_bias:
        yield layer_rule(f"{module}.{names.bias}", "ffn.router.bias", router[:1], layers)
    if spec.router.table is not None:
        listed = (spec.router.table, spec.top_k)
        yield layer_rule(f"{module}.{names.table}", "ffn.router.table", listed, layers, is_integer=True)
    match layout.files:
        case ExpertFiles.LISTED:
            yield from _listed_rules(spec, names, hidden, layers)
        case ExpertFiles.STACKED:
            yield from _stacked_rules(spec, module, hidden, layers)
        case ExpertFiles.BY_PROJECTION:
            yield from _projection_rules(spec, names, hidden, layers)
    if spec.shared is None:
        return
    if layout.is_fused:
        yield from _slot_rules(spec, spec.shared, layout, names, hidden, layers)
    else:
        whole = FFNSpec(width=spec.shared.count * spec.shared.width, bias=False)
        yield from ffn_rules(f"{module}.{names.shared}", names.shared_parts, "ffn.shared", whole, hidden, layers)
    if spec.shared.is_gated:
        gate = f"{module}.{names.shared}_gate.weight"
        yield layer_rule(gate, "ffn.shared_gate.weight", (1, hidden), layers, is_linear=True)


GATE_UP, DOWN = "layers.#.ffn.experts.gate_up", "layers.#.ffn.experts.down"


def _listed_rules(spec: MoESpec, names: MoENames, hidden: int, layers: Collection[int]) -> Iterator[WeightRule]:
    """One tensor per expert and projection: expert e fills slot e."""
    width, (gate, up, down) = spec.width, names.experts
    gate_fill = Fill(parameter=GATE_UP, rows=(0, width), per_slot=2 * width)
    up_fill = Fill(parameter=GATE_UP, rows=(width, 2 * width), per_slot=2 * width)
    down_fill = Fill(parameter=DOWN, rows=(0, hidden), per_slot=hidden)
    for name, shape, target in (
        (gate, (width, hidden), gate_fill),
        (up, (width, hidden), up_fill),
        (down, (hidden, width), down_fill),
    ):
        yield WeightRule(
            source=f"model.layers.#.{names.module}.experts.#.{name}.weight",
            action=Action.LOAD,
            shape=shape,
            fills=(target,),
            indices=(layers, range(spec.num_experts)),
            is_linear=True,
        )


def _stacked_rules(spec: MoESpec, module: str, hidden: int, layers: Collection[int]) -> Iterator[WeightRule]:
    """One tensor for all experts of a layer, with gate rows before up rows in each."""
    for name, parameter, rows, columns in (
        ("gate_up_proj", "gate_up", 2 * spec.width, hidden),
        ("down_proj", "down", hidden, spec.width),
    ):
        shape = (spec.num_experts, rows, columns)
        span = (0, spec.num_experts * rows)
        yield layer_rule(f"{module}.experts.{name}", f"ffn.experts.{parameter}", shape, layers, span, is_linear=True)


def _projection_rules(spec: MoESpec, names: MoENames, hidden: int, layers: Collection[int]) -> Iterator[WeightRule]:
    """One tensor per projection: gate and up of each expert go to the halves of its slot."""
    count, width, (gate, up, down) = spec.num_experts, spec.width, names.experts
    prefix = f"{names.module}.experts"
    stored = [(expert * width, (expert + 1) * width) for expert in range(count)]
    for name, half in ((gate, 0), (up, width)):
        cuts = [((2 * start + half, 2 * start + half + width), (start, stop)) for start, stop in stored]
        shape = (count, width, hidden)
        yield cut_rule(f"{prefix}.{name}.weight", "ffn.experts.gate_up", shape, layers, cuts, is_linear=True)
    shape, span = (count, hidden, width), (0, count * hidden)
    yield layer_rule(f"{prefix}.{down}.weight", "ffn.experts.down", shape, layers, span, is_linear=True)


def _slot_rules(
    spec: MoESpec, shared: SharedSpec, layout: MoELayout, names: MoENames, hidden: int, layers: Collection[int]
) -> Iterator[WeightRule]:
    """The shared experts' one MLP, cut into the slots after the routed ones: gate and up by rows, down by columns."""
    width, total = spec.width, shared.count * shared.width
    if total != width * len(layout.shared_slots):
        raise WeightError(
            "weights/partition",
            f"{names.module}.{names.shared}: {len(layout.shared_slots)} slots of {width} do not hold {total} rows",
        )
    cuts = [(slot, (at * width, (at + 1) * width)) for at, slot in enumerate(layout.shared_slots)]
    both = 2 * width
    gate = [_slot(GATE_UP, (slot * both, slot * both + width), Part(rows=cut)) for slot, cut in cuts]
    up = [_slot(GATE_UP, (slot * both + width, (slot + 1) * both), Part(rows=cut)) for slot, cut in cuts]
    down = [_slot(DOWN, (slot * hidden, (slot + 1) * hidden), Part(columns=cut)) for slot, cut in cuts]
    shapes = ((total, hidden), (total, hidden), (hidden, total))
    for name, shape, fills in zip(names.shared_parts, shapes, (gate, up, down), strict=True):
        yield WeightRule(
            source=f"model.layers.#.{names.module}.{names.shared}.{name}.weight",
            action=Action.LOAD,
            shape=shape,
            fills=tuple(fills),
            indices=(layers,),
            is_linear=True,
            is_shared_slot=True,
        )


def _slot(parameter: str, rows: tuple[int, int], part: Part) -> Fill:
    return Fill(parameter=parameter, rows=rows, part=part)
