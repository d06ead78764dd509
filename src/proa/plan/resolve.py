"""resolve(): every decision for both runners, in a fixed order. Pure; owns no rule, only their order.

The draft is resolved from its own tensors and facts of its target. No decision of the target is visible to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import MappingProxyType

from proa.arch.config_keys import ConfigReport
from proa.arch.registry import Reading, read_config
from proa.arch.weights import NameMap, WeightRule
from proa.checkpoint.types import Checkpoint
from proa.conditions import Facts
from proa.config.intent import EngineConfig
from proa.errors import KernelUnavailable
from proa.kernels.caps import DeviceCaps
from proa.kernels.plugins import KernelPlugin
from proa.kernels.rollback import RollbackCosts
from proa.plan import drafts, pair
from proa.plan.context import CapsFacts, RunnerContext, TargetFacts, Undoing, target_facts
from proa.plan.decision import Decision
from proa.plan.digest import digest_of, plain, stable
from proa.plan.planned import Lender, Planned, Resolved
from proa.plan.rules import host, schedule, speculative
from proa.plan.rules.memory import memory, memory_facts
from proa.plan.runner import decide, planned, runner_size
from proa.plan.runner_plan import DraftContract, HostPlan, MemoryPlan, PlanSet, RunnerPlan, SchedulePlan
from proa.plan.stored import StoredNames, find
from proa.units import Algorithm, Role

OWN_LAYERS = "the draft alone is taken from this checkpoint, its target is another one"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """A checkpoint, what its config says, and the drafts that it bundles."""

    checkpoint: Checkpoint
    reading: Reading
    stored: StoredNames
    bundles: dict[Algorithm, drafts.Bundle]

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> _Source:
        reading, stored = read_config(checkpoint.config), StoredNames(checkpoint.tensors)
        return cls(checkpoint=checkpoint, reading=reading, stored=stored, bundles=drafts.bundles(reading, stored))

    def left_out(self, why: str, *, but: Algorithm | None = None) -> list[WeightRule]:
        """Rules that leave out its bundled drafts."""
        unused = [bundle for algorithm, bundle in self.bundles.items() if algorithm is not but]
        return [rule for bundle in unused for rule in bundle.left_out(why)]

    def names(self, rules: Sequence[WeightRule]) -> NameMap:
        return NameMap(rules, self.reading.prefixes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Runner:
    """A runner with its decisions made."""

    source: _Source
    context: RunnerContext
    plan: RunnerPlan

    @property
    def rules(self) -> list[WeightRule]:
        return list(self.context.weights(self.context.spec, self.plan.layout))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Host:
    """What the machine is and has beside the checkpoints."""

    caps: DeviceCaps
    plugins: tuple[KernelPlugin, ...]
    undoing: Undoing


def resolve(
    intent: EngineConfig,
    target: Checkpoint,
    draft: Checkpoint | None,
    caps: DeviceCaps,
    plugins: Sequence[KernelPlugin] = (),
    rollbacks: Mapping[str, RollbackCosts] = MappingProxyType({}),
) -> Resolved:
    """Return every decision for both runners, with reasons.

    Pure: same inputs, same plan. Reads headers, config and token lists, never tensor data or the device. `plugins` are
    kernels of other packages; `rollbacks` are measured (kernels/rollback.py) and stand beside the plan: no digest
    covers them.
    Raises PlanError when an explicit ask cannot be met, CacheExhausted when it does not fit, ConfigError when a
    config means something that Proa does not implement.
    """
    given = draft is not None or not intent.draft.path.is_auto
    first = _Source.of(target)
    # An ask for a bundled draft is judged by the checkpoint that would give it.
    other = None if draft is None else _Source.of(draft)
    giver = other or first
    facts = {"draft.given": given, **drafts.bundle_facts(giver.reading, giver.bundles)}
    algorithm = speculative.algorithm(intent.speculative.algorithm, facts)
    speculative.refuse_idle_asks(intent.speculative, algorithm.value)
    undoing = _undoing(intent, algorithm.value, caps, rollbacks)
    host = _Host(caps=caps, plugins=tuple(plugins), undoing=undoing)
    main = _decided(intent, Role.TARGET, first, host, bundle=None, peer=None)
    peer = target_facts(first.reading.spec)
    second = None
    if algorithm.value in (Algorithm.STANDALONE, Algorithm.NEXTN):
        if given and other is None:
            raise ValueError("a draft path was asked for, but resolve() got no draft checkpoint")
        second = _decided_draft(intent, giver, host, giver.bundles.get(algorithm.value), peer)
    else:
        speculative.refuse_draft_asks(intent.draft, algorithm.value)
    runners = _planned(intent, main, second)
    plans = _plan_set(intent, algorithm, runners, second, caps)
    configs = {Role.TARGET.value: first.reading.report}
    if second is not None:
        configs[Role.DRAFT.value] = giver.reading.report if giver is not first else _said_once(first.reading.report)
    return Resolved(
        plans=plans,
        target=runners[0],
        draft=runners[1] if second is not None else None,
        configs=MappingProxyType(configs),
        plugins=tuple(plugins),
    )


def _undoing(
    intent: EngineConfig, algorithm: Algorithm, caps: DeviceCaps, rollbacks: Mapping[str, RollbackCosts]
) -> Undoing:
    length = None
    if algorithm is not Algorithm.NONE:
        length = speculative.num_draft_tokens(intent.speculative.num_draft_tokens, algorithm)
    return Undoing(
        draft_tokens=0 if length is None else length.value,
        max_num_seqs=schedule.max_num_seqs(intent.schedule.max_num_seqs).value,
        threads=host.threads(intent.host.threads, Facts(CapsFacts(caps))).value,
        costs=rollbacks,
    )


def _said_once(report: ConfigReport) -> ConfigReport:
    """Of a config that two runners share, for the second one."""
    return replace(report, unknown=MappingProxyType({}), notes=())


def _decided(
    intent: EngineConfig,
    role: Role,
    source: _Source,
    host: _Host,
    *,
    bundle: drafts.Bundle | None,
    peer: TargetFacts | None,
) -> _Runner:
    """`bundle`: the runner is that draft of the source; None: it is the source's own model."""
    reading = source.reading
    spec = reading.spec if bundle is None else bundle.spec.decoder
    context = RunnerContext(
        role=role,
        intent=intent.target if role is Role.TARGET else intent.draft,
        checkpoint=source.checkpoint,
        family=reading.family,
        spec=spec,
        draft=None if bundle is None else bundle.spec,
        weights=reading.weights if bundle is None else bundle.weights,
        found=find(spec, reading.weights, source.stored) if bundle is None else bundle.found,
        quant=reading.quant,
        caps=host.caps,
        parallel=intent.parallel,
        prefill_chunk=intent.schedule.prefill_chunk.value or schedule.PREFILL_CHUNK,
        plugins=host.plugins,
        undoing=host.undoing,
        peer=peer,
    )
    return _Runner(source=source, context=context, plan=decide(context))


