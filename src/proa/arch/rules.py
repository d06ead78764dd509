"""Weight rules of what every kind of layer has: single tensors, gated MLPs. Owns no family."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator
from dataclasses import replace
from typing import TypeVar

from proa.arch.blocks import FFNSpec
from proa.arch.weights import Action, Fill, Part, WeightRule

K = TypeVar("K", bound=Hashable)

Rows = tuple[int, int]
Triple = tuple[str, str, str]
PROJECTIONS: Triple = ("gate_proj", "up_proj", "down_proj")


def layer_rule(
    source: str,
    parameter: str,
    shape: tuple[int, ...],
    layers: Collection[int],
    rows: Rows | None = None,
    *,
    is_linear: bool = False,
    is_integer: bool = False,
) -> WeightRule:
    """`model.layers.#.source` fills `rows` (None = all) of `layers.#.parameter`."""
    return WeightRule(
        source=f"model.layers.#.{source}",
        action=Action.LOAD,
        shape=shape,
        fills=(Fill(parameter=f"layers.#.{parameter}", rows=rows),),
        indices=(layers,),
        is_linear=is_linear,
        is_integer=is_integer,
    )


def cut_rule(
    source: str,
    parameter: str,
    shape: tuple[int, ...],
    layers: Collection[int],
    cuts: Iterable[tuple[Rows, Rows]],
    *,
    is_linear: bool = False,
) -> WeightRule:
    """`model.layers.#.source`, whose rows lie in another order: `cuts` are runs of rows of `layers.#.parameter`, each
    with the stored rows that fill it."""
    rule = layer_rule(source, parameter, shape, layers, is_linear=is_linear)
    to = f"layers.#.{parameter}"
    return replace(rule, fills=tuple(Fill(parameter=to, rows=rows, part=Part(rows=stored)) for rows, stored in cuts))


def ffn_rules(
    source: str, parts: Triple, parameter: str, spec: FFNSpec, hidden: int, layers: Collection[int]
) -> Iterator[WeightRule]:
    """A gated MLP `source` of the layers, whose gate, up and down projection are called `parts`, fills `parameter`."""
    gate, up, down = parts
    for name, span in ((gate, (0, spec.width)), (up, (spec.width, 2 * spec.width))):
        to = f"{parameter}.gate_up"
        yield layer_rule(f"{source}.{name}.weight", f"{to}.weight", (spec.width, hidden), layers, span, is_linear=True)
        if spec.bias:
            yield layer_rule(f"{source}.{name}.bias", f"{to}.bias", (spec.width,), layers, span)
    yield layer_rule(
        f"{source}.{down}.weight", f"{parameter}.down.weight", (hidden, spec.width), layers, is_linear=True
    )
    if spec.bias:
        yield layer_rule(f"{source}.{down}.bias", f"{parameter}.down.bias", (hidden,), layers)


def grouped(items: Iterable[tuple[int, K]]) -> dict[K, tuple[int, ...]]:
    """Layers with equal values together: value -> layer indices, in order of first appearance."""
    groups: dict[K, list[int]] = {}
    for index, value in items:
        groups.setdefault(value, []).append(index)
    return {value: tuple(indices) for value, indices in groups.items()}
