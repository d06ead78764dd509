"""The numeric self-check of fused shared experts: the built layer against the separate form, on one vector.

The separate form is computed here, by arithmetic of its own, from the checkpoint's tensors through the separate rules:
neither the plan's layout nor the kernels enter it. Owns no other check.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf
from types import MappingProxyType
from typing import cast

import torch

from proa.arch.blocks import SILU, ActivationSpec, GroupScore, MoESpec, RouterSpec, Score
from proa.arch.decoder import LayerSpec
from proa.arch.layout import MoELayout
from proa.arch.weights import Fill, NameMap, Place
from proa.errors import WeightError
from proa.layers.base import torch_dtype
from proa.layers.decoder import Decoder, DecoderLayer
from proa.loading.files import MappedFile, group_reader
from proa.loading.groups import gather
from proa.plan.planned import Planned
from proa.units import DType

MIN_SHARE = 0.3  # of the output's norm that the shared experts must make, or a wrong weight of theirs could hide
TOLERANCE: Mapping[DType, float] = MappingProxyType({DType.F32: 1e-4, DType.BF16: 3e-2, DType.F16: 3e-2})
_MIN_MARGIN = 2e-3  # between chosen and passed-over experts, of the spread of scores: rounding must not swap them
_CANDIDATES = 24
_GATE_LOGIT = 0.7
_SEED = 20
_TOKEN = 0  # whose experts a table lists


def check_fused_layers(planned: Planned, model: Decoder) -> None:
    """Compare the first layer of each kind that has fused shared experts.

    Raises WeightError `weights/fused-differs` where it does not compute what the checkpoint means, and where no vector
    is found that would show it.
    """
    layout = planned.plan.layout
    kinds: dict[tuple[MoESpec, MoELayout], LayerSpec] = {}
    for layer in planned.spec.moe_layers:
        if isinstance(layer.ffn, MoESpec) and layout.moe_of(layer.index).is_fused:
            kinds.setdefault((layer.ffn, layout.moe_of(layer.index)), layer)
    if planned.plan.device.value == "meta":
        return
    for (spec, _), layer in kinds.items():
        _check(planned, model, layer, _Separate(planned, layer, spec))


def _check(planned: Planned, model: Decoder, layer: LayerSpec, separate: _Separate) -> None:
    dtype = planned.plan.dtype.value
    sample = _best(separate, torch_dtype(dtype))
    if sample.share < MIN_SHARE and sample.has_shared:
        raise _error(planned, layer, "no vector was found on which they could be checked", sample)
    block, like = cast("DecoderLayer", model.layers[str(layer.index)]), model.norm.weight
    with torch.no_grad():
        x, token = sample.x[None].to(like.device, torch_dtype(dtype)), torch.tensor([_TOKEN], device=like.device)
        out = block.ffn(x, token)[0].to("cpu", torch.float64)
    error = float((out - sample.out).norm() / sample.out.norm().clamp_min(1e-30))
    limit = _tolerance(planned, layer)
    if not error <= limit:
        said = f"relative error {error:.2g}, at most {limit:g} in {dtype.value}"
        raise _error(planned, layer, f"they do not compute what the checkpoint's tensors mean: {said}", sample)


def _tolerance(planned: Planned, layer: LayerSpec) -> float:
    """Products on stored blocks round activations to 8 bits, which is about bfloat16's, whatever they are kept in."""
    experts, dtype = f"layers.{layer.index}.ffn.experts.", planned.plan.dtype.value
    on_blocks = any(form.is_block and name.startswith(experts) for name, form in planned.plan.layout.blocks)
    return max(TOLERANCE.get(dtype, 0.0), TOLERANCE[DType.BF16] if on_blocks else 0.0)


