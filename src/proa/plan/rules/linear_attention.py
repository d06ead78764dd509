"""Linear attention: its kernel in each phase, and the type of its states.

Precedence within a phase: what was asked for the phase, then the runner's own default (kernels/delta_catalog.py), then
what was asked for all phases, then the best kernel that can run. A verify follows decode unless it was asked for: both
work row by row, and only one kernel gives the same bits in both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from proa.choice import AUTO, Choice
from proa.conditions import Blocked, Blocks, Condition, Facts, FactView, Source
from proa.kernels.catalog import kernels_for
from proa.kernels.delta_catalog import DEFAULTS, DELTA, DELTA_OPS
from proa.kernels.kernel_info import KernelInfo, phase_op
from proa.kernels.plugins import KernelPlugin
from proa.plan.context import RunnerContext
from proa.plan.decision import Decision, Note
from proa.plan.rules import absent
from proa.plan.rules.settle import Knob, Option, settle, spelled
from proa.plan.runner_plan import LinearAttentionPlan
from proa.units import DType, Phase


def linear_attention(ctx: RunnerContext, facts: Facts) -> LinearAttentionPlan:
    if not ctx.spec.delta_layers:
        return absent.linear_attention(ctx, facts)
    ask = ctx.intent
    prefill, decode = (
        _phase(_Question.of(ctx, phase, one), facts)
        for phase, one in (
            (Phase.PREFILL, ask.linear_attention_prefill),
            (Phase.DECODE, ask.linear_attention_decode),
        )
    )
    verify = _verify(_Question.of(ctx, Phase.VERIFY, ask.linear_attention_verify), facts, decode)
    return LinearAttentionPlan(prefill=prefill, decode=decode, verify=verify)


def delta_kernels(plugins: Iterable[KernelPlugin]) -> tuple[KernelInfo, ...]:
    """Every kernel of linear attention, preferred ones first within a phase; those of other packages before our own."""
    added = sorted((kernel for plugin in plugins for kernel in plugin.kernels), key=lambda kernel: kernel.rank)
    return (*added, *(kernel for op in DELTA_OPS for kernel in kernels_for(op)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    """Which kernel runs one phase. `has` says, of every kernel, in which phases there is one."""

    phase: Phase
    knob: Knob[str]
    options: tuple[Option[str], ...]
    has: Mapping[str, tuple[str, ...]]

    @classmethod
    def of(cls, ctx: RunnerContext, phase: Phase, ask: Choice[str]) -> _Question:
        kernels = delta_kernels(ctx.plugins)
        has: dict[str, tuple[str, ...]] = {}
        for kernel in kernels:
            has[kernel.backend] = (*has.get(kernel.backend, ()), kernel.op.removeprefix(f"{DELTA}."))
        return cls(
            phase=phase,
            knob=Knob(name=f"linear_attention.{phase.value}", role=ctx.role, ask=ask, is_capability=True),
            options=tuple(_option(kernel) for kernel in kernels if kernel.op == phase_op(DELTA, phase)),
            has=has,
        )

    @property
    def ask(self) -> Choice[str]:
        return self.knob.ask

    @property
    def is_base(self) -> bool:
        """A kernel was asked for all phases at once."""
        return self.ask.value is not None and self.ask.origin.is_base

    @property
    def lacks_base(self) -> bool:
        """Such a kernel that other phases have and this one has not: then nothing was asked of this one."""
        return self.is_base and not self.base_has(self.phase)

    def base_has(self, phase: Phase) -> bool:
        """Nobody's kernel is taken for one of every phase, so that it is refused."""
        return phase.value in self.has.get(self.ask.value or "", (phase.value,))

    def asked(self, facts: Facts) -> Decision[str]:
        """The kernel that was asked for. Raises KernelUnavailable or PlanError, with those that can run."""
        return settle(self.knob, facts, self.options, asked=self._of_other_phases())

    def auto(self, facts: Facts, options: Sequence[Option[str]], why: str = "") -> Decision[str]:
        """The first that can run. `why` it goes before what was asked for all phases, where something was."""
        decision = settle(replace(self.knob, ask=AUTO), facts, options)
        notes = decision.notes
        if self.is_base and decision.value != self.ask.value:
            said = f"{self.ask.value} was asked for all phases{spelled(self.ask)}: "
            said += f"it has no {self.phase.value} kernel" if self.lacks_base else why
            notes = (*notes, Note(condition=f"{self.knob.name}.base", reason=said))
        return replace(decision, requested=self.ask, notes=notes)

    def _of_other_phases(self) -> Option[str] | None:
        phases = self.has.get(self.ask.value or "")
        if phases is None:
            return None
        reason = f"{self.ask.value} has no {self.phase.value} kernel, only {' and '.join(phases)}"

        def check(_: FactView) -> Blocked:
            return Blocked(reason, Source.CONSTRAINT)

        lacking = Condition(id=f"kernel.{self.ask.value}.phase", reads=(), blocks=Blocks.ALWAYS, check=check)
        return Option(value=self.ask.value or "", rule="", reason="", source=Source.ASKED, requires=(lacking,))


