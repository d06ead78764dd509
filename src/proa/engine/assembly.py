"""From intent to a serving engine, one frozen stage after the other. Owns the order; every stage is another file's.

What needs no torch is in plan/prepare.py; here weights are read and runners built. No stage looks back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from proa.arch.wrappers import body_of
from proa.cache.state_values import StateRoom
from proa.checkpoint.types import Checkpoint
from proa.config.intent import EngineConfig
from proa.engine.costs import start_costs, start_rollbacks
from proa.engine.defaults import ids_of
from proa.engine.engine import Engine
from proa.engine.session import Limits, Session
from proa.engine.template import ChatTemplate
from proa.engine.tokenizer import Tokenizer
from proa.errors import CheckpointError
from proa.kernels.cost import CostTable
from proa.kernels.probing.probe import Probed, probe
from proa.loading.build import BuiltModel, build
from proa.loading.ledger import ledger_document
from proa.loading.progress import Progress, Silent
from proa.plan.explain import explain_json
from proa.plan.planned import Planned, Resolved
from proa.plan.prepare import host_caps, prepare
from proa.plan.ranks import refuse_more_ranks
from proa.plan.runner_plan import MemoryPlan
from proa.runner.describe import promised
from proa.runner.runner import Runner
from proa.sampling.sampler import logprobs
from proa.speculative.registry import (
    build_drafter,
    build_lengths,
    build_watch,
    draft_gives_hidden,
    target_gives_hidden,
)
from proa.speculative.verify import Verifier
from proa.units import Verification


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Where start-up says what it does: `note` takes a line for a person, `progress` the bytes of loading."""

    note: Callable[[str], None]
    progress: Progress

    @classmethod
    def silent(cls) -> Report:
        return cls(note=lambda text: None, progress=Silent())


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembled:
    """Everything of one engine. `template` is None for a model without one. `costs` by role, as far as known."""

    resolved: Resolved
    target: Runner
    draft: Runner | None
    costs: Mapping[str, CostTable]
    engine: Engine
    session: Session
    tokenizer: Tokenizer
    template: ChatTemplate | None

    @property
    def runners(self) -> Mapping[str, Runner]:
        """By role."""
        draft = {} if self.draft is None else {"draft": self.draft}
        return {"target": self.target, **draft}

    def explain(self) -> dict[str, Any]:
        return explain_json(self.resolved.plans, self.costs)

    def ledger(self) -> dict[str, Any]:
        checkpoints = [one.checkpoint for one in (self.resolved.target, self.resolved.draft) if one is not None]
        return ledger_document({name: runner.ledger for name, runner in self.runners.items()}, checkpoints)

    def descriptions(self) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
        """By role: what was built, and what the plan promised."""
        planned = {"target": self.resolved.target, "draft": self.resolved.draft}
        return {
            name: (
                runner.describe(),
                promised(one.plan, one.spec, one.parameters, runner.tables.pool.num_pages, runner.room),
            )
            for name, runner in self.runners.items()
            if (one := planned[name]) is not None
        }

    def stats(self) -> dict[str, Any]:
        proposes = self.resolved.plans.contract is not None
        return {
            "num_requests_running": self.engine.num_running,
            "num_requests_waiting": self.engine.num_waiting,
            "speculative_decoding": dict(self.engine.stats.metrics()) if proposes else None,
            "draft_length": self.engine.lengths.metrics() if proposes else None,
            "speculative_health": self.engine.health(),
            "prefix_cache": None if self.engine.reuse is None else self.engine.reuse.stats(),
            "kernel_calls": {role: runner.kernel_calls() for role, runner in self.runners.items()},
        }


def assemble(config: EngineConfig, *, cache_dir: Path, online: bool, report: Report) -> Assembled:
    """The whole start-up. Raises any ProaError; nothing of a failed start stays behind."""
    probed = probe(host_caps(config, cache_dir), cache_dir, report.note)
    resolved = _planned(config, cache_dir, online, report.note, probed)
    for warning in resolved.warnings:
        report.note(warning)
    tokenizer, template = open_text(resolved.target.checkpoint)
    plans = resolved.plans
    target, draft = build_runners(resolved, report.progress, probed.library)
    runners = {"target": target} if draft is None else {"target": target, "draft": draft}
    costs = start_costs(resolved, runners, cache_dir, report.note)
    engine = join(resolved, target, draft, costs, report.note)
    limits = Limits(
        vocab=resolved.target.spec.vocab,
        max_model_len=plans.schedule.max_model_len.value,
        eos_ids=end_of_text(resolved.target.checkpoint, tokenizer),
        proposes=plans.contract is not None,
    )
    return Assembled(
        resolved=resolved,
        target=target,
        draft=draft,
        costs=costs,
        engine=engine,
        session=Session(engine, tokenizer, limits),
        tokenizer=tokenizer,
        template=template,
    )


