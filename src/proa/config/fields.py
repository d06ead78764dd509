"""The one table of settings: name, leaf, kind, help. Owns every spelling; flags, environment names, TOML keys, Python
names, the documentation and the flag freeze are all generated from it. Owns no values and no precedence.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum

from proa.config.kinds import GLOBS, PATH, SIZE, Kind, count, members, word, words
from proa.units import Algorithm, DType, Numerics, Phase, Role, Rollback, SharedExperts, Switch, Verification


class Scope(Enum):
    """RUNNER: a leaf of each runner, with a role's name in front for one of them. ENGINE: one leaf for all.

    DRAFT: a leaf of the draft alone.
    """

    RUNNER = "runner"
    ENGINE = "engine"
    DRAFT = "draft"


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One setting. `name` is its TOML spelling (`attention.decode`), from which the other spellings follow.

    `leaves` are attributes of RunnerIntent, or attribute paths in EngineConfig for ENGINE; a base setting has
    several. `also` are further TOML spellings.
    """

    name: str
    scope: Scope
    leaves: tuple[str, ...]
    kind: Kind
    help: str
    also: tuple[str, ...] = ()
    is_repeatable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A setting as it can be asked for: a field, for one runner or (role None) for all that have it."""

    field: Field
    role: Role | None

    @property
    def dotted(self) -> str:
        """The TOML spelling: `draft.attention.decode`."""
        return _with_role(self.field.name, self.role)

    @property
    def spellings(self) -> tuple[str, ...]:
        """Every TOML spelling, the documented one first."""
        return (self.dotted, *(_with_role(name, self.role) for name in self.field.also))

    @property
    def leaves(self) -> tuple[str, ...]:
        """The leaves of EngineConfig that this key sets, as attribute paths."""
        match self.field.scope:
            case Scope.ENGINE:
                return self.field.leaves
            case Scope.DRAFT:
                roles = (Role.DRAFT,)
            case Scope.RUNNER:
                roles = tuple(Role) if self.role is None else (self.role,)
        return tuple(f"{role.value}.{leaf}" for role in roles for leaf in self.field.leaves)

    @property
    def specificity(self) -> tuple[bool, bool]:
        """Within one source the greater wins: naming the runner counts more than naming the phase."""
        return (self.role is not None, len(self.field.leaves) == 1)


def _with_role(name: str, role: Role | None) -> str:
    return name if role is None else f"{role.value}.{name}"


def flag_name(spelling: str) -> str:
    return "--" + spelling.replace("_", "-")


def variable_name(spelling: str) -> str:
    return "PROA_" + spelling.replace(".", "__").upper()


def python_name(spelling: str) -> str:
    return spelling.replace(".", "_")


def _runner(name: str, kind: Kind, text: str) -> Field:
    return Field(name=name, scope=Scope.RUNNER, leaves=(name,), kind=kind, help=text)


def _phased(name: str, text: str) -> tuple[Field, ...]:
    """A base setting and its three phases."""
    leaves = {phase: f"{name}_{phase.value}" for phase in Phase}
    base = Field(
        name=name,
        scope=Scope.RUNNER,
        leaves=tuple(leaves.values()),
        kind=word("KERNEL"),
        help=f"{text}, all phases",
        also=(f"{name}.base",),
    )
    return base, *(
        Field(
            name=f"{name}.{phase.value}",
            scope=Scope.RUNNER,
            leaves=(leaf,),
            kind=word("KERNEL"),
            help=f"{text}, {phase.value} only",
        )
        for phase, leaf in leaves.items()
    )


def _engine(name: str, leaf: str, kind: Kind, text: str) -> Field:
    return Field(name=name, scope=Scope.ENGINE, leaves=(leaf,), kind=kind, help=text)


FIELDS: tuple[Field, ...] = (
    Field(
        name="draft.path",
        scope=Scope.DRAFT,
        leaves=("path",),
        kind=PATH,
        help="the draft checkpoint; not needed where the target bundles one",
        also=("draft",),
    ),
    _engine("speculative", "speculative.algorithm", members(*Algorithm), "how proposals are made"),
    _engine(
        "num_draft_tokens",
        "speculative.num_draft_tokens",
        count(0, 1024),
        "longest proposal per step; auto lets the engine choose, 0 included",
    ),
    _engine(
        "verification",
        "speculative.verification",
        members(*Verification),
        "coupled: token for token equal to plain decoding; rejection: highest acceptance, equal in distribution",
    ),
    _runner("device", words("cpu", "cuda", "meta"), "where to run"),
    _runner("dtype", members(DType.F32, DType.BF16), "compute type"),
    _runner("quantization", word("FORMAT"), "weight format to run in, where the stored one allows a choice; or none"),
    _runner("kv_dtype", members(DType.F32, DType.BF16), "element type of the KV cache"),
    _runner(
        "numerics",
        members(*Numerics),
        "exact: a row's result depends on nothing else in the batch; fast: it may, in the last bits",
    ),
    *_phased("attention", "softmax-attention kernel"),
    *_phased("linear_attention", "linear-attention kernel"),
    _runner(
        "state_dtype", members(DType.F32, DType.BF16), "element type of the states of linear attention; kernels differ"
    ),
    _runner(
        "rollback",
        members(*Rollback),
        "a rejected proposal's state: replay the accepted rows, or keep the states of all rows",
    ),
    _runner("matmul_kernel", word("KERNEL"), "matrix-multiplication kernel"),
    _runner("moe_kernel", word("KERNEL"), "experts kernel"),
    _runner("sampling_kernel", word("KERNEL"), "kernel that draws tokens from logits"),
    _runner("shared_experts", members(*SharedExperts), "layout of the shared experts"),
    _runner("page_size", count(1, 65536), "rows per cache page"),
    _engine("kv_memory", "cache.memory_bytes", SIZE, "memory for the KV pages of both runners together"),
    _engine(
        "prefix_cache",
        "cache.prefix_cache",
        members(*Switch),
        "on: what a prompt has in common with earlier ones is not computed again",
    ),
    _engine("snapshots", "cache.snapshots", count(0, 65536), "states of linear attention kept for prefix reuse"),
    _engine(
        "max_model_len", "schedule.max_model_len", count(1, 2**31), "longest prompt and answer together, in tokens"
    ),
    _engine("max_num_seqs", "schedule.max_num_seqs", count(1, 65536), "most sequences in one step"),
    _engine("prefill_chunk", "schedule.prefill_chunk", count(1, 2**31), "prompt tokens per step, over all requests"),
    _engine("threads", "host.threads", count(1, 4096), "CPU threads"),
    _engine("tensor_parallel", "parallel.tensor_parallel", count(1, 4096), "ranks that share each layer"),
    _engine("expert_parallel", "parallel.expert_parallel", count(1, 4096), "ranks that share the experts"),
    Field(
        name="allow_unexpected",
        scope=Scope.ENGINE,
        leaves=("load.allow_unexpected",),
        kind=GLOBS,
        help="tensors that match are left out on purpose instead of being an error",
        is_repeatable=True,
    ),
)

KEYS: tuple[Key, ...] = tuple(
    Key(field=field, role=role)
    for field in FIELDS
    for role in ((None, *Role) if field.scope is Scope.RUNNER else (None,))
)


def _letters(name: str) -> str:
    """A name without case and separators, which is where most slips are."""
    return re.sub(r"[-_.]", "", name).lower()


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """A hint for a name that is not among `candidates`: what was probably meant, or None."""
    known = tuple(candidates)
    for candidate in known:
        if _letters(candidate) == _letters(name):
            return f"did you mean {candidate}?"
    for_all = re.sub(r"(draft|target)(\.|__|_)", "", name, count=1, flags=re.IGNORECASE)
    if for_all != name and for_all in known:
        return f"{for_all} is a setting of the whole engine, not of one runner"
    close = get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else None
