"""The weight-rule language: which stored tensor fills which part of which parameter. Owns names and shapes, no data.

A rule's `source` and its parameters are templates: each `#` stands for one decimal path component (a layer, an expert).
Templates are anchored and looked up exactly; nothing is matched by substring. The module builder takes its parameter
shapes from the same layout's table (arch/parameters.py), so builder and loader cannot disagree.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import chain, product
from types import MappingProxyType
from typing import NamedTuple

from proa.arch.layout import ParameterInfo
from proa.errors import WeightError


class Action(Enum):
    LOAD = "load"
    TIE = "tie"  # a stored copy of another parameter: compared, never kept
    BORROW = "borrow"  # a stored copy of a module that a draft takes from its target: compared, never kept
    LEFT_OUT = "left_out"  # known, not needed, with the reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A rectangle of a stored tensor [out, in]: half-open ranges of its rows and columns. None = all of them."""

    rows: tuple[int, int] | None = None
    columns: tuple[int, int] | None = None


class Fill(NamedTuple):
    """`part` of the tensor (None = all) fills `rows` of `parameter` (None = all).

    Rows are counted over all dimensions but the last one. In a rule, `parameter` is a template whose `#` are filled
    with the rule's first indices, and `rows` move by `per_slot` times its last index (an expert). A tuple, as Place.
    """

    parameter: str
    rows: tuple[int, int] | None = None
    part: Part | None = None
    per_slot: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightRule:
    """What becomes of the tensors of one template.

    `indices` has the allowed values of each `#` of `source`, in order. `shape` is the stored tensor's expected shape.
    `fills` say where its elements go (LOAD), or what it is a copy of (TIE, BORROW: one fill of a whole parameter).
    `is_linear`: a matrix of a linear map, which a quantised checkpoint may store with scales beside it.
    `is_shared_slot`: a shared expert that goes to slots of the routed ones. `is_integer`: ids, no values to compute
    with.
    """

    source: str
    action: Action
    shape: tuple[int, ...] | None = None
    fills: tuple[Fill, ...] = ()
    indices: tuple[Collection[int], ...] = ()
    is_linear: bool = False
    is_shared_slot: bool = False
    is_integer: bool = False
    reason: str = ""


