"""Headers of models with linear attention, and GPU hosts on which their optional kernels are installed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.factories.headers import GPU_HOST, write_headers
from tests.factories.hybrid_checkpoints import hybrid_config, hybrid_shapes

GDN_FAMILIES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_moe")
WIDE = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
"""The head sizes of the releases: FlashInfer has no others."""
INSTALLED = {"torch": "2.13.0+cu130", "triton": "3.5.0", "fla-core": "0.6.0", "flashinfer-python": "0.7.4"}


TESTED = {"triton": "passed", "flashinfer": "passed"}


def gpu_host(sm: str, cuda: str | None = "13.0", **changes: Any) -> Any:
    """A host with one GPU of that compute capability, and every optional kernel package, self-tests passed."""
    gpu = replace(GPU_HOST.gpus[0], name=f"a GPU with SM {sm}", sm=sm)
    kernels = {**GPU_HOST.kernels, **TESTED}
    host = replace(GPU_HOST, gpus=(gpu,), cuda_version=cuda, libraries=INSTALLED, kernels=kernels)
    return replace(host, **changes)


SM90, SM100 = gpu_host("9.0"), gpu_host("10.0")


def write_hybrid_headers(path: Path, family: str, *, dtype: str = "BF16", **overrides: Any) -> Path:
    config = hybrid_config(family, **overrides)
    return write_headers(path, config, dtype=dtype, shapes=hybrid_shapes(config))
