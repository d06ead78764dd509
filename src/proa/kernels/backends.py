"""Every backend of this package by the name that plans use, and how its ops are made. Owns no choice and no op."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from proa.kernels.delta import DeltaOps
from proa.kernels.device_delta import DeviceDelta
from proa.kernels.flashinfer_delta import FlashInferRule
from proa.kernels.latent_seam import LatentOps
from proa.kernels.native.abi import load_library
from proa.kernels.native.delta import NativeDelta
from proa.kernels.native.latent import NativeLatent
from proa.kernels.native.moe import NativeMoE
from proa.kernels.native.ops import NativeAttention, NativeDense
from proa.kernels.native.sample import NativeSample
from proa.kernels.native.sink import Direct
from proa.kernels.onednn import OnednnDense
from proa.kernels.reference.attention import ReferenceAttention
from proa.kernels.reference.delta import ReferenceDelta, TorchDelta
from proa.kernels.reference.latent import ReferenceLatent
from proa.kernels.reference.misc import ReferenceDense
from proa.kernels.reference.moe import ReferenceMoE
from proa.kernels.reference.sample import ReferenceSample
from proa.kernels.seam import AttentionOps, DenseOps, MoEOps, SampleOps
from proa.kernels.triton_delta import TritonRule


def _native_dense(library: Path | None) -> DenseOps:
    loaded = load_library(library)
    return NativeDense(loaded, Direct(loaded))


def _native_attention(library: Path | None) -> AttentionOps:
    return NativeAttention(Direct(load_library(library)))


def _native_latent(library: Path | None) -> LatentOps:
    loaded = load_library(library)
    return NativeLatent(loaded, Direct(loaded))


def _native_moe(library: Path | None) -> MoEOps:
    loaded = load_library(library)
    return NativeMoE(loaded, Direct(loaded))


def _triton_delta(_: Path | None) -> DeltaOps:
    return DeviceDelta(TritonRule())


def _flashinfer_delta(_: Path | None) -> DeltaOps:
    return DeviceDelta(FlashInferRule())


def _native_delta(library: Path | None) -> DeltaOps:
    return NativeDelta(Direct(load_library(library)))


def _native_sample(library: Path | None) -> SampleOps:
    return NativeSample(Direct(load_library(library)))


DENSE: Mapping[str, Callable[[Path | None], DenseOps]] = MappingProxyType(
    {"native": _native_dense, "onednn": lambda _: OnednnDense(), "reference": lambda _: ReferenceDense()}
)
ATTENTION: Mapping[str, Callable[[Path | None], AttentionOps]] = MappingProxyType(
    {"native": _native_attention, "reference": lambda _: ReferenceAttention()}
)
LATENT: Mapping[str, Callable[[Path | None], LatentOps]] = MappingProxyType(
    {"native": _native_latent, "reference": lambda _: ReferenceLatent()}
)
MOE: Mapping[str, Callable[[Path | None], MoEOps]] = MappingProxyType(
    {"native": _native_moe, "reference": lambda _: ReferenceMoE()}
)
DELTA: Mapping[str, Callable[[Path | None], DeltaOps]] = MappingProxyType(
    {
        "native": _native_delta,
        "triton": _triton_delta,
        "flashinfer": _flashinfer_delta,
        "torch": lambda _: TorchDelta(),
        "reference": lambda _: ReferenceDelta(),
    }
)
SAMPLING: Mapping[str, Callable[[Path | None], SampleOps]] = MappingProxyType(
    {"native": _native_sample, "reference": lambda _: ReferenceSample()}
)
