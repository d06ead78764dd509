"""The account of one runner's weights: every stored tensor in one state, every parameter element filled exactly once.

Owns the states and the proof; reads no tensor data. `inspect` uses it with headers only, loading to the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from proa.arch.weights import Claim, LeftOut, Place, Tied, Unknown, as_template
from proa.checkpoint.types import Checkpoint, TensorInfo
from proa.errors import WeightError
from proa.loading.findings import Finding, Wrong, describe_tensor, nearest, weight_error
from proa.loading.storage import expected_dtypes
from proa.plan.planned import Planned


class TensorState(Enum):
    """Where a stored tensor ended. The values are the keys of the ledger's JSON."""

    PLACED = "placed"
    FUSED = "fused"
    BORROWED = "borrowed"
    TIED = "tied"
    LEFT_OUT = "left_out"
    UNEXPECTED = "unexpected"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One stored tensor and what the weight rules say about it."""

    info: TensorInfo
    claim: Claim
    state: TensorState


class LoadLedger:
    """Mutable until `close()`; after that it only answers.

    Headers first: `findings()` is complete before any data is read. Then `fill` and `compare` record what loading did,
    and `close` proves that nothing was left, forgotten or written twice.
    """

    def __init__(self, planned: Planned) -> None:
        self._plan = planned.plan
        self.role = planned.plan.role.value
        self.checkpoint: Path = planned.checkpoint.path
        self._parameters = dict(planned.parameters)
        self._expected = planned.names.expected()
        self.entries: dict[str, Entry] = {}
        for info in planned.checkpoint.tensors.values():
            claim = planned.names.claim(info.name)
            self.entries[info.name] = Entry(info=info, claim=claim, state=_state(claim))
        self._dtypes = expected_dtypes(planned.checkpoint)
        self._filled: dict[str, list[tuple[int, int]]] = {name: [] for name in self._parameters}
        self._compared: set[str] = set()
        self.blocks = frozenset(name for name, _ in planned.plan.layout.blocks)
        self.is_closed = False

    # From headers

    def findings(self) -> list[Finding]:
        """Everything that does not fit, from headers alone."""
        return [*self._wrong_entries(), *self._missing()]

    def refuse_findings(self) -> None:
        """Raises one WeightError that names every tensor (by template) of every finding."""
        if findings := self.findings():
            raise weight_error(findings, self._plan)

    def _wrong_entries(self) -> Iterable[Finding]:
        for name, entry in self.entries.items():
            claim, what = entry.claim, describe_tensor(entry.info)
            match claim:
                case Unknown():
                    yield Finding(wrong=Wrong.UNCLAIMED, name=name, what=what, near=claim.nearest)
                case Place() | Tied() if claim.shape is not None and entry.info.shape != claim.shape:
                    what += f", expected {list(claim.shape)}"
                    yield Finding(wrong=Wrong.SHAPE, name=name, what=what)
                case Place() | Tied() if entry.info.dtype not in self._dtypes[name]:
                    what += f", expected {' or '.join(dtype.name for dtype in self._dtypes[name])}"
                    yield Finding(wrong=Wrong.DTYPE, name=name, what=what)
                case _:
                    pass

    def _missing(self) -> Iterable[Finding]:
        siblings: dict[str, list[str]] = {}
        for name, entry in self.entries.items():
            if entry.state is TensorState.UNEXPECTED:
                siblings.setdefault(name.rpartition(".")[0].rpartition(".")[0], []).append(name)
        for name, place in self._expected.items():
            if name not in self.entries:
                rows = f" rows {place.rows[0]}..{place.rows[1]}" if place.rows else ""
                what = f"{list(place.shape or ())}, fills {place.parameter}{rows}"
                yield Finding(wrong=Wrong.MISSING, name=name, what=what, near=nearest(name, siblings))

    # From loading

    def fill(self, name: str) -> None:
        """The tensor's elements have been written to its place, once more."""
        claim = self.entries[name].claim
        if self.is_closed or not isinstance(claim, Place):
            raise RuntimeError(f"{name} is not to be filled now")
        self._filled[claim.parameter].append(claim.rows or (0, self._parameters[claim.parameter].shape[0]))

    def compare(self, name: str, first_difference: int | None) -> None:
        """The stored copy `name` has been compared with the parameter it is tied to; rows differ from
        `first_difference` on, None when it is equal. Raises WeightError naming both."""
        claim = self.entries[name].claim
        if self.is_closed or not isinstance(claim, Tied):
            raise RuntimeError(f"{name} is not to be compared now")
        if first_difference is not None:
            sources = [source for source, place in self._expected.items() if place.parameter == claim.parameter]
            raise WeightError(
                "weights/tied-differs",
                f"{name} should be the same matrix as {', '.join(sources)} and differs from row {first_difference} on.",
                role=self.role,
                facts=(f"{self.role} plan: head = {self._plan.head.value} ({self._plan.head.reason})",),
                hint="if the two are meant to differ, set tie_word_embeddings to false in config.json",
            )
        self._compared.add(name)

    def close(self) -> None:
        """Prove the account. Raises WeightError `weights/ledger` naming the parameter or tensor that is not settled."""
        self.refuse_findings()
        wrong = [f"{name}: {state}" for name in self._parameters if (state := self.parameter_state(name)) != "filled"]
        wrong += [
            f"{name}: never compared with {entry.claim.parameter}"
            for name, entry in self.entries.items()
            if isinstance(entry.claim, Tied) and name not in self._compared
        ]
        if wrong:
            raise WeightError("weights/ledger", "loading left the ledger open.", role=self.role, facts=wrong)
        self.is_closed = True

    def parameter_state(self, name: str) -> str:
        """`filled` when each row was written exactly once, `missing` when some was not, `twice` when some was more
        than once."""
        at, rows = 0, self._parameters[name].shape[0]
        for start, stop in sorted(self._filled[name]):
            if start < at:
                return "twice"
            if start > at:
                return "missing"
            at = stop
        return "filled" if at == rows else "missing"

    # Answers

    def as_json(self) -> dict[str, Any]:
        """The runner's part of interfaces.md's ledger. Before loading, a parameter counts as filled where headers say
        that it will be."""
        states = Counter(entry.state for entry in self.entries.values())
        parameters = self._parameter_states()
        counts = Counter(parameters.values())
        return {
            "tensors": {"total": len(self.entries), **{state.value: states[state] for state in TensorState}},
            "parameters": {
                "total": len(parameters),
                **{key: counts[key] for key in ("filled", "tied", "borrowed", "computed", "missing", "twice")},
            },
            "unexpected": [name for name, entry in self.entries.items() if entry.state is TensorState.UNEXPECTED],
            "missing": [name for name, state in parameters.items() if state == "missing"],
            "left_out": self._left_out(),
            "groups": self._groups(),
        }

    def _parameter_states(self) -> dict[str, str]:
        if self.is_closed:
            return dict.fromkeys(self._parameters, "filled")
        holes = {place.parameter for name, place in self._expected.items() if name not in self.entries}
        return {name: "missing" if name in holes else "filled" for name in self._parameters}

    def _left_out(self) -> list[dict[str, Any]]:
        claims = [entry.claim for entry in self.entries.values()]
        counts = Counter((claim.template, claim.reason) for claim in claims if isinstance(claim, LeftOut))
        return [{"pattern": template, "count": count, "reason": why} for (template, why), count in counts.items()]

    def _groups(self) -> list[dict[str, Any]]:
        """One line per template, stored type and shape."""
        groups: dict[tuple[Any, ...], int] = {}
        for entry in self.entries.values():
            match entry.claim:
                case Place(parameter=parameter, template=template) | Tied(parameter=parameter, template=template):
                    parameter = as_template(parameter)[0]
                case LeftOut(template=template):
                    parameter = None
                case Unknown():
                    template, parameter = as_template(entry.info.name)[0], None
            key = (template, entry.state.value, parameter, entry.info.dtype.name, entry.info.shape)
            groups[key] = groups.get(key, 0) + 1
        return [
            {"template": template, "count": count, "action": action, "parameter": parameter, "dtype": dtype,
             "shape": list(shape)}
            for (template, action, parameter, dtype, shape), count in groups.items()
        ]  # fmt: skip


