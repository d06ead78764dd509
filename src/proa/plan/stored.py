"""What one runner's own weight rules find among the stored tensors: source groups and their formats. Headers only.

A runner's facts about quantisation come from here, never from the whole checkpoint: what lies beside its tensors (the
other runner's, a vision tower) says nothing about them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from proa.arch.blocks import MoESpec
from proa.arch.decoder import DecoderSpec
from proa.arch.family import Weights
from proa.arch.layout import ExpertFiles, MoELayout, ScaleOn, SharedWeight, WeightLayout
from proa.arch.weights import COMPANIONS, WEIGHT, Action, WeightRule, as_template, fill
from proa.checkpoint.quant import Form, QuantSpec, form_of
from proa.checkpoint.types import TensorInfo

Indices = tuple[int, ...]
EXPERTS = "layers.#.ffn.experts."
SHARED = "layers.#.ffn.shared."


class Group(NamedTuple):
    """One stored weight: the rule that claims it, its indices, its tensors by member (`weight`, `weight_scale_inv`).
    `main` is the one that holds the values: the weight itself, or its packed form."""

    rule: WeightRule
    indices: Indices
    members: Mapping[str, TensorInfo]
    form: Form
    main: TensorInfo

    @property
    def parameters(self) -> tuple[str, ...]:
        """What it fills, or is a copy of."""
        return tuple(fill(target.parameter, self.indices) for target in self.rule.fills)


def format_of(group: Group, quant: QuantSpec | None) -> str:
    """How the values are stored, scales included, in a word: `bfloat16`, `fp8 128x128`, `int4 group 32`."""
    match group.form:
        case Form.PLAIN:
            return group.main.dtype.value
        case Form.FP8_BLOCK:
            block = None if quant is None else quant.block
            return f"fp8 {block[0]}x{block[1]}" if block else "fp8"
        case Form.FP8_SCALED:
            return "fp8 scaled"
        case Form.INT4:
            size = None if quant is None else quant.group
            return f"int4 group {size}" if size else "int4"


class StoredNames:
    """The tensors of a checkpoint by template, so that a rule finds its own without a pass over all names."""

    def __init__(self, tensors: Mapping[str, TensorInfo]) -> None:
        self._named: dict[str, dict[Indices, TensorInfo]] = {}
        modules: dict[str, tuple[str, Indices]] = {}  # names differ mostly in their last component
        for name, info in tensors.items():
            module, dot, last = name.rpartition(".")
            if last.isdecimal():
                module, dot, last = name, "", ""
            if (known := modules.get(module)) is None:
                known = modules[module] = as_template(module)
            self._named.setdefault(f"{known[0]}{dot}{last}", {})[known[1]] = info

    def groups(self, rules: Iterable[WeightRule]) -> Iterator[Group]:
        """Every source group of these rules of which anything is stored."""
        for rule in rules:
            if rule.action is not Action.LEFT_OUT:
                yield from self._groups(rule)

    def _groups(self, rule: WeightRule) -> Iterator[Group]:
        found: dict[Indices, dict[str, TensorInfo]] = {}
        for member, template in _members(rule):
            for indices, info in self._named.get(template, {}).items():
                for index, allowed in zip(indices, rule.indices, strict=True):
                    if index not in allowed:
                        break
                else:
                    found.setdefault(indices, {})[member] = info
        for indices, members in found.items():
            main = members.get(WEIGHT) or next(iter(members.values()))
            form = form_of({member: info.dtype for member, info in members.items()})
            yield Group(rule, indices, members, form, main)

    def layers(self, rule: WeightRule) -> frozenset[int]:
        """First indices under which anything of the rule is stored."""
        named = (indices for _, template in _members(rule) for indices in self._named.get(template, ()))
        return frozenset(indices[0] for indices in named if indices and indices[0] in rule.indices[0])


def _members(rule: WeightRule) -> Iterator[tuple[str, str]]:
    """(member, template) of the tensors that a source group of the rule may have."""
    yield WEIGHT, rule.source
    base, _, last = rule.source.rpartition(".")
    if rule.is_linear and last == WEIGHT:
        yield from ((member, f"{base}.{member}") for member in COMPANIONS)


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
    stacked = weights(spec, plain_layout(spec, dict.fromkeys(files, ExpertFiles.STACKED))) if files else ()
    for rule in stacked:
        if len(rule.indices) == 1 and any(target.parameter.startswith(EXPERTS) for target in rule.fills):
            files |= dict.fromkeys(stored.layers(rule), ExpertFiles.STACKED)
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
