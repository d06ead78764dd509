"""Public MoE models as headers: config.json and the tensors of the release, written from templates. No weights.

Templates come from the releases (sources.py says where they were read), never from Proa's rules.
`python -m tests.golden.moe_models` writes the texts again: read the difference before committing it.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from pathlib import Path

from proa.cli.headers import uncollected
from proa.cli.inspect import report_lines
from proa.kernels.nvml import Gpu
from proa.loading.dry_run import tensor_counts
from proa.plan.explain import explain_table
from proa.plan.planned import Resolved
from tests.factories.headers import GPU_HOST, SIZES, planned, write_headers
from tests.golden.public_models import HERE, SERVER
from tests.golden.sources import MODELS, PublicMoE

TEXTS = HERE / "texts" / "moe"
ROOM = 2 * 2**40
CPU = replace(SERVER, cores=96, memory_bytes=ROOM, memory_available=ROOM)
CUDA = replace(GPU_HOST, gpus=(Gpu(name="a GPU with room for all", memory_bytes=ROOM, memory_free=ROOM, sm="9.0"),))
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
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
    """The lines of `templates/<name>.txt`: a name in which `{3..60}` stands for each of these numbers, dtype, shape."""
    found: list[Stored] = []
    for line in (HERE / "templates" / f"{name}.txt").read_text().splitlines():
        template, dtype, shape = line.split()
        ranges = [range(int(first), int(last) + 1) for first, last in _RANGE.findall(template)]
        pattern = _RANGE.sub("{}", template)
        names = tuple(pattern.format(*indices) for indices in product(*ranges))
        found.append(Stored(template, dtype, tuple(map(int, shape.split("x"))), names))
    return found


def write_model(
    root: Path, model: PublicMoE, *, without: str = "", add: Mapping[str, Sequence[int]] | None = None
) -> Path:
    """The release as headers; `without` one tensor, or with more (BF16)."""
    config = json.loads((HERE / "configs" / f"{model.name}.json").read_text())
    kinds = stored(model.name)
    shapes = {name: kind.shape for kind in kinds for name in kind.names}
    dtypes = {name: kind.dtype for kind in kinds for name in kind.names}
    return write_headers(root / model.name, config, shapes=shapes, dtypes=dtypes, drop=(without,), add=add)


def cases(folder: Path, model: PublicMoE) -> dict[str, Resolved]:
    """Plans by name: the target alone, with its bundled draft, and that on a GPU."""
    asks = {"speculative": "nextn"} if model.has_draft else {}
    with uncollected():
        found = {model.name: planned(folder, caps=CPU)}
        if model.has_draft:
            found[f"{model.name}.nextn"] = planned(folder, caps=CPU, **asks)
        if model.has_gpu_text:
            found[f"{model.name}.cuda"] = planned(folder, caps=CUDA, **asks)
    return found


def texts(plans: dict[str, Resolved], root: Path) -> Iterator[tuple[str, str]]:
    """(file name, text). The folder in which the model was written is not in the text. Where tensors go is said once
    per set of runners: not again for the GPU."""
    for case, resolved in plans.items():
        with uncollected():
            yield f"{case}.explain.txt", explain_table(resolved.plans, tensor_counts(resolved))
            if not case.endswith(".cuda"):
                lines = report_lines(resolved, weights=True, layers=True)
                yield f"{case}.inspect.txt", "\n".join(lines).replace(str(root), "")


def write_texts() -> None:
    TEXTS.mkdir(parents=True, exist_ok=True)
    for model in MODELS:
        with tempfile.TemporaryDirectory() as root:
            for name, text in texts(cases(write_model(Path(root), model), model), Path(root)):
                (TEXTS / name).write_text(text + "\n")


if __name__ == "__main__":
    write_texts()