def _decided_draft(
    intent: EngineConfig, source: _Source, host: _Host, bundle: drafts.Bundle | None, peer: TargetFacts
) -> _Runner:
    try:
        return _decided(intent, Role.DRAFT, source, host, bundle=bundle, peer=peer)
    except KernelUnavailable as error:
        facts = (*error.facts, "The target is unaffected.")
        raise KernelUnavailable(error.slug, error.message, role=error.role, facts=facts, hint=error.hint) from error


def _planned(intent: EngineConfig, main: _Runner, second: _Runner | None) -> tuple[Planned, ...]:
    """Every runner with its name map. Of a checkpoint that both share, each map leaves the other's tensors to it."""
    allowed = intent.load.allow_unexpected.value or ()
    bundled = None if second is None or second.context.draft is None else second.context.draft.algorithm
    shared = second is not None and bundled is not None and second.source is main.source
    why = "not asked for" if bundled is None else "taken from another checkpoint"
    target = main.source.names([*main.rules, *main.source.left_out(why, but=bundled if shared else None)])
    if second is None:
        return (planned(main.context, main.plan, target, allowed),)
    if shared:
        draft = second.source.names(second.rules)
        target, draft = target.beside(draft), draft.beside(target)
    else:
        rules = [*second.rules, *second.source.left_out("not asked for", but=bundled)]
        if bundled is not None:
            rules += _own_layers(second.source)
        draft = second.source.names(rules)
    first, other = (
        planned(main.context, main.plan, target, allowed),
        planned(second.context, second.plan, draft, allowed),
    )
    if bundled is not None:
        other = replace(other, lender=Lender(checkpoint=first.checkpoint, names=first.names))
    return first, other


