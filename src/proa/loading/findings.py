"""What is wrong between a checkpoint and a model, grouped and worded. Owns no state: loading/ledger.py finds it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from proa.arch.weights import as_template
from proa.checkpoint.types import TensorInfo
from proa.errors import WeightError
from proa.plan.digest import plain
from proa.plan.runner_plan import RunnerPlan

MAX_GROUPS = 20  # lines per error; the rest is counted


class Wrong(Enum):
    """Kinds of finding, most telling first. The value is what is said of the tensors."""

    SHAPE = "{tensors} of another shape than the model's"
    DTYPE = "{tensors} stored in a type that cannot be theirs"
    INCOMPLETE = "{tensors} missing beside the other parts of a quantised weight"
    UNCLAIMED = "{tensors} without a place in the model"
    MISSING = "{tensors} missing that the model needs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One tensor (`name` as the weight rules know it). `what` describes it, `near` are names that might be meant."""

    wrong: Wrong
    name: str
    what: str
    near: tuple[str, ...] = ()


def describe_tensor(info: TensorInfo) -> str:
    """`F32 [64, 128]`, with the name in the file where that is another one."""
    stored = "" if info.stored_name == info.name else f" ({info.stored_name})"
    return f"{info.dtype.name} {list(info.shape)}{stored} in {info.file.name}"


def weight_error(findings: Sequence[Finding], plan: RunnerPlan) -> WeightError:
    """One error for all findings: a line per template, so that 60 layers with the same fault are one line."""
    kinds = [kind for kind in Wrong if any(finding.wrong is kind for finding in findings)]
    counts = {kind: sum(finding.wrong is kind for finding in findings) for kind in kinds}
    message = ", ".join(kind.value.format(tensors=_tensors(counts[kind])) for kind in kinds)
    groups = _grouped(findings)
    facts = [_line(group) for group in groups[:MAX_GROUPS]]
    if len(groups) > MAX_GROUPS:
        facts.append(f"and {len(groups) - MAX_GROUPS} more groups")
    facts.append(_plan_leaves(plan))
    hint = f"`proa inspect {plan.checkpoint}` lists every tensor and its place"
    if kinds == [Wrong.UNCLAIMED]:
        hint += f"; if truly unused, `--allow-unexpected '{findings[0].name}'` (listed as left out)"
    said, role = f"{plan.family}: {message}.", plan.role.value
    match kinds[0]:
        case Wrong.SHAPE:
            return WeightError("weights/shape", said, role=role, facts=facts, hint=hint)
        case Wrong.DTYPE:
            return WeightError("weights/dtype", said, role=role, facts=facts, hint=hint)
        case Wrong.INCOMPLETE:
            return WeightError("weights/incomplete-group", said, role=role, facts=facts, hint=hint)
        case Wrong.UNCLAIMED:
            return WeightError("weights/unclaimed", said, role=role, facts=facts, hint=hint)
        case Wrong.MISSING:
            return WeightError("weights/missing", said, role=role, facts=facts, hint=hint)


def nearest(name: str, candidates: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Up to two names under the same parent, for a missing tensor that may have been renamed."""
    return tuple(candidates.get(name.rpartition(".")[0].rpartition(".")[0], ())[:2])


def _grouped(findings: Iterable[Finding]) -> list[list[Finding]]:
    groups: dict[tuple[Wrong, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.wrong, as_template(finding.name)[0]), []).append(finding)
    return sorted(groups.values(), key=lambda group: list(Wrong).index(group[0].wrong))


def _line(group: Sequence[Finding]) -> str:
    first = group[0]
    more = f" (and {len(group) - 1} more like it)" if len(group) > 1 else ""
    near = f"; nearest: {', '.join(first.near)}" if first.near else ""
    return f"{first.wrong.name.lower()}: {first.name}  {first.what}{more}{near}"


def _tensors(count: int) -> str:
    return "1 tensor is" if count == 1 else f"{count} tensors are"


def _plan_leaves(plan: RunnerPlan) -> str:
    """The decisions that say which tensors a model has: the first suspects of a mismatch."""
    leaves = (plan.head, plan.shared_experts, plan.quantization)
    said = ", ".join(f"{leaf.knob} = {plain(leaf.value)}" for leaf in leaves if leaf.value is not None)
    return f"{plan.role.value} plan: {said}"
