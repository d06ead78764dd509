"""resolve(): every decision for both runners, in a fixed order. Pure; owns no rule, only their order.

The draft is resolved from its own checkpoint and facts of its target. No decision of the target is visible to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

from proa.arch.config_keys import ConfigReport
from proa.arch.registry import read_config
from proa.checkpoint.types import Checkpoint
from proa.config.intent import EngineConfig
from proa.errors import KernelUnavailable
from proa.kernels.caps import DeviceCaps
from proa.plan import pair
from proa.plan.context import RunnerContext, TargetFacts, caps_facts, target_facts
from proa.plan.decision import Decision
from proa.plan.digest import digest_of, stable
from proa.plan.planned import Planned, Resolved
from proa.plan.rules import host, schedule, speculative
from proa.plan.rules.memory import memory, memory_facts
from proa.plan.runner import plan_runner, runner_size
from proa.plan.runner_plan import DraftContract, HostPlan, MemoryPlan, PlanSet, SchedulePlan
from proa.units import Algorithm, Role


def resolve(intent: EngineConfig, target: Checkpoint, draft: Checkpoint | None, caps: DeviceCaps) -> Resolved:
    """Return every decision for both runners, with reasons.

    Pure: same inputs, same plan. Reads headers, config and token lists, never tensor data or the device.
    Raises PlanError when an explicit ask cannot be met, CacheExhausted when it does not fit, ConfigError when a
    config means something that Proa does not implement.
    """
    given = draft is not None or not intent.draft.path.is_auto
    algorithm = speculative.algorithm(intent.speculative.algorithm, {"draft.given": given})
    speculative.refuse_idle_asks(intent.speculative, algorithm.value)
    main, config = _plan(intent, Role.TARGET, target, caps, peer=None)
    configs = {Role.TARGET.value: config}
    second = None
    if algorithm.value is Algorithm.STANDALONE:
        if draft is None:
            raise ValueError("a draft path was asked for, but resolve() got no draft checkpoint")
        second, configs[Role.DRAFT.value] = _plan_draft(intent, draft, caps, main)
    else:
        speculative.refuse_draft_asks(intent.draft, algorithm.value)
    plans = _plan_set(intent, algorithm, main, second, caps)
    return Resolved(plans=plans, target=main, draft=second, configs=MappingProxyType(configs))


def _plan(
    intent: EngineConfig, role: Role, checkpoint: Checkpoint, caps: DeviceCaps, *, peer: TargetFacts | None
) -> tuple[Planned, ConfigReport]:
    family, spec, config = read_config(checkpoint.config)
    context = RunnerContext(
        role=role,
        intent=intent.target if role is Role.TARGET else intent.draft,
        checkpoint=checkpoint,
        family=family,
        spec=spec,
        caps=caps,
        parallel=intent.parallel,
        peer=peer,
    )
    return plan_runner(context, intent.load.allow_unexpected.value or ()), config


def _plan_draft(
    intent: EngineConfig, draft: Checkpoint, caps: DeviceCaps, target: Planned
) -> tuple[Planned, ConfigReport]:
    try:
        return _plan(intent, Role.DRAFT, draft, caps, peer=target_facts(target.spec))
    except KernelUnavailable as error:
        facts = (*error.facts, "The target is unaffected.")
        raise KernelUnavailable(error.slug, error.message, role=error.role, facts=facts, hint=error.hint) from error


def _plan_set(
    intent: EngineConfig, algorithm: Decision[Algorithm], target: Planned, draft: Planned | None, caps: DeviceCaps
) -> PlanSet:
    length = None
    if algorithm.value is not Algorithm.NONE:
        length = speculative.num_draft_tokens(intent.speculative.num_draft_tokens, algorithm.value)
    runners = (target,) if draft is None else (target, draft)
    limits, pages = _limits(intent, runners, 0 if length is None else length.value, caps)
    contract = None if length is None else _contract(intent, length, limits, target, draft)
    threads = host.threads(intent.host.threads, caps_facts(caps))
    covered = {
        "runners": [planned.plan.digest for planned in runners],
        "speculative": stable(algorithm),
        "contract": contract
        and [stable(contract.num_draft_tokens), stable(contract.verification), contract.draft_vocab],
        "schedule": [stable(limit) for limit in (limits.max_num_seqs, limits.max_model_len, limits.prefill_chunk)],
        "threads": stable(threads),
    }
    return PlanSet(
        target=target.plan,
        draft=draft.plan if draft else None,
        speculative=algorithm,
        contract=contract,
        memory=pages,
        schedule=limits,
        host=HostPlan(threads=threads),
        digest=digest_of(covered),
    )


def _limits(
    intent: EngineConfig, runners: Sequence[Planned], draft_tokens: int, caps: DeviceCaps
) -> tuple[SchedulePlan, MemoryPlan]:
    """The schedule and the pages, which bound each other: the pages follow from the wanted length, and cap it."""
    target, ask = runners[0], intent.schedule
    seqs = schedule.max_num_seqs(ask.max_num_seqs)
    length = schedule.max_model_len(ask.max_model_len, {"spec.max_positions": target.spec.max_positions})
    sizes = [runner_size(planned, slack=draft_tokens if planned.plan.role is Role.DRAFT else 0) for planned in runners]
    facts = memory_facts(caps, target.plan.device.value)
    pages = memory(intent.cache.memory_bytes, sizes, seqs.value, length.value, facts)
    capacity = pages.target_pages.value * target.plan.page_size.value
    limits = SchedulePlan(
        max_num_seqs=seqs,
        max_model_len=schedule.within_pages(length, capacity, pages.target_pages),
        prefill_chunk=schedule.prefill_chunk(ask.prefill_chunk),
    )
    return limits, pages


def _contract(
    intent: EngineConfig, length: Decision[int], limits: SchedulePlan, target: Planned, draft: Planned | None
) -> DraftContract:
    verification = speculative.verification(intent.speculative.verification)
    if draft is None:
        return pair.ngram_contract(length, verification)
    facts = pair.pair_facts(
        target_facts(target.spec), target.checkpoint, draft.checkpoint, draft.spec, limits.max_model_len.value
    )
    return pair.standalone_contract(facts, length, verification)
