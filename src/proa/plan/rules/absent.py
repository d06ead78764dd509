"""Knobs of blocks that a model does not have: linear attention, experts, shared ones among them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proa.choice import Choice
from proa.conditions import Source
from proa.errors import PlanError
from proa.plan.context import RunnerContext
from proa.plan.decision import Decision, Note
from proa.plan.rules.settle import names_role, show, spelled
from proa.plan.runner_plan import LinearAttentionPlan
from proa.units import Role


def linear_attention(ctx: RunnerContext, facts: Mapping[str, Any]) -> LinearAttentionPlan:
    ask = ctx.intent
    return LinearAttentionPlan(
        prefill=without_states(ctx, facts, "linear_attention.prefill", ask.linear_attention_prefill),
        decode=without_states(ctx, facts, "linear_attention.decode", ask.linear_attention_decode),
        verify=without_states(ctx, facts, "linear_attention.verify", ask.linear_attention_verify),
    )


def without_states(ctx: RunnerContext, facts: Mapping[str, Any], knob: str, ask: Choice[Any]) -> Decision[None]:
    """Of a model without linear attention, whose layers keep no state but rows of the cache."""
    read = {"spec.linear_layers": facts["spec.linear_layers"]}
    return _nothing(ctx.role, knob, ask, "0 linear-attention layers", read)


def moe_kernel(ctx: RunnerContext, facts: Mapping[str, Any]) -> Decision[None]:
    read = {"spec.moe_layers": facts["spec.moe_layers"]}
    return _nothing(ctx.role, "moe_kernel", ctx.intent.moe_kernel, "0 MoE layers", read)


def shared_experts(ctx: RunnerContext, facts: Mapping[str, Any]) -> Decision[None]:
    read = {"spec.moe_layers": facts["spec.moe_layers"]}
    return _nothing(ctx.role, "shared_experts", ctx.intent.shared_experts, "no shared experts", read)


def _nothing(role: Role, knob: str, ask: Choice[Any], why: str, inputs: Mapping[str, Any]) -> Decision[None]:
    """The knob does not apply.

    An ask that names this runner is an error. One that names no runner speaks to those that have the block, so it
    must not fail the other runner: it stays as a note.
    """
    if not ask.is_auto and names_role(ask):
        raise PlanError(
            "plan/does-not-apply",
            f"{knob} = {show(ask.value)} was asked for{spelled(ask)}, but this model has {why}.",
            role=role.value,
        )
    asked = Note(
        condition=f"{knob}.ask", reason=f"{show(ask.value)} was asked for{spelled(ask)}; nothing to apply it to"
    )
    return Decision(
        knob=knob,
        value=None,
        requested=ask,
        source=Source.CHECKPOINT,
        rule=f"{knob}.absent",
        reason=why,
        inputs=inputs,
        notes=() if ask.is_auto else (asked,),
    )
