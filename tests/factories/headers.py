"""Checkpoints that hold headers and no weights, and hosts that do not exist: all that a plan needs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

from proa.checkpoint.open import open_checkpoint
from proa.config.intent import EngineConfig
from proa.config.load import load_config
from proa.kernels.caps import DeviceCaps
from proa.kernels.nvml import Gpu
from proa.kernels.plugins import KernelPlugin
from proa.kernels.rollback import RollbackCosts
from proa.plan.planned import Resolved
from proa.plan.resolve import resolve
from tests.factories.checkpoints import tensor_shapes, tiny_config
from tests.factories.tokenizer import write_tokenizer

SIZES = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8, "F8_E4M3": 1, "I32": 4, "I64": 8}
LAPTOP = DeviceCaps(
    device="cpu",
    isa=("avx2", "fma"),
    cores=4,
    memory_bytes=16 * 2**30,
    memory_available=12 * 2**30,
    compiler="/usr/bin/c++",
    libraries={"torch": "2.13.0+cpu"},
    kernels={},
    no_cuda="no CUDA device or driver",
    platform="Linux x86_64",
)
SERVER = replace(LAPTOP, isa=("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16"))
GPU_HOST = replace(
    LAPTOP,
    device="cuda",
    no_cuda=None,
    gpus=(Gpu(name="NVIDIA H200", memory_bytes=141 * 2**30, memory_free=140 * 2**30, sm="9.0"),),
)


def write_headers(
    path: Path,
    config: Mapping[str, Any],
    *,
    dtype: str = "BF16",
    dtypes: Mapping[str, str] | None = None,
    drop: Sequence[str] = (),
    add: Mapping[str, Sequence[int]] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    has_tokenizer: bool = True,
) -> Path:
    """config.json and the header of model.safetensors, cut where the data would begin.

    `shapes` are the tensors, those of tests.factories.checkpoints if not given; `dtypes` retypes single ones, `drop`
    leaves some out, `add` gives more (name -> shape).
    """
    given = dict(tensor_shapes(config)) if shapes is None else shapes
    shapes = {name: shape for name, shape in given.items() if name not in drop} | dict(add or {})
    header: dict[str, Any] = {}
    at = 0
    for name, shape in shapes.items():
        kind = (dtypes or {}).get(name, dtype)
        size = prod(shape) * SIZES[kind]
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(dict(config)))
    (path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    if has_tokenizer:
        write_tokenizer(path, texts={})
    return path


def write_tiny_headers(path: Path, family: str, *, dtype: str = "F32", **overrides: Any) -> Path:
    return write_headers(path, tiny_config(family, **overrides), dtype=dtype)


def asked(model: Path | str, **settings: Any) -> EngineConfig:
    """The intent of an API call. `flags={"--draft.dtype": "float32"}` asks as the command line does."""
    flags: Mapping[str, str | list[str]] = settings.pop("flags", {})
    return load_config(str(model), flags=flags, file=None, environ={}, api=settings)


def planned(
    model: Path,
    *,
    draft: Path | None = None,
    caps: DeviceCaps = LAPTOP,
    plugins: Sequence[KernelPlugin] = (),
    rollbacks: Mapping[str, RollbackCosts] = MappingProxyType({}),
    **settings: Any,
) -> Resolved:
    """Plans for a host that is not this one."""
    given = settings if draft is None else {"draft": str(draft), **settings}
    checkpoints = open_checkpoint(model), draft and open_checkpoint(draft)
    return resolve(asked(model, **given), *checkpoints, caps, plugins, rollbacks)