class Place(NamedTuple):
    """The tensor, or with the other members of its source group the values that they make, goes to `fills`.

    `group` is the name of the group's weight (`model.layers.0.mlp.up_proj.weight`). All members of the group have this
    place, and `member_of` tells them apart: the weight alone where it is plain, `weight_scale_inv` beside it for block
    FP8. `shape` is that of the values. `is_linear`: the group may have other members than `weight`. `is_shared_slot`: a
    shared expert that goes to slots of the routed ones. A tuple: there are 70,000 of them, and a frozen dataclass takes
    longer to make.
    """

    group: str
    fills: tuple[Fill, ...]
    shape: tuple[int, ...] | None
    template: str
    is_linear: bool = False
    is_shared_slot: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Tied:
    """A stored copy of `parameter`: must be equal to it element by element."""

    parameter: str
    shape: tuple[int, ...] | None
    template: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Borrowed:
    """A stored copy of the target's `parameter`, which this draft uses whole: must be equal to it."""

    parameter: str
    shape: tuple[int, ...] | None
    template: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Elsewhere:
    """The other runner of this checkpoint accounts for the tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    reason: str
    template: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Unknown:
    """No rule knows this name. `nearest`: up to three expected source names, most alike first."""

    nearest: tuple[str, ...]


Claim = Place | Tied | Borrowed | Elsewhere | LeftOut | Unknown

WEIGHT = "weight"
COMPANIONS = ("weight_scale_inv", "weight_packed", "weight_scale", "weight_shape")
"""Members of a quantised source group beside or instead of `weight`: block FP8, compressed-tensors int4."""
_COMPANIONS = frozenset(COMPANIONS)


class NameMap:
    """Compiled rules of one runner. Pure; testable without weights.

    `prefixes` are left out whole, with their reasons: parts of a wrapper that no rule describes (a vision tower).
    Raises WeightError `weights/rule-clash` when two rules claim the same name.
    """

    def __init__(self, rules: Iterable[WeightRule], prefixes: Mapping[str, str] | None = None) -> None:
        self._rules: dict[str, list[WeightRule]] = {}
        self._prefixes = dict(prefixes or {})
        self._allowed: dict[str, str] = {}
        self._elsewhere: NameMap | None = None
        self._nearest: dict[str, tuple[str, ...]] = {}
        for rule in rules:
            others = self._rules.setdefault(rule.source, [])
            if any(_overlap(rule.indices, other.indices) for other in others):
                raise WeightError("weights/rule-clash", f"two weight rules claim {rule.source!r}")
            others.append(rule)

    def claim(self, name: str) -> Claim:
        """What becomes of the stored tensor `name`."""
        known = self._places.get(name) or self._known(name)
        return self._unclaimed(name) if known is None else known

    def _known(self, name: str) -> Claim | None:
        """What the rules say of a name that is no place's own, None where they say nothing."""
        base, _, suffix = name.rpartition(".")
        is_companion = suffix in _COMPANIONS
        place = self._places.get(f"{base}.{WEIGHT}") if is_companion else None
        if place is not None and place.is_linear:
            return place
        weight = f"{base}.{WEIGHT}" if is_companion else name
        if _tail(weight) not in self._tails:
            return None
        template, indices = as_template(name)
        found = self._rule(template, indices)
        if found is None and is_companion:
            found = self._rule(as_template(weight)[0], indices)
            found = found if found is not None and found.is_linear else None
        return None if found is None else _claim(found, name, indices)

    @cached_property
    def _tails(self) -> frozenset[str]:
        """Ends of the names that rules other than LOAD know: most names need no closer look at those."""
        return frozenset(_tail(rule.source) for rule in self._each_rule() if rule.action is not Action.LOAD)

    def knows(self, name: str) -> bool:
        """Whether the tensor is accounted for, by this runner or the one beside it."""
        return self._has(name) or (self.others is not None and self.others._has(name))

    def _has(self, name: str) -> bool:
        return name in self._places or self._known(name) is not None or self._set_aside(name) is not None

    def _set_aside(self, name: str) -> LeftOut | None:
        """What is left out though no rule knows it."""
        for prefix, reason in self._prefixes.items():
            if name.startswith(prefix):
                return LeftOut(reason=reason, template=f"{prefix}*")
        if name in self._allowed:
            return LeftOut(reason="allowed by --allow-unexpected", template=self._allowed[name])
        return None

    def _unclaimed(self, name: str) -> Claim:
        if (aside := self._set_aside(name)) is not None:
            return aside
        if self._elsewhere is not None:
            others = self._elsewhere
            if others._has(name) or (others._has_layer_of(name) and not self._has_layer_of(name)):
                return Elsewhere()
        return Unknown(nearest=self.nearest(name))

    def _has_layer_of(self, name: str) -> bool:
        """Whether rules speak of the numbered layer that `name` lies in: a stray name there is this runner's."""
        return _layer(name) in self._layers

    @cached_property
    def _layers(self) -> frozenset[str]:
        firsts = ((rule.source.partition("#")[0], rule.indices[0]) for rule in self._each_rule() if rule.indices)
        return frozenset(f"{head}{index}" for head, indices in firsts for index in indices)

    def _rule(self, template: str, indices: tuple[int, ...]) -> WeightRule | None:
        for rule in self._rules.get(template, ()):
            if all(index in allowed for index, allowed in zip(indices, rule.indices, strict=True)):
                return rule
        return None

    def allowing(self, names: Mapping[str, str]) -> NameMap:
        """The same map, in which the given unknown tensors (name -> glob that allows it) are left out on purpose."""
        wider = self._copy()
        wider._allowed = dict(names)
        return wider

    def beside(self, others: NameMap) -> NameMap:
        """The same map, for a checkpoint in which what only `others` knows belongs to the other runner, and so does
        what neither knows in a layer that is theirs."""
        wider = self._copy()
        wider._elsewhere = others
        return wider

    @property
    def others(self) -> NameMap | None:
        """The map of the runner that shares the checkpoint."""
        return self._elsewhere

    def _copy(self) -> NameMap:
        twin = copy(self)  # shares what was compiled: nothing changes it
        twin._nearest = {}
        return twin

    def expected(self) -> Mapping[str, Place]:
        """Every source group that a LOAD rule needs, by the name of its weight."""
        return MappingProxyType(self._places)

    @cached_property
    def _places(self) -> dict[str, Place]:
        places: dict[str, Place] = {}
        for rule in self._each_rule():
            if rule.action is Action.LOAD:
                spelled = rule.source.replace("%", "%%").replace("#", "%d")
                for indices in product(*rule.indices):
                    name = spelled % indices
                    places[name] = _place(rule, name, indices)
        return places

    def _each_rule(self) -> Iterator[WeightRule]:
        return chain.from_iterable(self._rules.values())

    @property
    def integers(self) -> frozenset[str]:
        """Templates of tensors that hold ids."""
        return frozenset(rule.source for rule in self._each_rule() if rule.is_integer)

    def check(self, parameters: Mapping[str, ParameterInfo]) -> None:
        """Prove that the LOAD places partition the rows of all parameters.

        Raises WeightError `weights/partition` naming the parameter with the hole or the overlap.
        """
        spans: dict[str, list[tuple[int, int]]] = {name: [] for name in parameters}
        for name, place in self.expected().items():
            for target in place.fills:
                if target.parameter not in parameters:
                    raise WeightError(
                        "weights/partition", f"{name} fills {target.parameter}, which the model does not have"
                    )
                spans[target.parameter].append(target.rows or (0, parameters[target.parameter].rows))
        for name, info in parameters.items():
            at = 0
            for start, stop in sorted(spans[name]):
                if start != at:
                    kind = "filled twice" if start < at else "not filled"
                    rows = f"{min(start, at)}..{max(start, at)}"
                    raise WeightError("weights/partition", f"{name}: rows {rows} are {kind} by the weight rules")
                at = stop
            if at != info.rows:
                raise WeightError("weights/partition", f"{name}: rows {at}..{info.rows} are not filled by any rule")

    def nearest(self, name: str) -> tuple[str, ...]:
        """Expected source names most like `name`, with its indices."""
        template, indices = as_template(name)
        close = self._nearest.get(template)
        if close is None:
            close = tuple(difflib.get_close_matches(template, self._rules, n=3, cutoff=0.6))
            self._nearest[template] = close
        return tuple(fill(source, indices) for source in close)


