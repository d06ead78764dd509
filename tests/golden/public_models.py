"""Public models by their config.json and the headers that follow; no weights. `python -m tests.golden.public_models`
writes the texts again: read the difference before committing it.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from proa.cli.inspect import report_lines
from proa.loading.dry_run import tensor_counts
from proa.plan.explain import explain_table
from tests.factories.headers import LAPTOP, planned, write_headers

HERE = Path(__file__).parent
SERVER = replace(
    LAPTOP, cores=32, isa=("avx2", "fma", "avx512f", "avx512_bf16"), memory_bytes=2**37, memory_available=2**36
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicModel:
    """`parameters` as published (safetensors totals on the hub, a tied head counted once). `stores_tied_copy`: the
    released file holds lm_head.weight although the config ties it."""

    name: str
    parameters: int
    stores_tied_copy: bool = False


MODELS = (
    PublicModel(name="llama-3.2-1b", parameters=1_235_814_400),
    PublicModel(name="qwen2.5-0.5b", parameters=494_032_768),
    PublicModel(name="qwen3-0.6b", parameters=596_049_920, stores_tied_copy=True),
    PublicModel(name="qwen3-4b", parameters=4_022_468_096),
    PublicModel(name="mistral-7b-v0.1", parameters=7_241_732_096),
)
TARGET, DRAFT = "qwen3-4b", "qwen3-0.6b"


def write_model(root: Path, model: PublicModel) -> Path:
    config = json.loads((HERE / "configs" / f"{model.name}.json").read_text())
    copy = {"lm_head.weight": (config["vocab_size"], config["hidden_size"])} if model.stores_tied_copy else {}
    return write_headers(root / model.name, config, add=copy)


def texts(root: Path) -> Iterator[tuple[str, str]]:
    """(file name, text) of every golden. The folder in which the model was written is not in the text."""
    folders = {model.name: write_model(root, model) for model in MODELS}
    for name, folder in folders.items():
        resolved = planned(folder, caps=SERVER)
        yield f"{name}.explain.txt", explain_table(resolved.plans, tensor_counts(resolved))
        yield f"{name}.inspect.txt", "\n".join(report_lines(resolved, weights=True, layers=True)).replace(str(root), "")
    pair = planned(folders[TARGET], draft=folders[DRAFT], caps=SERVER)
    yield "qwen3-pair.explain.txt", explain_table(pair.plans, tensor_counts(pair))


def write_texts() -> None:
    with tempfile.TemporaryDirectory() as root:
        for name, text in texts(Path(root)):
            (HERE / "texts" / name).write_text(text + "\n")


if __name__ == "__main__":
    write_texts()