def _own_layers(source: _Source) -> list[WeightRule]:
    """Rules that leave out a checkpoint's own model, where only the draft in it is taken."""
    reading = source.reading
    found = find(reading.spec, reading.weights, source.stored)
    return list(drafts.left_out(reading.spec, reading.weights, found, OWN_LAYERS))


def _plan_set(
    intent: EngineConfig,
    algorithm: Decision[Algorithm],
    runners: Sequence[Planned],
    second: _Runner | None,
    caps: DeviceCaps,
) -> PlanSet:
    length = None
    if algorithm.value is not Algorithm.NONE:
        length = speculative.num_draft_tokens(intent.speculative.num_draft_tokens, algorithm.value)
    limits, pages = _limits(intent, runners, 0 if length is None else length.value, caps)
    contract = None if length is None else _contract(intent, length, limits, runners, second)
    threads = host.threads(intent.host.threads, Facts(CapsFacts(caps)))
    covered = {
        "runners": [one.plan.digest for one in runners],
        "speculative": stable(algorithm),
        "contract": contract and _covered(contract),
        "schedule": [stable(getattr(limits, limit.name)) for limit in fields(limits)],
        "threads": stable(threads),
    }
    return PlanSet(
        target=runners[0].plan,
        draft=None if second is None else second.plan,
        speculative=algorithm,
        contract=contract,
        memory=pages,
        schedule=limits,
        host=HostPlan(threads=threads),
        digest=digest_of(covered),
    )


def _covered(contract: DraftContract) -> list[object]:
    """What of a contract its plan's digest covers."""
    decisions = [stable(contract.num_draft_tokens), stable(contract.verification)]
    taps = [[tap.point.value, tap.width] for tap in contract.taps]
    return [*decisions, contract.draft_vocab, taps, plain(contract.borrows)]


def _limits(
    intent: EngineConfig, runners: Sequence[Planned], draft_tokens: int, caps: DeviceCaps
) -> tuple[SchedulePlan, MemoryPlan]:
    """The schedule and the pages, which bound each other: the pages follow from the wanted length, and cap it."""
    target, ask = runners[0], intent.schedule
    seqs = schedule.max_num_seqs(ask.max_num_seqs)
    alignment = schedule.prefill_alignment({"engine.linear_layers": sum(len(one.spec.delta_layers) for one in runners)})
    length = schedule.max_model_len(ask.max_model_len, {"spec.max_positions": target.spec.max_positions})
    sizes = [runner_size(one, draft_tokens=draft_tokens) for one in runners]
    facts = memory_facts(caps, target.plan.device.value)
    waits = any(one.spec.entry is not None for one in runners)
    hidden = target.plan.dtype.value.nbytes(target.spec.hidden) if waits else 0
    seqs, pages = memory(intent.cache, sizes, seqs, length.value, hidden, facts)
    capacity = pages.target_pages.value * target.plan.page_size.value
    reuse = {
        "target.numerics": target.plan.numerics.value,
        "target.linear_layers": len(target.spec.delta_layers),
        "asked.snapshots": intent.cache.snapshots.value,
    }
    limits = SchedulePlan(
        max_num_seqs=seqs,
        max_model_len=schedule.within_pages(length, capacity, pages.target_pages),
        prefill_chunk=schedule.prefill_chunk(ask.prefill_chunk, alignment.value),
        prefill_alignment=alignment,
        prefix_cache=schedule.prefix_cache(intent.cache.prefix_cache, reuse),
    )
    return limits, pages


def _contract(
    intent: EngineConfig,
    length: Decision[int],
    limits: SchedulePlan,
    runners: Sequence[Planned],
    second: _Runner | None,
) -> DraftContract:
    verification = speculative.verification(intent.speculative.verification)
    if second is None:
        return pair.ngram_contract(length, verification)
    target, draft = runners
    peer, reach = target_facts(target.spec), limits.max_model_len.value
    if second.context.draft is not None:
        own = second.source.reading.spec
        return pair.bundled_contract(second.context.draft, own, peer, reach, length, verification)
    facts = pair.pair_facts(peer, target.checkpoint, draft.checkpoint, draft.spec, reach)
    return pair.standalone_contract(facts, length, verification)
