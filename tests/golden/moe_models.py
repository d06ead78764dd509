"""Public MoE models on a server and on a GPU with room for them, without and with their bundled drafts.

`python -m tests.golden.moe_models` writes the texts again: read the difference before committing it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from proa.cli.headers import uncollected
from proa.kernels.nvml import Gpu
from proa.plan.planned import Resolved
from tests.factories.headers import GPU_HOST, planned
from tests.golden.public_models import HERE, SERVER
from tests.golden.releases import ROOM, explain_text, inspect_text, write_model, write_texts
from tests.golden.sources import MODELS, PublicMoE

TEXTS = HERE / "texts" / "moe"
CPU = replace(SERVER, isa=(*SERVER.isa, "avx512vbmi"), cores=96, memory_bytes=ROOM, memory_available=ROOM)
CUDA = replace(GPU_HOST, gpus=(Gpu(name="a GPU with room for all", memory_bytes=ROOM, memory_free=ROOM, sm="9.0"),))


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
    """(file name, text). Where tensors go is said once per set of runners: not again for the GPU."""
    for case, resolved in plans.items():
        yield f"{case}.explain.txt", explain_text(resolved)
        if not case.endswith(".cuda"):
            yield f"{case}.inspect.txt", inspect_text(resolved, root)


if __name__ == "__main__":
    for model in MODELS:
        with tempfile.TemporaryDirectory() as root:
            write_texts(TEXTS, texts(cases(write_model(Path(root), model), model), Path(root)))
