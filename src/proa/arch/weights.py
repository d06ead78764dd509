"""The weight-rule language: which stored tensor fills which part of which parameter. Owns names and shapes, no data.

A rule's `source` and `parameter` are templates: `#` stands for one decimal path component (a layer index). Templates
are anchored and looked up exactly; nothing is matched by substring. The module builder takes its parameter shapes from
the same rules' table (arch/parameters.py), so builder and loader cannot disagree.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from math import prod

from proa.errors import WeightError
from proa.units import DType


class Action(Enum):
    LOAD = "load"
    TIE = "tie"  # a stored copy of another parameter: compared, never kept
    LEFT_OUT = "left_out"  # known, not needed, with the reason


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightLayout:
    """Physical arrangement of one runner's weights, decided in its plan; read by rules, table and builder alike.

    `tied_head`: the output head is the embedding matrix, there is no `head.weight` parameter. `blocks`: parameters kept
    in the stored block format, by name; all others are in the compute dtype.
    """

    tied_head: bool
    blocks: tuple[tuple[str, DType], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterInfo:
    """Shape in elements; `dtype` None means the runner's compute dtype, a block format the bytes as stored."""

    shape: tuple[int, ...]
    dtype: DType | None = None

    def nbytes(self, compute: DType) -> int:
        return (self.dtype or compute).nbytes(prod(self.shape))


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightRule:
    """`rows` is the half-open range of dimension 0 of the parameter that the tensor fills; None = all of it.

    `shape` is the stored tensor's expected shape. `layers` are the layer indices for which a `#` rule holds.
    """

    source: str
    action: Action
    shape: tuple[int, ...] | None = None
    parameter: str = ""
    rows: tuple[int, int] | None = None
    layers: range | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The tensor fills `rows` of `parameter` (all of it when None). `group` names the source group: the tensors that
    together produce the place (one tensor for dense weights)."""

    group: str
    parameter: str
    rows: tuple[int, int] | None
    shape: tuple[int, ...] | None
    template: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tied:
    """A stored copy of `parameter`: must be equal to it element by element."""

    parameter: str
    shape: tuple[int, ...] | None
    template: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    reason: str
    template: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Unknown:
    """No rule knows this name. `nearest`: up to three expected source names, most alike first."""

    nearest: tuple[str, ...]


Claim = Place | Tied | LeftOut | Unknown


class NameMap:
    """Compiled rules of one runner. Pure; testable without weights.

    Raises WeightError `weights/rule-clash` when two rules have the same source template.
    """

    def __init__(self, rules: Iterable[WeightRule]) -> None:
        self._rules: dict[str, WeightRule] = {}
        self._allowed: dict[str, str] = {}
        for rule in rules:
            if rule.source in self._rules:
                raise WeightError("weights/rule-clash", f"two weight rules claim {rule.source!r}")
            self._rules[rule.source] = rule

    def claim(self, name: str) -> Claim:
        """What becomes of the stored tensor `name`."""
        template, index = as_template(name)
        rule = self._rules.get(template) or self._rules.get(name)
        if rule is None or (rule.layers is not None and (index is None or index not in rule.layers)):
            if name in self._allowed:
                return LeftOut(reason="allowed by --allow-unexpected", template=self._allowed[name])
            return Unknown(nearest=self.nearest(name))
        match rule.action:
            case Action.LOAD:
                parameter = fill(rule.parameter, index)
                return Place(group=name, parameter=parameter, rows=rule.rows, shape=rule.shape, template=rule.source)
            case Action.TIE:
                return Tied(parameter=fill(rule.parameter, index), shape=rule.shape, template=rule.source)
            case Action.LEFT_OUT:
                return LeftOut(reason=rule.reason, template=rule.source)

    def allowing(self, names: Mapping[str, str]) -> NameMap:
        """The same map, in which the given unknown tensors (name -> glob that allows it) are left out on purpose."""
        wider = NameMap(self._rules.values())
        wider._allowed = dict(names)
        return wider

    def expected(self) -> dict[str, Place]:
        """Every source name that a LOAD rule needs, with its place."""
        places: dict[str, Place] = {}
        for rule in self._rules.values():
            if rule.action is Action.LOAD:
                for index in rule.layers if rule.layers is not None else (None,):
                    name = fill(rule.source, index)
                    claim = self.claim(name)
                    if isinstance(claim, Place):
                        places[name] = claim
        return places

    def check(self, parameters: Mapping[str, ParameterInfo]) -> None:
        """Prove that the LOAD places partition the elements of all parameters (along dimension 0).

        Raises WeightError `weights/partition` naming the parameter with the hole or the overlap.
        """
        spans: dict[str, list[tuple[int, int]]] = {name: [] for name in parameters}
        for name, place in self.expected().items():
            if place.parameter not in parameters:
                raise WeightError("weights/partition", f"{name} fills {place.parameter}, which the model does not have")
            whole = (0, parameters[place.parameter].shape[0])
            spans[place.parameter].append(place.rows or whole)
        for name, info in parameters.items():
            at = 0
            for start, stop in sorted(spans[name]):
                if start != at:
                    kind = "filled twice" if start < at else "not filled"
                    rows = f"{min(start, at)}..{max(start, at)}"
                    raise WeightError("weights/partition", f"{name}: rows {rows} are {kind} by the weight rules")
                at = stop
            if at != info.shape[0]:
                raise WeightError("weights/partition", f"{name}: rows {at}..{info.shape[0]} are not filled by any rule")

    def nearest(self, name: str) -> tuple[str, ...]:
        """Expected source names most like `name`, same layer index."""
        template, index = as_template(name)
        close = difflib.get_close_matches(template, self._rules, n=3, cutoff=0.6)
        return tuple(fill(source, index) for source in close)


def as_template(name: str) -> tuple[str, int | None]:
    """`model.layers.3.x` -> (`model.layers.#.x`, 3). Only the first decimal component is an index."""
    parts = name.split(".")
    for position, part in enumerate(parts):
        if part.isdecimal() and (part == "0" or part[0] != "0"):
            parts[position] = "#"
            return ".".join(parts), int(part)
    return name, None


def fill(template: str, index: int | None) -> str:
    return template if index is None else template.replace("#", str(index), 1)
