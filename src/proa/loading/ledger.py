"""The account of one runner's weights: every stored tensor in one state, every parameter element filled exactly once.

Owns the states and the proof; reads no tensor data. `inspect` uses it with headers only, loading to the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from proa.arch.weights import (
    COMPANIONS,
    WEIGHT,
    Borrowed,
    Elsewhere,
    Fill,
    LeftOut,
    Place,
    Tied,
    Unknown,
    as_template,
    member_of,
)
from proa.checkpoint.quant import Form
from proa.checkpoint.types import Checkpoint, TensorInfo
from proa.errors import WeightError
from proa.loading.findings import Finding, Wrong, describe_tensor, nearest, weight_error
from proa.loading.groups import Group, gather, misfits
from proa.loading.storage import PlainTypes
from proa.plan.planned import Planned

_Said = Place | Tied | Borrowed | LeftOut | Unknown
_RUNS = frozenset({Form.PLAIN, Form.FP8_BLOCK})


class TensorState(Enum):
    """Where a stored tensor ended. The values are the keys of the ledger's JSON."""

    __hash__ = object.__hash__  # as units.DType

    PLACED = "placed"
    FUSED = "fused"
    BORROWED = "borrowed"
    TIED = "tied"
    LEFT_OUT = "left_out"
    UNEXPECTED = "unexpected"


class Entry(NamedTuple):
    """One stored tensor and what the weight rules say about it. A tuple: there are 200,000 of them."""

    info: TensorInfo
    claim: _Said
    state: TensorState


