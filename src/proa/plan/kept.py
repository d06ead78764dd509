"""Which parameters of one runner can stay in their stored form, and why others of that form cannot. Headers only.

Owns no decision: plan/rules/quant.py takes all of them or none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from proa.arch.layout import ROWS_PER_SCALE, WeightLayout
from proa.arch.parameters import decoder_parameters
from proa.arch.weights import Action, Fill, WeightRule, as_template, fill
from proa.checkpoint.quant import Form
from proa.kernels.catalog import BLOCK_FORMATS, MAX_SCALE_COLUMNS, VECTOR
from proa.plan.context import RunnerContext
from proa.plan.stored import Group
from proa.units import DType

HEADWISE = ".attn.kv_b.weight"
ROUTERS = (".ffn.router.weight", ".ffn.shared_gate.weight")
EXPERTS = (".ffn.experts.gate_up", ".ffn.experts.down")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """`parameters` by name with their stored form: block formats, or F8_E4M3 with a scale per `scale_columns` columns.

    `expanded`: templates of linear maps and experts in such a form that must be dequantised, with the reason.
    """

    parameters: tuple[tuple[str, DType], ...]
    scale_columns: int | None
    expanded: Mapping[str, str]

    def facts(self) -> dict[str, Any]:
        """What the rules read: block formats by name, block FP8 counted by template."""
        codes = Counter(as_template(name)[0] for name, form in self.parameters if not form.is_block)
        return {
            "stored.blocks": [[name, form.value] for name, form in self.parameters if form.is_block],
            "stored.codes": dict(codes),
            "stored.expanded": dict(self.expanded),
        }


def kept_forms(ctx: RunnerContext, layout: WeightLayout) -> Kept:
    """Linear maps and experts all of whose stored parts have one form that kernels compute on, in a layout that keeps
    none yet."""
    parts = {
        (target.parameter, group.indices[: target.parameter.count("#")], _kept_form(group))
        for group in ctx.found.groups
        for target in group.rule.fills
    }
    stored: dict[str, set[DType | None]] = {}
    for template, indices, form in parts:
        stored.setdefault(fill(template, indices), set()).add(form)
    block = None if ctx.quant is None else ctx.quant.block
    broken = frozenset(_broken(ctx, layout, block)) if block is not None else frozenset[str]()
    kept: dict[str, DType] = {}
    expanded: dict[str, str] = {}
    for name, info in decoder_parameters(ctx.spec, layout).items():
        forms = stored.get(name, set())
        is_matrix = len(info.shape) == 2 and (layout.tied_head or name != "embed.weight")  # noqa: PLR2004  (out, in)
        if any(_is_quantised(form) for form in forms) and (is_matrix or name.endswith(EXPERTS)):
            why = _why_not(name, forms, block, broken)
            form = next(iter(forms))
            if why is None and form is not None:
                kept[name] = form
            elif why is not None:
                expanded[as_template(name)[0]] = why
    for name in [name for name in kept if name.endswith(EXPERTS) and not _has_twin(name, kept)]:
        del kept[name]
        expanded[as_template(name)[0]] = "the other half of the experts is not kept"
    return Kept(parameters=tuple(kept.items()), scale_columns=block and block[1], expanded=expanded)


def _kept_form(group: Group) -> DType | None:
    """None: scales of another kind are beside the values, which no kernel takes."""
    return group.main.dtype if group.form in (Form.PLAIN, Form.FP8_BLOCK) else None


def _is_quantised(form: DType | None) -> bool:
    return form is DType.F8_E4M3 or (form is not None and form.is_block)


def _why_not(
    name: str, forms: Collection[DType | None], block: tuple[int, int] | None, broken: Collection[str]
) -> str | None:
    """Why a parameter whose parts are stored in these forms, one of them quantised, cannot stay in it."""
    if len(forms) > 1:
        return f"merged with parts that are stored {'otherwise' if all(map(_is_quantised, forms)) else 'plain'}"
    if name.endswith(HEADWISE):
        return "absorbed head by head"
    if name.endswith(ROUTERS):
        return "scores decide, and are computed from values as they are"
    if DType.F8_E4M3 in forms:
        return _why_not_codes(name, block, broken)
    others = [form.value for form in forms if form is not None and form not in BLOCK_FORMATS]
    return f"no kernel computes on {others[0]} blocks" if others else None


def _why_not_codes(name: str, block: tuple[int, int] | None, broken: Collection[str]) -> str | None:
    if block is None or block[0] % ROWS_PER_SCALE or block[1] % VECTOR or block[1] > MAX_SCALE_COLUMNS:
        size = "no size" if block is None else f"{block[0]}x{block[1]}"
        return f"blocks of {size}, not of whole {ROWS_PER_SCALE} rows and {VECTOR} columns, at most {MAX_SCALE_COLUMNS}"
    return f"its parts do not begin at whole {ROWS_PER_SCALE} rows and blocks" if name in broken else None


def _broken(ctx: RunnerContext, layout: WeightLayout, block: tuple[int, int]) -> Iterator[str]:
    """Parameters of which a part begins within a panel or a block, or shares its stored tensor with another one."""
    for rule in ctx.weights(ctx.spec, layout):
        targets = {target.parameter for target in rule.fills}
        if rule.action is Action.LOAD and (len(targets) > 1 or not _is_whole(rule, block[1])):
            firsts = rule.indices[0] if rule.indices else ()
            for target in targets:
                yield from [fill(target, (index,)) for index in firsts] if "#" in target else [target]


def _is_whole(rule: WeightRule, columns: int) -> bool:
    is_matrix = rule.shape is None or len(rule.shape) == 2
    return is_matrix and all(_begins_whole(target, columns) for target in rule.fills)


def _begins_whole(target: Fill, columns: int) -> bool:
    part = target.part
    rows = (target.rows or (0,))[0], target.per_slot, 0 if part is None else (part.rows or (0,))[0]
    column = 0 if part is None else (part.columns or (0,))[0]
    return not any(row % ROWS_PER_SCALE for row in rows) and column % columns == 0


def _has_twin(name: str, kept: Mapping[str, DType]) -> bool:
    prefix = name.rpartition(".")[0]
    return all(f"{prefix}.{part}" in kept for part in ("gate_up", "down"))
