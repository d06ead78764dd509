"""Source groups: the stored tensors that together make the values of one weight, and what is wrong with a group.

Owns the forms' shapes. The form itself is told by the members that are there (checkpoint/quant.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from proa.arch.weights import COMPANIONS, WEIGHT, Place
from proa.checkpoint.quant import FORM_MEMBERS, Form, QuantSpec, form_of, member_dtypes
from proa.checkpoint.types import TensorInfo
from proa.loading.findings import Finding, Wrong, describe_tensor

_PER_INT32 = 8  # int4 values


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One weight as stored: `members` by what they are (`weight`, `weight_scale_inv`). `place` is the weight's."""

    place: Place
    members: Mapping[str, TensorInfo]

    @property
    def form(self) -> Form:
        return form_of(self.members, self.values.dtype)

    @property
    def values(self) -> TensorInfo:
        """The member that holds the elements; any other where that is missing."""
        return self.members.get(WEIGHT) or self.members.get("weight_packed") or next(iter(self.members.values()))

    @property
    def nbytes(self) -> int:
        return sum(info.nbytes for info in self.members.values())

    def name_of(self, member: str) -> str:
        """The stored name of a member, there or not."""
        return _sibling(self.place.group, member)


def gather(place: Place, tensors: Mapping[str, TensorInfo]) -> Group | None:
    """The group of `place` in a checkpoint, None where nothing of it is there."""
    names = {member: _sibling(place.group, member) for member in (WEIGHT, *COMPANIONS)}
    found = {member: tensors[name] for member, name in names.items() if name in tensors}
    return Group(place=place, members=found) if found else None


def _sibling(group: str, member: str) -> str:
    """`x.weight`, `weight_scale_inv` -> `x.weight_scale_inv`; a name without that end has the member's end after it."""
    if group.endswith(f".{WEIGHT}"):
        return f"{group.removesuffix(WEIGHT)}{member}"
    return group + member.removeprefix(WEIGHT)


def misfits(group: Group, quant: QuantSpec | None) -> Iterator[Finding]:
    """What is wrong with the group as such: members that lack, are of the wrong shape or type, or belong to no weight
    of its form. A plain weight's type is judged by its like (loading/storage.py), not here."""
    form = group.form
    if form is Form.PLAIN:
        yield from _shape(group, WEIGHT, group.place.shape, "")
        return
    wanted = FORM_MEMBERS[form]
    there = ", ".join(info.name for info in group.members.values())
    for member in wanted:
        if member not in group.members:
            what = f"the {form.value} of {group.place.group} lacks it; there is {there}"
            yield Finding(wrong=Wrong.INCOMPLETE, name=group.name_of(member), what=what)
    for member, info in group.members.items():
        if member not in wanted:
            what = f"{describe_tensor(info)}, which is no part of a weight stored as {form.value} ({there})"
            yield Finding(wrong=Wrong.UNCLAIMED, name=info.name, what=what)
    yield from _types(group, form, there)
    if form is Form.FP8_BLOCK and (quant is None or quant.block is None) and "weight_scale_inv" in group.members:
        info = group.members["weight_scale_inv"]
        what = f"{describe_tensor(info)}; quantization_config has no weight_block_size to judge it by"
        yield Finding(wrong=Wrong.SHAPE, name=info.name, what=what)
    for member, shape, why in _shapes(group, form, quant):
        yield from _shape(group, member, shape, why)


def _types(group: Group, form: Form, there: str) -> Iterator[Finding]:
    for member, info in group.members.items():
        allowed = member_dtypes(form, member)
        if allowed is None or info.dtype in allowed:
            continue
        said = " or ".join(sorted(dtype.name for dtype in allowed))
        if member == WEIGHT:
            what = f"{describe_tensor(info)}, but the scale is one of {said} values ({there})"
            yield Finding(wrong=Wrong.INCOMPLETE, name=info.name, what=what)
        else:
            yield Finding(wrong=Wrong.DTYPE, name=info.name, what=f"{describe_tensor(info)}, expected {said}")


def _shapes(group: Group, form: Form, quant: QuantSpec | None) -> Iterator[tuple[str, tuple[int, ...] | None, str]]:
    """The members' expected shapes (None: nothing to judge by), with the reason of those that follow from another."""
    if WEIGHT in group.members:
        yield WEIGHT, group.place.shape, ""
    if group.place.shape is None or len(group.place.shape) != 2:  # noqa: PLR2004  (out, in)
        return
    rows, columns = group.place.shape
    match form:
        case Form.FP8_BLOCK:
            block = None if quant is None else quant.block
            if block is None:
                return  # said by misfits
            why = f": one per {block[0]} x {block[1]} block of {group.place.group} [{rows}, {columns}]"
            yield "weight_scale_inv", (-(-rows // block[0]), -(-columns // block[1])), why
        case Form.INT4:
            of = f" for {group.place.group} [{rows}, {columns}]"
            yield "weight_packed", (rows, -(-columns // _PER_INT32)), of
            yield "weight_shape", (2,), of
            if quant is not None and quant.group is not None:
                yield "weight_scale", (rows, -(-columns // quant.group)), f"{of} in groups of {quant.group}"
        case Form.FP8_SCALED | Form.PLAIN:
            pass


def _shape(group: Group, member: str, expected: tuple[int, ...] | None, why: str) -> Iterator[Finding]:
    info = group.members.get(member)
    if info is not None and expected is not None and info.shape != expected:
        what = f"{describe_tensor(info)}, expected {list(expected)}{why}"
        yield Finding(wrong=Wrong.SHAPE, name=info.name, what=what)
