"""How a PlanSet reads: JSON, a table of both runners, every condition of one decision, a diff. Decides nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from proa.conditions import Source
from proa.errors import ConfigError
from proa.kernels.cost import CostTable
from proa.plan.decision import Decision
from proa.plan.digest import decision_json, plain
from proa.plan.rules.settle import show
from proa.plan.runner_plan import DraftContract, PlanSet, RunnerPlan
from proa.units import format_bytes


def explain_json(plans: PlanSet, costs: Mapping[str, CostTable]) -> dict[str, Any]:
    """The object of interfaces.md, and beside it what both runners share, and what was measured of them (by role)."""
    return {
        "runners": {
            "target": _runner_json(plans.target),
            "draft": None if plans.draft is None else _runner_json(plans.draft),
        },
        "pair": None if plans.contract is None else _pair_json(plans.contract),
        "engine": {knob: decision_json(decision) for knob, decision in engine_decisions(plans).items()},
        "memory": {
            "page_bytes": dict(plans.memory.page_bytes),
            "state_bytes": dict(plans.memory.state_bytes),
            "weights_bytes": dict(plans.memory.weights_bytes),
            "hidden_bytes": plans.memory.hidden_bytes,
            "step_bytes": dict(plans.memory.step_bytes),
        },
        "costs": {role: table.to_json() for role, table in costs.items()},
        "digest": plans.digest,
    }


def engine_decisions(plans: PlanSet) -> dict[str, Decision[Any]]:
    """Every decision that is not one runner's own, by knob."""
    contract = plans.contract
    pair = () if contract is None else (contract.num_draft_tokens, contract.verification)
    limits, pages = plans.schedule, plans.memory
    shared = (
        *(limits.max_num_seqs, limits.max_model_len, limits.prefill_chunk, limits.prefill_alignment),
        limits.prefix_cache,
        *(pages.target_pages, pages.draft_pages, *pages.state_slots.values(), *pages.snapshot_slots.values()),
        plans.host.threads,
    )
    return {decision.knob: decision for decision in (plans.speculative, *pair, *shared)}


def _runner_json(plan: RunnerPlan) -> dict[str, Any]:
    return {
        "family": plan.family,
        "role": plan.role.value,
        "checkpoint": plan.checkpoint,
        "digest": plan.digest,
        "num_layers": plan.num_layers,
        "dtype": plan.dtype.value.value,
        "decisions": {knob: decision_json(decision) for knob, decision in plan.decisions().items()},
    }


def _pair_json(contract: DraftContract) -> dict[str, Any]:
    """Taps and borrows are those of a draft that lives on its target; no draft here has a vocabulary of its own."""
    return {
        "algorithm": contract.algorithm.value,
        "num_draft_tokens": contract.num_draft_tokens.value,
        "measures_length": contract.measures_length,
        "verification": contract.verification.value.value,
        "taps": [{"point": tap.point.value, "width": tap.width} for tap in contract.taps],
        "borrows": [module.value for module in contract.borrows],
        "vocab_map": None,
        "draft_vocab": contract.draft_vocab,
        "max_positions": contract.max_positions,
        "checks": [
            {"condition": v.condition, "reason": v.reason, "inputs": plain(v.inputs)} for v in contract.checks.verdicts
        ],
        "notes": [{"condition": note.condition, "reason": note.reason} for note in contract.checks.notes],
    }


def explain_table(plans: PlanSet, tensors: Mapping[str, str] | None = None) -> str:
    """One line per decision: what the target does, what the draft does, why.

    `tensors` says, by role, what the dry ledger counted; this module reads no checkpoint.
    """
    rows = [("", _title(plans.target), _title(plans.draft) if plans.draft else "", "why")]
    rows += [_row(knob, plans) for knob in plans.target.decisions()]
    if tensors:
        rows.append(("tensors", tensors["target"], tensors.get("draft", ""), "dry ledger, from headers"))
    rows.append(("memory", *_memory(plans)))
    rows += [(knob, show(d.value), "", _why(d)) for knob, d in engine_decisions(plans).items() if "memory." not in knob]
    rows += [("pair", "", "", reason) for reason in _pair_lines(plans.contract)]
    return "\n".join([*_columns(rows), f"plan {plans.digest}"])


def cost_lines(costs: Mapping[str, CostTable]) -> list[str]:
    """What was measured on this host, by role. It stands beside the plan and is no part of it."""
    return [f"{role} per forward, measured: {table}" for role, table in costs.items()]


def _title(plan: RunnerPlan) -> str:
    layers = f"{plan.num_layers} layer{'s' * (plan.num_layers > 1)}"
    return f"{plan.role.value} ({plan.family}, {layers}, {plan.digest[:8]})"


def _row(knob: str, plans: PlanSet) -> tuple[str, str, str, str]:
    target = plans.target.decisions()[knob]
    if plans.draft is None:
        return knob, _cell(target), "", _why(target)
    draft = plans.draft.decisions()[knob]
    if (target.value, target.reason) == (draft.value, draft.reason):
        return knob, _cell(target), _cell(draft), _why(target)
    return knob, _cell(target), _cell(draft), f"target: {_why(target)}; draft: {_why(draft)}"


def _cell(decision: Decision[Any]) -> str:
    return "not applicable" if decision.value is None else show(decision.value)


def _why(decision: Decision[Any]) -> str:
    """The reason and its source, or how it was asked for; what an ask overrode is said too."""
    is_asked = decision.source is Source.ASKED
    said = f"{decision.reason} ({decision.requested.origin.where if is_asked else decision.source.value})"
    return "; ".join([said, *(f"note: {note.reason}" for note in decision.notes)])


