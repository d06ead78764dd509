"""Public models with linear attention, on four devices that do not exist: where they were read, and their texts.

`python -m tests.golden.hybrid_models` writes the texts again: read the difference before committing it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from proa.cli.headers import uncollected
from proa.kernels.caps import DeviceCaps
from proa.kernels.nvml import Gpu
from proa.plan.planned import Resolved
from tests.factories.headers import LAPTOP, planned
from tests.golden.moe_models import CPU
from tests.golden.public_models import HERE
from tests.golden.releases import ROOM, explain_text, inspect_text, write_model, write_texts
from tests.golden.sources import API, CONFIGS, PublicMoE
from tests.plan.hybrid_headers import SM90, SM100

TEXTS = HERE / "texts" / "hybrid"
LISTS = "https://github.com/gogongxt/python/blob/main/scripts"
"""config.json, and every tensor of all shards as its author read them: dtypes and shapes, layers and experts folded."""
QUOTED = "payload: metadata.total_size of its index, as quoted in public repositories"


def _with_room(gpu_host: DeviceCaps) -> DeviceCaps:
    gpus = tuple(Gpu(name=gpu.name, memory_bytes=ROOM, memory_free=ROOM, sm=gpu.sm) for gpu in gpu_host.gpus)
    return replace(gpu_host, gpus=gpus)


DEVICES: Mapping[str, DeviceCaps] = MappingProxyType(
    {
        "avx2": replace(LAPTOP, isa=(*LAPTOP.isa, "f16c"), cores=96, memory_bytes=ROOM, memory_available=ROOM),
        "avx512": CPU,
        "sm90": _with_room(SM90),
        "sm100": _with_room(SM100),
    }
)
"""Every optional kernel package is installed on the GPU hosts."""
ASKS: Mapping[str, Mapping[str, str]] = MappingProxyType({"sm100": {"state_dtype": "bfloat16"}})
"""What is asked besides on a device, in one more text: there FlashInfer prefills with states of that type only."""

MODELS = (
    PublicMoE(
        name="qwen3-next-80b-a3b-instruct",
        hub="Qwen/Qwen3-Next-80B-A3B-Instruct",
        config=f"{LISTS}/models/qwen3_next_80b_a3b_instruct.md",
        names=f"{LISTS}/models/qwen3_next_80b_a3b_instruct.md (75,944 tensors in 46 rows)",
        figures=f"{LISTS}/models/qwen3_next_80b_a3b_instruct.md; {QUOTED}; main_parameters: all but `mtp.*`, likewise",
        tensors=75_944,
        payload_bytes=162_649_725_440,
        parameters=81_324_862_720,
        main_parameters=79_674_391_296,
        has_draft=True,
    ),
    PublicMoE(
        name="qwen3-next-80b-a3b-instruct-fp8",
        hub="Qwen/Qwen3-Next-80B-A3B-Instruct-FP8",
        config=f"{LISTS}/qwen3_next_80b_a3b_instruct_fp8.md (quantization_config whole)",
        names=f"{LISTS}/qwen3_next_80b_a3b_instruct_fp8.md (151,479 tensors in 68 rows)",
        figures=f"{LISTS}/qwen3_next_80b_a3b_instruct_fp8.md (elements, scales counted)",
        tensors=151_479,
        elements=81_329_784_384,
        main_parameters=79_674_391_296,
        has_draft=True,
        unconfirmed="keys other than quantization_config are spelled as in the bf16 release: the list has them as "
        "transformers writes them",
    ),
    PublicMoE(
        name="qwen3.5-35b-a3b",
        hub="Qwen/Qwen3.5-35B-A3B",
        config=f"{CONFIGS}/Qwen--Qwen3.5-35B-A3B_config.json",
        names=f"{LISTS}/models/qwen3.5_35b_a3b.md (1,811 tensors in 68 rows; experts of `mtp.*` are not stacked)",
        figures=f"{LISTS}/models/qwen3.5_35b_a3b.md; parameters also: {API}",
        tensors=1_811,
        parameters=35_951_822_704,
        has_draft=True,
    ),
    PublicMoE(
        name="kimi-linear-48b-a3b-instruct",
        hub="moonshotai/Kimi-Linear-48B-A3B-Instruct",
        config=f"{LISTS}/models/kimi_linear_48b_a3b_instruct.md",
        names=f"{LISTS}/models/kimi_linear_48b_a3b_instruct.md (20,493 tensors in 35 rows)",
        figures=f"{LISTS}/models/kimi_linear_48b_a3b_instruct.md; {QUOTED}; parameters also: {API}",
        tensors=20_493,
        payload_bytes=98_245_528_576,
        parameters=49_122_681_728,
    ),
)


def cases(folder: Path, model: PublicMoE) -> dict[str, Resolved]:
    """Plans by name: the target alone on a server, and on every device with its bundled draft if it has one."""
    asks = {"speculative": "nextn"} if model.has_draft else {}
    with uncollected():
        found = {model.name: planned(folder, caps=CPU)}
        for name, caps in DEVICES.items():
            found[f"{model.name}.{name}"] = planned(folder, caps=caps, **asks)
            if name in ASKS and model.has_draft:
                found[f"{model.name}.{name}.asked"] = planned(folder, caps=caps, **asks, **ASKS[name])
    return found


def file_names(model: PublicMoE) -> Iterator[tuple[str, str]]:
    """(case, verb) of every text: what was decided on every device, and where tensors go for the target alone and with
    its draft, which no device changes."""
    yield model.name, "inspect"
    for name in DEVICES:
        yield f"{model.name}.{name}", "explain"
        if name in ASKS and model.has_draft:
            yield f"{model.name}.{name}.asked", "explain"
    if model.has_draft:
        yield f"{model.name}.avx512", "inspect"


def texts(model: PublicMoE, plans: Mapping[str, Resolved], root: Path) -> Iterator[tuple[str, str]]:
    """(file name, text)"""
    for case, verb in file_names(model):
        resolved = plans[case]
        yield f"{case}.{verb}.txt", explain_text(resolved) if verb == "explain" else inspect_text(resolved, root)


if __name__ == "__main__":
    for model in MODELS:
        with tempfile.TemporaryDirectory() as root:
            write_texts(TEXTS, texts(model, cases(write_model(Path(root), model), model), Path(root)))