class LoadLedger:
    """Mutable until `close()`; after that it only answers.

    Headers first: `findings` is complete before any data is read. Then `fill` and `compare` record what loading did,
    and `close` proves that nothing was left, forgotten or written twice. Tensors of the other runner of a shared
    checkpoint are not in this account, only named in `elsewhere`.
    """

    def __init__(self, planned: Planned) -> None:
        self._plan = planned.plan
        self._names = planned.names
        self._checkpoint = planned.checkpoint
        self._quant = planned.quant
        self._borrows, self._lender = planned.spec.borrows, planned.lender
        self.role = planned.plan.role.value
        self.checkpoint: Path = planned.checkpoint.path
        self._parameters = dict(planned.parameters)
        self._expected = planned.names.expected()
        self.entries: dict[str, Entry] = {}
        self.elsewhere: set[str] = set()
        members: dict[str, dict[str, TensorInfo]] = {}
        for name, info in planned.checkpoint.tensors.items():
            claim = planned.names.claim(name)
            if isinstance(claim, Elsewhere):
                self.elsewhere.add(name)
                continue
            self.entries[name] = Entry(info, claim, _state(claim))
            if isinstance(claim, Place):
                members.setdefault(claim.group, {})[member_of(claim, name)] = info
        self._unplaced = [entry for entry in self.entries.values() if not isinstance(entry.claim, Place)]
        self.groups = {name: Group(place=self._expected[name], members=found) for name, found in members.items()}
        self._filled: dict[str, list[tuple[int, int]]] = {name: [] for name in self._parameters}
        self._compared: set[str] = set()
        self.blocks = frozenset(name for name, _ in planned.plan.layout.blocks)
        self.dtype = planned.plan.dtype.value
        self.is_closed = False

    @property
    def fp8_block(self) -> tuple[int, int] | None:
        """Rows and columns per scale of this checkpoint's block-FP8 weights, None where config.json says nothing."""
        return None if self._quant is None else self._quant.block

    # From headers

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        """Everything that does not fit, from headers alone."""
        return (*self._wrong_entries(), *self._wrong_groups(), *self._missing())

    def refuse_findings(self) -> None:
        """Raises one WeightError that names every tensor (by template) of every finding."""
        if self.findings:
            raise weight_error(self.findings, self._plan)

    def refuse_forms(self) -> None:
        """Raises WeightError for weights in a form that can be accounted for but not run yet."""
        quant = self._quant
        odd = [group for group in self.groups.values() if group.form not in _RUNS]
        if not odd and (quant is None or quant.runs or not self.findings):
            return
        method = "config.json names no method" if quant is None else f"quant_method = {quant.method}"
        facts = [f"{group.place.group}: {group.form.value}" for group in odd[:1]]
        if len(odd) > 1:
            facts.append(f"and {len(odd) - 1} more weights")
        raise WeightError(
            "weights/unsupported-form",
            f"{self._plan.family}: these weights are quantised in a form that Proa does not run yet ({method}).",
            role=self.role,
            facts=facts,
            hint=f"`proa inspect {self.checkpoint}` accounts for them; to run, use a plain or a block-FP8 checkpoint",
        )

    def _wrong_entries(self) -> Iterator[Finding]:
        plain = list(self._plain())
        types = PlainTypes(plain, self._checkpoint.form, self._names.integers)
        for info, claim, _ in self._unplaced:
            match claim:
                case Unknown():
                    what = describe_tensor(info)
                    yield Finding(wrong=Wrong.UNCLAIMED, name=info.name, what=what, near=claim.nearest)
                case Tied() | Borrowed() if claim.shape is not None and info.shape != claim.shape:
                    what = f"{describe_tensor(info)}, expected {list(claim.shape)}"
                    yield Finding(wrong=Wrong.SHAPE, name=info.name, what=what)
                case _:
                    pass
        for template, info in plain:
            if info.dtype not in (allowed := types.of(template, info)):
                what = f"{describe_tensor(info)}, expected {' or '.join(dtype.name for dtype in allowed)}"
                yield Finding(wrong=Wrong.DTYPE, name=info.name, what=what)

    def _plain(self) -> Iterator[tuple[str, TensorInfo]]:
        """Tensors whose elements are the values, with their templates."""
        for group in self.groups.values():
            if group.form is Form.PLAIN and WEIGHT in group.members:
                yield group.place.template, group.members[WEIGHT]
        for info, claim, _ in self._unplaced:
            if isinstance(claim, Tied | Borrowed):
                yield claim.template, info

    def _wrong_groups(self) -> Iterator[Finding]:
        fit: set[tuple[Any, ...]] = set()  # what a group looks like in which nothing is wrong: few of many are unlike
        for group in self.groups.values():
            looks = (group.place.shape, *((member, info.dtype, info.shape) for member, info in group.members.items()))
            if looks not in fit:
                found = list(misfits(group, self._quant))
                yield from found
                if not found:
                    fit.add(looks)

    def _missing(self) -> Iterator[Finding]:
        siblings: dict[str, list[str]] = {}
        for name in self._unexpected():
            siblings.setdefault(name.rpartition(".")[0].rpartition(".")[0], []).append(name)
        for name, place in self._expected.items():
            if name not in self.groups:
                what = f"{list(place.shape or ())}, fills {' and '.join(map(_described, place.fills))}"
                yield Finding(wrong=Wrong.MISSING, name=name, what=what, near=nearest(name, siblings))

    def original(self, name: str) -> Group:
        """The stored weight that the tied or borrowed copy `name` must be equal to. Raises WeightError naming both."""
        claim, lender = self.entries[name].claim, self._lender
        if isinstance(claim, Tied):
            return next(one for one in self.groups.values() if one.place.fills[0].parameter == claim.parameter)
        if not isinstance(claim, Borrowed) or lender is None:
            raise RuntimeError(f"{name} is no copy of a weight of a target")
        places = lender.names.expected().values()
        sources = {fills[0].parameter: place for place in places if len(fills := place.fills) == 1}
        place = sources.get(claim.parameter) or sources["embed.weight"]  # a tied head has no weight of its own
        group = gather(place, lender.checkpoint.tensors)
        if group is None:
            raise self._borrowed_differs(name, place.group, "which is not there")
        return group

    # From loading

    def fill(self, name: str) -> None:
        """The values of the group `name` (that of its weight) have been written to its fills, once more."""
        if self.is_closed or name not in self.groups:
            raise RuntimeError(f"{name} is not to be filled now")
        for target in self.groups[name].place.fills:
            self._filled[target.parameter].append(target.rows or (0, self._parameters[target.parameter].rows))

    def compare(self, name: str, first_difference: int | None) -> None:
        """The stored copy `name` has been compared with what it is tied to or borrowed from; rows differ from
        `first_difference` on, None when it is equal. Raises WeightError naming both."""
        claim = self.entries[name].claim
        if self.is_closed or not isinstance(claim, Tied | Borrowed):
            raise RuntimeError(f"{name} is not to be compared now")
        if first_difference is not None:
            says = self._borrowed_differs if isinstance(claim, Borrowed) else self._tied_differs
            raise says(name, self.original(name).place.group, f"and differs from row {first_difference} on")
        self._compared.add(name)

    def _tied_differs(self, name: str, source: str, differs: str) -> WeightError:
        return WeightError(
            "weights/tied-differs",
            f"{name} should be the same matrix as {source} {differs}.",
            role=self.role,
            facts=(f"{self.role} plan: head = {self._plan.head.value} ({self._plan.head.reason})",),
            hint="if the two are meant to differ, set tie_word_embeddings to false in config.json",
        )

    def _borrowed_differs(self, name: str, source: str, differs: str) -> WeightError:
        return WeightError(
            "weights/borrowed-differs",
            f"{name} should be the same matrix as the target's {source} {differs}.",
            role=self.role,
            facts=("this draft uses the target's own embedding and head; the file holds copies of them",),
            hint="fetch the checkpoint again: its draft was made for another target",
        )

    def close(self) -> None:
        """Prove the account. Raises WeightError `weights/ledger` naming the parameter or tensor that is not settled."""
        self.refuse_findings()
        wrong = [f"{name}: {state}" for name in self._parameters if (state := self.parameter_state(name)) != "filled"]
        wrong += [
            f"{name}: never compared with {entry.claim.parameter}"
            for entry in self._unplaced
            if isinstance(entry.claim, Tied | Borrowed) and (name := entry.info.name) not in self._compared
        ]
        if wrong:
            raise WeightError("weights/ledger", "loading left the ledger open.", role=self.role, facts=wrong)
        self.is_closed = True

    def parameter_state(self, name: str) -> str:
        """`filled` when each row was written exactly once, `missing` when some was not, `twice` when some was more
        than once."""
        at, rows = 0, self._parameters[name].rows
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
        that it will be. Borrowed modules count as parameters here, though the model holds none for them."""
        parameters = self._parameter_states()
        counts = Counter(parameters.values())
        return {
            "tensors": self.tensor_counts(),
            "parameters": {
                "total": len(parameters),
                **{key: counts[key] for key in ("filled", "tied", "borrowed", "computed", "missing", "twice")},
            },
            "unexpected": self._unexpected(),
            "missing": [name for name, state in parameters.items() if state == "missing"],
            "left_out": self._left_out(),
            "groups": self._groups(),
        }

    def accounts_for(self, name: str) -> bool:
        """Whether the stored tensor is in this account, and has a place in it."""
        entry = self.entries.get(name)
        return entry is not None and entry.state is not TensorState.UNEXPECTED

    def not_accounted_for(self) -> Iterator[str]:
        """Stored tensors that have no place here, or are left to the other runner."""
        yield from self._unexpected()
        yield from self.elsewhere

    def _unexpected(self) -> list[str]:
        return [entry.info.name for entry in self._unplaced if entry.state is TensorState.UNEXPECTED]

    def tensor_counts(self) -> dict[str, int]:
        """Stored tensors by state, `total` first."""
        states = Counter(entry.state for entry in self.entries.values())
        return {"total": len(self.entries), **{state.value: states[state] for state in TensorState}}

    def _parameter_states(self) -> dict[str, str]:
        absent = () if self.is_closed else (place for name, place in self._expected.items() if name not in self.groups)
        holes = {target.parameter for place in absent for target in place.fills}
        states = {name: "missing" if name in holes else "filled" for name in self._parameters}
        return states | {f"{borrow.value}.weight": "borrowed" for borrow in self._borrows}

    def _left_out(self) -> list[dict[str, Any]]:
        claims = [entry.claim for entry in self._unplaced]
        counts = Counter((claim.template, claim.reason) for claim in claims if isinstance(claim, LeftOut))
        return [{"pattern": template, "count": count, "reason": why} for (template, why), count in counts.items()]

    def _groups(self) -> list[dict[str, Any]]:
        """One line per template, stored type and shape."""
        alike: dict[tuple[Any, ...], list[Entry]] = {}
        for entry in self.entries.values():
            key = (*_family(entry.info, entry.claim), entry.state, entry.info.dtype, entry.info.shape)
            alike.setdefault(key, []).append(entry)
        groups: Counter[tuple[Any, ...]] = Counter()
        for entries in alike.values():
            (info, claim, state), count = entries[0], len(entries)
            template, parameters = _outline(info, claim)
            filled = ", ".join(dict.fromkeys(as_template(parameter)[0] for parameter in parameters)) or None
            groups[(template, state.value, filled, info.dtype.name, info.shape)] += count
        return [
            {"template": template, "count": count, "action": action, "parameter": parameter, "dtype": dtype,
             "shape": list(shape)}
            for (template, action, parameter, dtype, shape), count in groups.items()
        ]  # fmt: skip


def unclaimed(ledgers: Iterable[LoadLedger]) -> list[str]:
    """Tensors that none of the ledgers over their checkpoint accounts for: the union must cover every file, also where
    target and draft share one."""
    sharing: dict[Path, list[LoadLedger]] = {}
    for ledger in ledgers:
        sharing.setdefault(ledger.checkpoint, []).append(ledger)
    return sorted(
        name
        for group in sharing.values()
        for name in {name for ledger in group for name in ledger.not_accounted_for()}
        if not any(ledger.accounts_for(name) for ledger in group)
    )


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


def _described(target: Fill) -> str:
    return target.parameter + (f" rows {target.rows[0]}..{target.rows[1]}" if target.rows else "")


def _family(info: TensorInfo, claim: _Said) -> tuple[str, ...]:
    """Equal for tensors of one template that fill the same parameters."""
    match claim:
        case Place():
            return claim.template, member_of(claim, info.name), claim.fills[0].parameter
        case Tied() | Borrowed():
            return claim.template, claim.parameter
        case LeftOut():
            return claim.template, info.name.rpartition(".")[2]
        case Unknown():
            return (as_template(info.name)[0],)


def _outline(info: TensorInfo, claim: _Said) -> tuple[str, tuple[str, ...]]:
    """The tensor's own template, and the parameters that it fills or is a copy of."""
    match claim:
        case Place(template=template, fills=fills):
            member = member_of(claim, info.name)
            own = template if member == WEIGHT else f"{template.rpartition('.')[0]}.{member}"
            return own, tuple(target.parameter for target in fills)
        case Tied(parameter=parameter, template=template) | Borrowed(parameter=parameter, template=template):
            return template, (parameter,)
        case LeftOut(template=template):
            base, _, last = template.rpartition(".")
            member = info.name.rpartition(".")[2]
            return f"{base}.{member}" if last == WEIGHT and member in COMPANIONS else template, ()
        case Unknown():
            return as_template(info.name)[0], ()


def _state(claim: _Said) -> TensorState:
    match claim:
        case Place():
            return TensorState.FUSED if claim.is_shared_slot else TensorState.PLACED
        case Tied():
            return TensorState.TIED
        case Borrowed():
            return TensorState.BORROWED
        case LeftOut():
            return TensorState.LEFT_OUT
        case Unknown():
            return TensorState.UNEXPECTED