def _planned(
    config: EngineConfig, cache_dir: Path, online: bool, note: Callable[[str], None], probed: Probed
) -> Resolved:
    """The plans, of a host that has measured what they ask about it: on the first start they are made twice."""
    resolved = prepare(config, cache_dir=cache_dir, online=online, note=note, caps=probed.caps)
    # Process-wide, hence set here, once, and nowhere else; every runner of this process is planned for it.
    torch.set_num_threads(resolved.plans.host.threads.value)
    if not start_rollbacks(resolved, probed.library, cache_dir, note):
        return resolved
    return prepare(config, cache_dir=cache_dir, online=online, note=Report.silent().note, caps=probed.caps)


def build_runners(resolved: Resolved, progress: Progress, library: Path | None) -> tuple[Runner, Runner | None]:
    """Target and draft, each with its weights and a closed ledger, from its own plan alone. A draft may borrow whole
    modules of the built target."""
    contract, memory = resolved.plans.contract, resolved.plans.memory
    for planned in resolved.runners:
        refuse_more_ranks(planned.plan)
    target = build(resolved.target, progress, library, None, resolved.plugins)
    pages, room = memory.target_pages.value, _room(memory, "target")
    runner = _runner(resolved.target, target, pages, room, gives_hidden=target_gives_hidden(contract))
    if resolved.draft is None:
        return runner, None
    draft = build(resolved.draft, progress, library, target.model, resolved.plugins)
    pages, room = memory.draft_pages.value, _room(memory, "draft")
    return runner, _runner(resolved.draft, draft, pages, room, gives_hidden=draft_gives_hidden(contract))


def _room(memory: MemoryPlan, runner: str) -> StateRoom | None:
    """For the states of a runner's requests and for snapshots; None where it has no states."""
    slots = memory.state_slots[runner].value + memory.snapshot_slots[runner].value
    return StateRoom(slots=slots, kept_rows=memory.kept_rows[runner]) if slots else None


def _runner(
    planned: Planned, built: BuiltModel, num_pages: int, room: StateRoom | None, *, gives_hidden: bool
) -> Runner:
    return Runner(
        planned.plan, planned.spec, built.model, built.ledger, num_pages, gives_hidden=gives_hidden, room=room
    )


def join(
    resolved: Resolved,
    target: Runner,
    draft: Runner | None,
    costs: Mapping[str, CostTable],
    note: Callable[[str], None],
) -> Engine:
    """The engine over both runners; the contract is applied here and nowhere else."""
    contract, schedule = resolved.plans.contract, resolved.plans.schedule
    mode = Verification.COUPLED if contract is None else contract.verification.value
    drafter = build_drafter(
        contract,
        draft=draft,
        vocab=resolved.target.spec.vocab,
        prefill_chunk=schedule.prefill_chunk.value,
    )
    return Engine(
        runner=target,
        draft=draft,
        drafter=drafter,
        verifier=Verifier(mode, target.kernels),
        schedule=schedule,
        contract=contract,
        logprobs=logprobs,
        lengths=build_lengths(contract, costs, note),
        watch=build_watch(contract, note),
    )


def open_text(checkpoint: Checkpoint) -> tuple[Tokenizer, ChatTemplate | None]:
    """The tokenizer, and the chat template if there is one."""
    source = checkpoint.tokenizer
    if source is None:
        raise CheckpointError(
            "tokenizer/missing",
            f"{checkpoint.path}: the checkpoint has no tokenizer.",
            hint="add its tokenizer.json to the directory",
        )
    tokenizer = Tokenizer.from_source(source)
    if source.chat_template is None:
        return tokenizer, None
    template = ChatTemplate(source.chat_template, tokenizer.bos_token, tokenizer.eos_token, str(checkpoint.path.name))
    return tokenizer, template


def end_of_text(checkpoint: Checkpoint, tokenizer: Tokenizer) -> frozenset[int]:
    """Every id that ends an answer: of generation_config.json, config.json and the tokenizer together."""
    configured = body_of(checkpoint.config).get("eos_token_id", None)
    return ids_of(checkpoint.generation.get("eos_token_id")) | ids_of(configured) | tokenizer.eos_ids