def _claim(rule: WeightRule, name: str, indices: tuple[int, ...]) -> Claim:
    match rule.action:
        case Action.LOAD:
            return _place(rule, name, indices)
        case Action.TIE:
            return Tied(parameter=fill(rule.fills[0].parameter, indices), shape=rule.shape, template=rule.source)
        case Action.BORROW:
            return Borrowed(parameter=fill(rule.fills[0].parameter, indices), shape=rule.shape, template=rule.source)
        case Action.LEFT_OUT:
            return LeftOut(reason=rule.reason, template=rule.source)


def _place(rule: WeightRule, name: str, indices: tuple[int, ...]) -> Place:
    fills = tuple([_filled(target, indices) for target in rule.fills])
    return Place(name, fills, rule.shape, rule.source, rule.is_linear, rule.is_shared_slot)


def member_of(place: Place, name: str) -> str:
    """Which part of its group the stored tensor `name` is."""
    return WEIGHT if name == place.group else name[name.rfind(".") + 1 :]


def _filled(target: Fill, indices: tuple[int, ...]) -> Fill:
    parameter, rows, part, per_slot = target
    if per_slot and rows is not None:
        shift = per_slot * indices[-1]
        rows = (rows[0] + shift, rows[1] + shift)
    return Fill(fill(parameter, indices), rows, part)


def _tail(name: str) -> str:
    """The last two components; a number among them is left away."""
    tail = name[name.rfind(".", 0, max(0, name.rfind("."))) + 1 :]
    head, _, last = tail.partition(".")
    return last if head == "#" or head.isdecimal() else tail


def _layer(name: str) -> str:
    """`name` up to its first number, empty where it has none."""
    parts = name.split(".")
    numbers = [position for position, part in enumerate(parts) if part.isdecimal()]
    return ".".join(parts[: numbers[0] + 1]) if numbers else ""


def _overlap(one: tuple[Collection[int], ...], other: tuple[Collection[int], ...]) -> bool:
    return all(any(index in allowed for index in also) for allowed, also in zip(one, other, strict=True))


def as_template(name: str) -> tuple[str, tuple[int, ...]]:
    """`model.layers.3.mlp.experts.7.x` -> (`model.layers.#.mlp.experts.#.x`, (3, 7))."""
    parts = name.split(".")
    indices: list[int] = []
    for position, part in enumerate(parts):
        if part.isdecimal() and part.isascii() and (part == "0" or part[0] != "0"):
            parts[position] = "#"
            indices.append(int(part))
    return ".".join(parts), tuple(indices)


def fill(template: str, indices: tuple[int, ...]) -> str:
    """The template with its `#` replaced by the first indices, in order."""
    for index in indices:
        template = template.replace("#", str(index), 1)
    return template