def _error(planned: Planned, layer: LayerSpec, what: str, sample: _Sample) -> WeightError:
    plan, layout = planned.plan, planned.plan.layout.moe_of(layer.index)
    return WeightError(
        "weights/fused-differs",
        f"layer {layer.index}: the shared experts are fused, and {what}.",
        role=plan.role.value,
        facts=(
            f"the shared experts make {sample.share:.0%} of the output on the vector of the check",
            f"{plan.role.value} plan: shared_experts = {plan.shared_experts.value}, slots {list(layout.shared_slots)},"
            f" weight {layout.shared_weight.value}, scale on {layout.scale_on.value}",
        ),
        hint="`--shared-experts separate` lays them out on their own",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sample:
    """A row [D], what the layer should make of it (float64 [D]), the shared experts' part of that norm, and how clearly
    the experts were chosen."""

    x: torch.Tensor
    out: torch.Tensor
    share: float
    margin: float
    has_shared: bool


def _best(separate: _Separate, dtype: torch.dtype) -> _Sample:
    """The first vector on which the check can be made, else the one that comes nearest to it."""
    best: _Sample | None = None
    for candidate in separate.candidates():
        sample = separate.sample(candidate.to(dtype).to(torch.float64))
        is_clear = sample.margin >= _MIN_MARGIN
        if is_clear and (sample.share >= MIN_SHARE or not sample.has_shared):
            return sample
        if best is None or (is_clear, sample.share) > (best.margin >= _MIN_MARGIN, best.share):
            best = sample
    if best is None:
        raise RuntimeError("there are no vectors to try")
    return best if best.margin >= _MIN_MARGIN else replace(best, share=0.0, has_shared=True)


class _Separate:
    """One layer's experts as the checkpoint means them, every value rounded to the type that the model keeps it in."""

    def __init__(self, planned: Planned, layer: LayerSpec, spec: MoESpec) -> None:
        self._spec = spec
        self._tensors = planned.checkpoint.tensors
        self._block = None if planned.quant is None else planned.quant.block
        self._dtype = torch_dtype(planned.plan.dtype.value)
        self._places = _places(planned, layer)
        count = 0 if spec.shared is None else spec.shared.count * spec.shared.width
        self._router = self._rows("router.weight", 0, spec.num_experts).to(torch.float64)
        self._bias = self._rows("router.bias", 0, spec.num_experts).to(torch.float64) if spec.router.has_bias else None
        self._gate_up = self._rows("shared.gate_up.weight", 0, 2 * count)
        self._down = self._rows("shared.down.weight", 0, self._router.shape[1])
        has_table = spec.router.table is not None
        self._listed = self._rows("router.table", _TOKEN, _TOKEN + 1)[0].long() if has_table else None
        self._activation = SILU if spec.shared is None else spec.shared.activation
        is_gated = spec.shared is not None and spec.shared.is_gated
        self._gate = self._rows("shared_gate.weight", 0, 1)[0].to(torch.float64) if is_gated else None

    def candidates(self) -> Iterator[torch.Tensor]:
        """Rows [D] of about unit mean square: noise, then noise beside what excites one neuron of the shared part."""
        generator = torch.Generator().manual_seed(_SEED)
        hidden, neurons = self._router.shape[1], self._gate_up.shape[0] // 2
        for number in range(_CANDIDATES):
            x = torch.randn(hidden, generator=generator, dtype=torch.float64)
            if number >= _CANDIDATES // 4:
                neuron = int(torch.randint(neurons, (1,), generator=generator))
                x = _unit(x) + number / 2 * _unit(self._gate_up[neuron] + self._gate_up[neurons + neuron])
            x = _unit(x) * hidden**0.5
            if self._gate is not None:  # half open: a gate at 1 would hide that it is not there
                x = x + (_GATE_LOGIT - self._gate @ x) * self._gate / (self._gate @ self._gate).clamp_min(1e-30)
            yield x

    def sample(self, x: torch.Tensor) -> _Sample:
        logits, spec = self._router @ x, self._spec
        chosen, weights, margin = routed(logits, self._bias, spec.router, spec.top_k, self._listed)
        shared = _mlp(x, self._gate_up, self._down, self._activation)
        if self._gate is not None:
            shared = shared * torch.sigmoid(self._gate @ x)
        out = shared + sum(weight * self._expert(x, int(slot)) for slot, weight in zip(chosen, weights, strict=True))
        share = float(shared.norm() / out.norm().clamp_min(1e-30))
        return _Sample(x=x, out=out, share=share, margin=margin, has_shared=bool(shared.any()))

    def _expert(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        both, hidden = 2 * self._spec.width, len(x)
        gate_up = self._rows("experts.gate_up", expert * both, (expert + 1) * both)
        down = self._rows("experts.down", expert * hidden, (expert + 1) * hidden)
        return _mlp(x, gate_up, down, self._spec.activation)

    def _rows(self, parameter: str, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop) of a parameter of the separate form, in float32."""
        pieces: list[tuple[int, torch.Tensor]] = []
        for place, fill in self._places[parameter]:
            first, last = fill.rows or (start, stop)
            low, high = max(first, start), min(last, stop)
            if low < high:
                pieces.append((low, self._read(place, fill, low - (fill.rows or (0,))[0], high - low)))
        return torch.cat([values for _, values in sorted(pieces, key=lambda piece: piece[0])]).to(torch.float32)

    def _read(self, place: Place, fill: Fill, row: int, count: int) -> torch.Tensor:
        group, part = gather(place, self._tensors), fill.part
        if group is None:
            raise RuntimeError(f"{place.group} is not there")
        row += part.rows[0] if part is not None and part.rows is not None else 0
        with MappedFile(group.values.file) as file:
            values = group_reader(group, file, self._block, is_raw=False).rows(row, row + count).clone()
        is_as_stored = values.ndim == 1 or not values.is_floating_point()  # a correction bias, a table
        columns = slice(*part.columns) if part is not None and part.columns is not None else slice(None)
        return values if is_as_stored else values[:, columns].to(self._dtype)


def _places(planned: Planned, layer: LayerSpec) -> dict[str, list[tuple[Place, Fill]]]:
    """What fills the layer's experts by the rules of the separate layout, by the parameter's name in the block."""
    layout, prefix = planned.plan.layout, f"layers.{layer.index}.ffn."
    apart = replace(layout.moe_of(layer.index), shared_slots=())
    rules = planned.weights(replace(planned.spec, layers=(layer,)), replace(layout, moe=((layer.index, apart),)))
    places: dict[str, list[tuple[Place, Fill]]] = {}
    for place in NameMap(rules).expected().values():
        for fill in place.fills:
            if fill.parameter.startswith(prefix):
                places.setdefault(fill.parameter.removeprefix(prefix), []).append((place, fill))
    return places


def routed(
    logits: torch.Tensor, bias: torch.Tensor | None, spec: RouterSpec, top_k: int, listed: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """The chosen experts of one row, or those of its token's table, their weights, and the least gap between what was
    chosen and what was not, as a part of the spread of scores (arch/blocks.py: RouterSpec says what is computed)."""
    match spec.score:
        case Score.SOFTMAX:
            scores = logits.softmax(0)
        case Score.SIGMOID:
            scores = logits.sigmoid()
        case Score.SQRT_SOFTPLUS:
            scores = torch.nn.functional.softplus(logits).sqrt()
    chosen, clear = (listed, inf) if listed is not None else _choice(scores, bias, spec, top_k)
    weights = scores[chosen]
    if spec.renormalise:
        weights = weights / weights.sum()
    return chosen, weights * spec.scale, clear


def _choice(
    scores: torch.Tensor, bias: torch.Tensor | None, spec: RouterSpec, top_k: int
) -> tuple[torch.Tensor, float]:
    choice = scores if bias is None else scores + bias
    spread, margin = float(choice.max() - choice.min()), inf
    if spec.group_score is not GroupScore.NONE and spec.num_groups > 1:
        groups = choice.view(spec.num_groups, -1)
        best = 1 if spec.group_score is GroupScore.MAX else 2
        kept, margin = _first(groups.topk(best, dim=1).values.sum(1), spec.top_groups)
        masked = torch.full_like(groups, -inf)
        masked[kept] = groups[kept]
        choice = masked.flatten()
    chosen, gap = _first(choice, top_k)
    return chosen, min(margin, gap) / spread if spread else inf  # all alike: the lowest indices, whatever is rounded


def _first(values: torch.Tensor, count: int) -> tuple[torch.Tensor, float]:
    """Indices of the `count` highest, equal ones by index, and how far the next one is below them."""
    order = values.sort(descending=True, stable=True)
    gap = float(order.values[count - 1] - order.values[count]) if count < len(values) else inf
    return order.indices[:count], gap


def _mlp(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, activation: ActivationSpec) -> torch.Tensor:
    gate, up = (gate_up @ x.to(torch.float32)).to(torch.float64).chunk(2)
    if activation.limit is not None:
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    return (down @ (gate * gate.sigmoid() * up).to(torch.float32)).to(torch.float64)


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float64) / x.to(torch.float64).norm().clamp_min(1e-30)
