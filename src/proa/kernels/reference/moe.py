"""Routing and experts in plain torch. The definition other backends match. Legend: kernels/seam.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from proa.arch.blocks import SILU, ActivationSpec, GroupScore, RouterSpec, Score
from proa.kernels.reference.dequant import dequantize, values_of
from proa.kernels.reference.misc import activate
from proa.kernels.seam import Blocks, Codes, PackedExperts, PackedRouter, Routed


class ReferenceMoE:
    """MoEOps: scores and choice over all rows at once, then one expert after the other over the rows that took it."""

    name = "reference"

    def pack_router(
        self, weight: torch.Tensor, bias: torch.Tensor | None, table: torch.Tensor | None = None
    ) -> PackedRouter:
        return PackedRouter(weight=weight, bias=bias, table=table)

    def pack_experts(self, gate_up: torch.Tensor, down: torch.Tensor) -> PackedExperts:
        slots, hidden, width = down.shape
        return PackedExperts(gate_up=gate_up, down=down, slots=slots, width=width, hidden=hidden)

    def pack_expert_codes(self, gate_up: Codes, down: Codes, dtype: torch.dtype) -> PackedExperts:
        return self.pack_experts(values_of(gate_up).to(dtype), values_of(down).to(dtype))

    def pack_expert_blocks(self, gate_up: Blocks, down: Blocks, dtype: torch.dtype) -> PackedExperts:
        both = (dequantize(one.data.flatten(), one.format, one.shape).to(dtype) for one in (gate_up, down))
        return self.pack_experts(*both)

    def route(
        self,
        x: torch.Tensor,
        router: PackedRouter,
        spec: RouterSpec,
        top_k: int,
        shared: Sequence[int],
        shared_weight: float,
        gate: torch.Tensor | None,
        token_ids: torch.Tensor | None = None,
    ) -> Routed:
        scores = _scores(F.linear(x.float(), router.weight.float()), spec.score)
        if router.table is None:
            choice = scores if router.bias is None else scores + router.bias
            slots = _best(_within_groups(choice, spec), top_k)
        else:
            slots = router.table[router.ids(token_ids)]
        weights = scores.gather(1, slots)
        if spec.renormalise:
            weights = weights / (weights.sum(dim=1, keepdim=True) + 1e-20)
        weights = weights * spec.scale
        if shared:
            fused = torch.tensor(shared, device=x.device).expand(len(x), -1)
            entry = weights.new_full((len(x), 1), shared_weight) if gate is None else _gate(x, gate)
            slots, weights = torch.cat((slots, fused), dim=1), torch.cat((weights, entry.expand(fused.shape)), dim=1)
        return Routed(slots=slots.int(), weights=weights)

    def experts(
        self,
        x: torch.Tensor,
        routed: Routed,
        packed: PackedExperts,
        *,
        scale: float,
        shared: torch.Tensor | None,
        gate: torch.Tensor | None,
        activation: ActivationSpec = SILU,
    ) -> torch.Tensor:
        results = x.new_empty((*routed.slots.shape, packed.hidden))  # each row's, in its own order
        for slot in routed.slots.unique().tolist():
            rows, places = (routed.slots == slot).nonzero(as_tuple=True)
            gated, up = F.linear(x[rows], packed.gate_up[slot]).chunk(2, dim=-1)
            results[rows, places] = F.linear(activate(gated, up, activation), packed.down[slot])
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for place in range(routed.slots.shape[1]):
            total += routed.weights[:, place, None] * results[:, place].float()
        total *= scale
        if shared is not None:
            total += shared.float() if gate is None else shared.float() * _gate(x, gate)
        return total.to(x.dtype)


def _scores(logits: torch.Tensor, score: Score) -> torch.Tensor:
    match score:
        case Score.SOFTMAX:
            return logits.softmax(dim=-1)
        case Score.SIGMOID:
            return logits.sigmoid()
        case Score.SQRT_SOFTPLUS:
            return F.softplus(logits).sqrt()


def _within_groups(choice: torch.Tensor, spec: RouterSpec) -> torch.Tensor:
    """`choice` [T, E] with -inf outside the best groups.

    DeepSeek V2 and Mistral 4 write 0 there. Their scores are probabilities, so the same experts win as long as the best
    groups have `top_k` of them.
    """
    if spec.group_score is GroupScore.NONE:
        return choice
    groups = choice.unflatten(1, (spec.num_groups, -1))
    counted = 1 if spec.group_score is GroupScore.MAX else 2
    worth = groups.topk(counted, dim=-1).values.sum(dim=-1)
    stays = torch.zeros_like(worth, dtype=torch.bool).scatter_(1, _best(worth, spec.top_groups), True)
    return groups.masked_fill(~stays.unsqueeze(-1), float("-inf")).flatten(1)


def _best(values: torch.Tensor, count: int) -> torch.Tensor:
    """Indices [T, count] of the largest values of each row, equal ones by index."""
    return values.sort(dim=1, descending=True, stable=True).indices[:, :count]


def _gate(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """sigmoid(x . gate) [T, 1] float32."""
    return F.linear(x.float(), gate.float()).sigmoid()