def _option(kernel: KernelInfo) -> Option[str]:
    rule = f"kernel.{kernel.backend}"
    reason = "best kernel that can run"
    return Option(value=kernel.backend, rule=rule, reason=reason, source=Source.DEFAULT, requires=kernel.requires)


def _phase(question: _Question, facts: Facts) -> Decision[str]:
    if not question.ask.is_auto and not question.is_base:
        return question.asked(facts)
    first = _defaults(question, facts)
    if not question.is_base or question.lacks_base:
        return question.auto(facts, (*first, *question.options))
    if not first:
        return question.asked(facts)
    return _default_before_base(question, facts, first)


def _defaults(question: _Question, facts: Facts) -> tuple[Option[str], ...]:
    """The runner's own default of this phase: only of models that have one, on the device that it is for."""
    kinds, device = facts["spec.delta_kinds"], facts["plan.device"]
    wanted = [d for d in DEFAULTS if (d.phase, [d.kind], d.device) == (question.phase, kinds, device)]
    return tuple(
        replace(
            option,
            rule=f"{question.knob.name}.default.{default.backend}",
            reason=f"the default of runners with {default.kind} layers on this device",
            reads=("spec.delta_kinds", "plan.device"),
        )
        for default in wanted
        for option in question.options
        if option.value == default.backend
    )


def _default_before_base(question: _Question, facts: Facts, first: Sequence[Option[str]]) -> Decision[str]:
    nothing = Option(value="", rule="", reason="", source=Source.DEFAULT)
    tried = question.auto(facts, (*first, nothing), "a runner's own default of a phase goes before it")
    if tried.value:
        return tried
    asked = question.asked(facts)
    inputs, checked = {**tried.inputs, **asked.inputs}, (*tried.checked, *asked.checked)
    return replace(asked, inputs=inputs, rejected=tried.rejected, checked=checked)


def _verify(question: _Question, facts: Facts, decode: Decision[str]) -> Decision[str]:
    if question.is_base:
        is_asked = not question.lacks_base and (
            question.ask.value == decode.value or not question.base_has(Phase.DECODE)
        )
    else:
        is_asked = not question.ask.is_auto
    if is_asked:
        return question.asked(facts)
    options = sorted(question.options, key=lambda option: option.value != decode.value)
    decision = question.auto(facts, options, "a verify follows decode")
    if decision.value != decode.value:
        return decision
    return replace(decision, rule=f"{question.knob.name}.follows_decode", reason="follows decode")


def mixed_phases(plan: LinearAttentionPlan) -> list[str]:
    """Phases that run on another kernel than decode: the same row may get other bits there."""
    leaves = {Phase.PREFILL: plan.prefill, Phase.VERIFY: plan.verify}
    return [phase_op(DELTA, phase) for phase, leaf in leaves.items() if leaf.value != plan.decode.value]


# States


def state_dtype(ctx: RunnerContext, facts: Facts) -> Decision[DType] | Decision[None]:
    """float32 unless asked otherwise: a state is a sum over all rows so far."""
    ask = ctx.intent.state_dtype
    if not ctx.spec.delta_layers:
        return absent.without_states(ctx, facts, "state_dtype", ask)
    why = {DType.F32: "a state sums over every row so far", DType.BF16: "half the memory"}
    options = tuple(
        Option(value=value, rule="state_dtype.float32", reason=reason, source=Source.DEFAULT)
        for value, reason in why.items()
    )
    return settle(Knob(name="state_dtype", role=ctx.role, ask=ask), facts, options)
