"""The frozen plans: one runner's decisions, the contract between two runners, memory and host. Owns no rules.

After resolve() nobody reads intent, environment or another runner's plan: what runs is what stands here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from proa.arch.decoder import Borrow, HiddenTap
from proa.arch.layout import WeightLayout
from proa.plan.decision import Decision, Note
from proa.units import Algorithm, DType, Numerics, Role, Rollback, Switch, Verification


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePlan:
    """One op's kernel per phase. The value is the backend name that really runs, None where the op does not occur."""

    prefill: Decision[str | None]
    decode: Decision[str | None]
    verify: Decision[str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttentionPlan(PhasePlan):
    """The kernels of linear attention. A layer of it is built from this, and runs what stands here, nothing else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerPlan:
    """Every decision of one runner. `digest` is a stable hash of all of it: equal digests mean nothing leaked.

    `family` names the algorithm of a bundled draft too (`glm4_moe/nextn`). `device` is a torch device string ("cpu",
    "cuda", "meta"). `shared_experts` has one value, or one per group of layers (`{"1..3": FUSED, "4": SEPARATE}`).
    `page_size` counts rows per cache page. `state_dtype` is that of the delta state (convolution states have the
    compute type), `rollback` how a rejected proposal's is undone; both are None without linear attention.
    """

    role: Role
    family: str
    checkpoint: str
    num_layers: int
    device: Decision[str]
    dtype: Decision[DType]
    kv_dtype: Decision[DType]
    quantization: Decision[str]
    attention: PhasePlan
    linear_attention: LinearAttentionPlan
    state_dtype: Decision[DType | None]
    rollback: Decision[Rollback | None]
    matmul_kernel: Decision[str]
    moe_kernel: Decision[str | None]
    sampling_kernel: Decision[str]
    shared_experts: Decision[Any]
    numerics: Decision[Numerics]
    parallel: Decision[str]
    page_size: Decision[int]
    head: Decision[str]
    layout: WeightLayout
    digest: str

    def decisions(self) -> dict[str, Decision[Any]]:
        """Every leaf by its knob, in the order in which explain prints them."""
        leaves: list[Decision[Any]] = []
        for part in (self.device, self.dtype, self.quantization, self.kv_dtype, self.numerics, self.attention,
                     self.linear_attention, self.state_dtype, self.rollback, self.matmul_kernel, self.moe_kernel,
                     self.sampling_kernel, self.shared_experts, self.parallel, self.page_size, self.head):  # fmt: skip
            leaves += [part] if isinstance(part, Decision) else [part.prefill, part.decode, part.verify]
        return {leaf.knob: leaf for leaf in leaves}


@dataclass(frozen=True, slots=True, kw_only=True)
class PairVerdict:
    """One condition of the pair check. `reason` is None when it holds."""

    condition: str
    reason: str | None
    inputs: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class PairCheck:
    verdicts: tuple[PairVerdict, ...]
    notes: tuple[Note, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftContract:
    """The only object that both runners share, and everything one may know of the other.

    `num_draft_tokens` is the longest proposal per step; `measures_length`: each step's length, 0 included, follows from
    measured costs and acceptance, else it is that number. `draft_vocab` is how many logits of the draft are meaningful
    to the target (both vocabularies agree id by id up to there); None for a drafter without a runner. `max_positions`
    is how many positions the draft was trained for: nothing is proposed beyond them; None where there is no such limit.
    `taps` are the hidden rows that the target gives its drafter, `borrows` the modules that the draft takes from it.
    """

    algorithm: Algorithm
    num_draft_tokens: Decision[int]
    measures_length: bool
    verification: Decision[Verification]
    draft_vocab: int | None
    checks: PairCheck
    max_positions: int | None = None
    taps: tuple[HiddenTap, ...] = ()
    borrows: tuple[Borrow, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Pages of each runner's pool (0 without a draft runner), slots for states that do not grow, and their bytes.

    By role: `state_slots` are for running requests, `snapshot_slots` for states that later requests may begin from;
    both are 0 without linear attention. `kept_rows` are inputs of verified rows, kept to be applied again. Of
    `weights_bytes`, a step of one row reads `step_bytes`.
    `hidden_bytes` is the most that hidden rows of the target can take which wait for a draft that lives on them.
    """

    target_pages: Decision[int]
    draft_pages: Decision[int]
    state_slots: Mapping[str, Decision[int]]
    snapshot_slots: Mapping[str, Decision[int]]
    kept_rows: Mapping[str, int]
    page_bytes: Mapping[str, int]
    state_bytes: Mapping[str, int]
    weights_bytes: Mapping[str, int]
    hidden_bytes: int
    step_bytes: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulePlan:
    """Limits of one step. `prefill_chunk` counts prompt tokens per step, over all requests. A chunk of a prompt ends at
    an absolute multiple of `prefill_alignment` tokens, or at the prompt's end. `prefix_cache`: what a prompt has in
    common with earlier ones is not computed again."""

    max_num_seqs: Decision[int]
    max_model_len: Decision[int]
    prefill_chunk: Decision[int]
    prefill_alignment: Decision[int]
    prefix_cache: Decision[Switch]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPlan:
    threads: Decision[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSet:
    """All that will happen. `contract` is None when nothing proposes; `speculative` says why.

    `digest` covers everything but what rests on measured facts (memory that happens to be free).
    """

    target: RunnerPlan
    draft: RunnerPlan | None
    speculative: Decision[Algorithm]
    contract: DraftContract | None
    memory: MemoryPlan
    schedule: SchedulePlan
    host: HostPlan
    digest: str
