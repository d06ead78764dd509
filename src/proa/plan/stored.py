"""What one runner's own weight rules find among the stored tensors: source groups and their formats. Headers only.

A runner's facts about quantisation come from here, never from the whole checkpoint: what lies beside its tensors (the
other runner's, a vision tower) says nothing about them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from proa.arch.blocks import MoESpec
from proa.arch.decoder import DecoderSpec
from proa.arch.family import Weights
from proa.arch.layout import ExpertFiles, MoELayout, ScaleOn, SharedWeight, WeightLayout
from proa.arch.weights import COMPANIONS, WEIGHT, Action, WeightRule, as_template
from proa.checkpoint.quant import Form, QuantSpec, form_of
from proa.checkpoint.types import TensorInfo
from proa.units import DType

Indices = tuple[int, ...]
PACKED = "weight_packed"
MEMBERS: Mapping[str, str] = MappingProxyType({member: member for member in (WEIGHT, *COMPANIONS)})
EXPERTS = "layers.#.ffn.experts."
SHARED = "layers.#.ffn.shared."


class Group(NamedTuple):
    """One stored weight: the rule that claims it, its indices, its tensors by member (`weight`, `weight_scale_inv`).
    `main` is the one that holds the values: the weight itself, or its packed form. A tuple: there are 70,000."""

    rule: WeightRule
    indices: Indices
    members: Mapping[str, TensorInfo]
    form: Form
    main: TensorInfo


def format_of(form: Form, dtype: DType, quant: QuantSpec | None) -> str:
    """How values of a stored type are kept, scales included, in a word: `bfloat16`, `fp8 128x128`, `int4 group 32`."""
    match form:
        case Form.PLAIN:
            return dtype.value
        case Form.FP8_BLOCK:
            block = None if quant is None else quant.block
            return f"fp8 {block[0]}x{block[1]}" if block else "fp8"
        case Form.FP8_SCALED:
            return "fp8 scaled"
        case Form.INT4:
            size = None if quant is None else quant.group
            return f"int4 group {size}" if size else "int4"


class StoredNames:
    """The tensors of a checkpoint by module, and modules by template, so that a rule finds its own without a pass over
    all names. A module's tensors differ in their last component; one that is a number belongs to the module."""

    def __init__(self, tensors: Mapping[str, TensorInfo]) -> None:
        modules: dict[str, dict[str, TensorInfo]] = {}
        for name, info in tensors.items():
            module, _, last = name.rpartition(".")
            if last.isdecimal():
                module, last = name, ""
            if (held := modules.get(module)) is None:
                held = modules[module] = {}
            held[last] = info
        self._modules: dict[str, dict[Indices, dict[str, TensorInfo]]] = {}
        for module, held in modules.items():
            template, indices = as_template(module)
            self._modules.setdefault(template, {})[indices] = held

    def groups(self, rules: Iterable[WeightRule]) -> Iterator[Group]:
        """Every source group of these rules of which anything is stored."""
        for rule in rules:
            if rule.action is not Action.LEFT_OUT:
                yield from self._groups(rule)

    def _groups(self, rule: WeightRule) -> Iterator[Group]:
        for indices, members in self._found(rule):
            main = members.get(WEIGHT) or members.get(PACKED) or next(iter(members.values()))
            yield Group(rule, indices, members, form_of(members, main.dtype), main)

    def _found(self, rule: WeightRule) -> Iterator[tuple[Indices, dict[str, TensorInfo]]]:
        """What is stored of each source group, by member."""
        module, last = _split(rule.source)
        stored = self._modules.get(module, {})
        names = MEMBERS if rule.is_linear and last == WEIGHT else {last: WEIGHT}
        is_all = _are_within(stored, rule.indices)
        for indices, held in stored.items():
            if is_all or _are_within((indices,), rule.indices):
                members = held if names is MEMBERS and held.keys() <= MEMBERS.keys() else _named(held, names)
                if members:
                    yield indices, members

    def layers(self, rule: WeightRule) -> frozenset[int]:
        """First indices under which anything of the rule is stored."""
        return frozenset(indices[0] for indices, _ in self._found(rule))