def _memory(plans: PlanSet) -> tuple[str, str, str]:
    memory = plans.memory

    def cell(role: str, pages: int) -> str:
        cache = format_bytes(pages * memory.page_bytes[role])
        running, kept = memory.state_slots[role].value, memory.snapshot_slots[role].value
        states = format_bytes((running + kept) * memory.state_bytes[role])
        more = f", {running}+{kept} states ({states})" if running else ""
        return f"{format_bytes(memory.weights_bytes[role])} weights, {pages} pages ({cache}){more}"

    draft = cell("draft", memory.draft_pages.value) if plans.draft else ""
    return cell("target", memory.target_pages.value), draft, _why(memory.target_pages)


def _pair_lines(contract: DraftContract | None) -> Iterator[str]:
    if contract is None:
        return
    held = [v.condition.removeprefix("pair.") for v in contract.checks.verdicts if v.reason is None]
    if held:
        yield f"ok: {', '.join(held)}"
    if contract.borrows:
        yield f"borrowed from the target: {', '.join(module.value for module in contract.borrows)}"
    yield from (f"note: {note.reason}" for note in contract.checks.notes)


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows as text; a column that is empty everywhere takes no room. The last column is not padded."""
    used = [index for index in range(len(rows[0])) if index in (0, 1) or any(row[index] for row in rows)]
    widths = [max(len(row[index]) for row in rows) for index in used]
    return [
        "  ".join(row[index].ljust(width) for index, width in zip(used, widths, strict=True)).rstrip() for row in rows
    ]


def explain_why(plans: PlanSet, knob: str) -> str:
    """Every condition of one decision with its verdict and the facts that it read, per runner.

    A knob with phases (`attention`) answers with all of them; `pair` answers with the check of the two runners.
    """
    if knob == "pair":
        return "\n".join(_pair_why(plans.contract))
    return "\n".join(line for who, decision in decisions_of(plans, knob) for line in _why_lines(who, decision))


def why_json(plans: PlanSet, knob: str) -> list[dict[str, Any]]:
    """The same as values: the decisions that answer `knob`, each with every condition that was asked."""
    return [
        {
            "runner": who.removesuffix(": ") or None,
            "knob": decision.knob,
            **decision_json(decision),
            "checked": [
                {
                    "value": plain(check.value),
                    "condition": check.condition,
                    "blocks": check.blocks.value,
                    "reason": check.reason,
                    "inputs": plain(check.inputs),
                }
                for check in decision.checked
            ],
        }
        for who, decision in decisions_of(plans, knob)
    ]


def _why_lines(who: str, decision: Decision[Any]) -> Iterator[str]:
    yield f"{who}{decision.knob} = {_cell(decision)}"
    asked = f" ({decision.requested.origin})" if not decision.requested.is_auto else ""
    yield f"  requested {plain(decision.requested)}{asked}; source {decision.source.value}; rule {decision.rule}"
    yield f"  {decision.reason}"
    yield from (f"  read {name} = {plain(value)}" for name, value in decision.inputs.items())
    yield from (f"  note {note.condition}: {note.reason}" for note in decision.notes)
    yield "  conditions:" if decision.checked else "  no condition was asked"
    for check in decision.checked:
        verdict = "holds" if check.reason is None else f"blocked: {check.reason}"
        facts = ", ".join(f"{name} = {plain(value)}" for name, value in check.inputs.items()) or "no facts"
        yield f"    {show(check.value)}: {check.condition} ({check.blocks.value}) {verdict}  [{facts}]"


def _pair_why(contract: DraftContract | None) -> Iterator[str]:
    if contract is None or not contract.checks.verdicts:
        yield "no pair: there is no draft runner"
        return
    for verdict in contract.checks.verdicts:
        facts = ", ".join(f"{name} = {plain(value)}" for name, value in verdict.inputs.items())
        yield f"{verdict.condition}: {verdict.reason or 'holds'}  [{facts}]"


def decisions_of(plans: PlanSet, knob: str) -> list[tuple[str, Decision[Any]]]:
    """The decisions that answer `knob`, each with a prefix that names its runner (none for what both share).

    Raises ConfigError `plan/unknown-knob` with the nearest known ones.
    """
    tables = [("target: ", plans.target.decisions())]
    if plans.draft is not None:
        tables.append(("draft: ", plans.draft.decisions()))
    tables.append(("", engine_decisions(plans)))
    wanted = knob.replace("-", "_")
    every = [(who, decision) for who, table in tables for decision in table.values()]
    found = [(who, d) for who, d in every if d.knob == wanted or d.knob.startswith(f"{wanted}.")]
    if not found:
        known = sorted({decision.knob for _, decision in every})
        near = get_close_matches(wanted, known, n=3) or known
        raise ConfigError(
            "plan/unknown-knob", f"no decision is called {knob!r}.", facts=(f"nearest: {', '.join(near)}",)
        )
    return found


def explain_diff(plans: PlanSet) -> str:
    """Only the decisions in which draft and target differ."""
    if plans.draft is None:
        return "no draft runner to compare with"
    draft = plans.draft.decisions()
    different = [knob for knob, mine in plans.target.decisions().items() if mine.value != draft[knob].value]
    rows = [("", "target", "draft", "why"), *(_row(knob, plans) for knob in different)]
    return "\n".join(_columns(rows)) if different else "target and draft have the same value for every decision"
