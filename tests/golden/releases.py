"""Releases as headers: config.json and the tensors written from templates, no weights; and the texts of their plans.

Templates come from the releases (`PublicMoE.names` says where they were read), never from Proa's rules.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from math import prod
from pathlib import Path

from proa.cli.headers import uncollected
from proa.cli.inspect import report_lines
from proa.loading.dry_run import tensor_counts
from proa.plan.explain import explain_table
from proa.plan.planned import Resolved
from tests.factories.headers import SIZES, write_headers
from tests.golden.public_models import HERE
from tests.golden.sources import PublicMoE

ROOM = 2 * 2**40
"""Bytes of a host or a GPU that holds any of the models."""
_NUMBERS = re.compile(r"\{([\d.,/]+)\}")
_DIGEST = re.compile(r"\b[0-9a-f]{8}(?=\))|(?<=^plan )[0-9a-f]{16}$", re.MULTILINE)
_NOT_VALUES = ("weight_scale_inv", "weight_scale", "weight_shape", "inv_freq")


@dataclass(frozen=True, slots=True)
class Stored:
    """The tensors of one template: dtype and shape as stored, and every name."""

    template: str
    dtype: str
    shape: tuple[int, ...]
    names: tuple[str, ...]

    @property
    def elements(self) -> int:
        return len(self.names) * prod(self.shape)

    @property
    def nbytes(self) -> int:
        return SIZES[self.dtype] * self.elements

    @property
    def parameters(self) -> int:
        """Values of the model: no scales, eight in an int32 where they are packed."""
        if self.template.endswith(_NOT_VALUES):
            return 0
        return self.elements * (8 if self.template.endswith("weight_packed") else 1)


def stored(name: str) -> list[Stored]:
    """The lines of `templates/<name>.txt`: a name in which `{0,3..59/4}` stands for 0, 3, 7 and so on, dtype, shape."""
    found: list[Stored] = []
    for line in (HERE / "templates" / f"{name}.txt").read_text().splitlines():
        template, dtype, shape = line.split()
        numbers = [_numbers(listed) for listed in _NUMBERS.findall(template)]
        pattern = _NUMBERS.sub("{}", template)
        names = tuple(pattern.format(*indices) for indices in product(*numbers))
        found.append(Stored(template, dtype, tuple(map(int, shape.split("x"))), names))
    return found


def _numbers(listed: str) -> list[int]:
    return list(chain.from_iterable(map(_range, listed.split(","))))


def _range(part: str) -> range:
    """`3`, `0..46`, or `3..47/4`: every fourth."""
    ends, _, step = part.partition("/")
    first, _, last = ends.partition("..")
    return range(int(first), int(last or first) + 1, int(step or 1))


def write_model(
    root: Path, model: PublicMoE, *, without: str = "", add: Mapping[str, Sequence[int]] | None = None
) -> Path:
    """The release as headers; `without` one tensor, or with more (BF16)."""
    config = json.loads((HERE / "configs" / f"{model.name}.json").read_text())
    kinds = stored(model.name)
    shapes = {name: kind.shape for kind in kinds for name in kind.names}
    dtypes = {name: kind.dtype for kind in kinds for name in kind.names}
    return write_headers(root / model.name, config, shapes=shapes, dtypes=dtypes, drop=(without,), add=add)


def explain_text(resolved: Resolved) -> str:
    """Without the plans' digests, which change with every fact that a plan covers (those of dense models are on
    file)."""
    with uncollected():
        table = explain_table(resolved.plans, tensor_counts(resolved))
    return _DIGEST.sub(lambda found: "." * len(found[0]), table)


def inspect_text(resolved: Resolved, root: Path) -> str:
    """Without the folder in which the model was written."""
    with uncollected():
        return "\n".join(report_lines(resolved, weights=True, layers=True)).replace(str(root), "")


def write_texts(folder: Path, texts: Iterator[tuple[str, str]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts:
        (folder / name).write_text(text + "\n")