def _split(template: str) -> tuple[str, str]:
    """Of the module, and of what in it: `a.#.weight` -> (`a.#`, `weight`)."""
    module, _, last = template.rpartition(".")
    return (template, "") if last == "#" else (module, last)


def _are_within(found: Iterable[Indices], allowed: Sequence[Collection[int]]) -> bool:
    """Whether each index of all `found` is allowed in its place."""
    return all(
        all(index in fit for index in set(column))
        for column, fit in zip(zip(*found, strict=True), allowed, strict=False)
    )


def _named(held: Mapping[str, TensorInfo], names: Mapping[str, str]) -> dict[str, TensorInfo]:
    return {member: held[last] for last, member in names.items() if last in held}


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One runner's own tensors as groups, and how the experts of each MoE layer are stored."""

    groups: tuple[Group, ...]
    files: Mapping[int, ExpertFiles]

    def expert_groups(self, prefix: str) -> dict[int, list[Group]]:
        """By layer, the groups that fill parameters under `prefix` (EXPERTS or SHARED)."""
        layers: dict[int, list[Group]] = {}
        for group in self.groups:
            if group.rule.fills and group.rule.fills[0].parameter.startswith(prefix):
                layers.setdefault(group.indices[0], []).append(group)
        return layers


def find(spec: DecoderSpec, weights: Weights, stored: StoredNames) -> Found:
    """Which names a runner claims does not depend on its decisions, so any layout finds them: the separate one does."""
    files = _expert_files(spec, weights, stored)
    rules = weights(spec, plain_layout(spec, files))
    return Found(groups=tuple(stored.groups(rules)), files=files)


def _expert_files(spec: DecoderSpec, weights: Weights, stored: StoredNames) -> dict[int, ExpertFiles]:
    """The form in which the experts of a layer are stored; LISTED where none are."""
    files = {layer.index: ExpertFiles.LISTED for layer in spec.moe_layers}
    for form in (ExpertFiles.STACKED, ExpertFiles.BY_PROJECTION) if files else ():
        for rule in weights(spec, plain_layout(spec, dict.fromkeys(files, form))):
            if len(rule.indices) == 1 and any(target.parameter.startswith(EXPERTS) for target in rule.fills):
                files |= dict.fromkeys(stored.layers(rule), form)
    return files


def plain_layout(spec: DecoderSpec, files: Mapping[int, ExpertFiles]) -> WeightLayout:
    """Everything by itself: a head of its own, shared experts separate."""
    moe = tuple(
        (layer.index, expert_layout(layer.ffn, files[layer.index], ScaleOn.WEIGHTS, is_fused=False))
        for layer in spec.layers
        if isinstance(layer.ffn, MoESpec)
    )
    return WeightLayout(tied_head=False, moe=moe)


def expert_layout(moe: MoESpec, files: ExpertFiles, scale_on: ScaleOn, *, is_fused: bool) -> MoELayout:
    """The arrangement of one layer, for a kernel that wants the router's scale on `scale_on`. What multiplies the sum
    reaches a shared expert in a slot too, so its weight undoes it; a token's gate cannot, and has scaled weights."""
    shared = moe.shared
    count = shared.count * shared.width // moe.width if is_fused and shared is not None else 0
    if shared is not None and shared.is_gated:
        scale_on, weight = ScaleOn.WEIGHTS, SharedWeight.TOKEN_GATE
    else:
        weight = SharedWeight.ONE if scale_on is ScaleOn.WEIGHTS else SharedWeight.INVERSE_SCALE
    return MoELayout(
        num_routed=moe.num_experts,
        shared_slots=tuple(range(moe.num_experts, moe.num_experts + count)),
        shared_weight=weight,
        scale_on=scale_on,
        files=files,
    )