def unclaimed(ledgers: Iterable[LoadLedger]) -> list[str]:
    """Tensors that none of the ledgers over their checkpoint accounts for: the union must cover every file, also where
    target and draft share one."""
    claimed: dict[tuple[Path, str], bool] = {}
    for ledger in ledgers:
        for name, entry in ledger.entries.items():
            key = (ledger.checkpoint, name)
            claimed[key] = claimed.get(key, False) or entry.state is not TensorState.UNEXPECTED
    return sorted(name for (_, name), is_claimed in claimed.items() if not is_claimed)


def ledger_document(ledgers: Mapping[str, LoadLedger], checkpoints: Iterable[Checkpoint]) -> dict[str, Any]:
    """interfaces.md's JSON of all runners (by role). `files` counts a checkpoint that two runners share once."""
    files = list({checkpoint.path: checkpoint.files for checkpoint in checkpoints}.values())
    return {
        "runners": {role: ledger.as_json() for role, ledger in ledgers.items()},
        "files": {
            "total_bytes": sum(report.total_bytes for report in files),
            "shards": sum(report.shards for report in files),
            "not_in_index": [name for report in files for name in report.not_in_index],
            "damaged": [name for report in files for name in report.damaged],
        },
        "unclaimed": unclaimed(ledgers.values()),
    }


def _state(claim: Claim) -> TensorState:
    match claim:
        case Place():
            return TensorState.PLACED
        case Tied():
            return TensorState.TIED
        case LeftOut():
            return TensorState.LEFT_OUT
        case Unknown():
            return TensorState.UNEXPECTED
