"""Every kernel by op and backend, with what it requires. Owns no kernel code and makes no choice: plan/rules do.

Backends that users know from elsewhere are listed too, so that asking for one says why it cannot run.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

from proa.arch.layout import ScaleOn
from proa.conditions import Blocked, Condition, FactView, Source
from proa.kernels.delta_catalog import DELTA_KERNELS, DELTA_OPS
from proa.kernels.kernel_info import (
    NATIVE,
    REFERENCE,
    Check,
    KernelInfo,
    absent,
    condition,
    failure,
    needs_compiler,
    needs_cpu,
    needs_cuda,
    needs_vectors,
    passed_self_test,
    phase_op,
    tested,
)
from proa.units import DType, Phase, Storage

MATMUL, MOE, SAMPLE = "matmul", "moe", "sample"
ONEDNN = "onednn"
VECTOR = 16  # elements of a native vector and panel
# Stored formats that native computes on, with what a block takes in its panels: K formats keep their factors in
# float32, and 6-bit values as bytes.
BLOCK_FORMATS: Mapping[DType, Storage] = MappingProxyType(
    {
        **{plain: plain.storage for plain in (DType.Q8_0, DType.Q4_0, DType.Q4_1)},
        DType.Q4_K: Storage(256, 192),
        DType.Q6_K: Storage(256, 320),
    }
)
MAX_SCALE_COLUMNS = 128  # of block FP8, that native keeps on its stack (csrc/fp8.h: MAX_BLOCK)
MAX_HEAD = 256  # elements of a head that native attention keeps on its stack
MAX_RANK = 512  # elements of a latent row that native attention keeps on its stack
NATIVE_MIXERS = frozenset({"gqa", "mla", "indexer", "whole q/k norm", "interleaved rope", "no rope", "query scale"})
"""What native attention covers, in the words of plan/shapes.py: mixer_words. Any other word of a model rules it out."""
SCALES_SUM = frozenset({"triton"})
"""Backends whose experts kernel multiplies the sum by the router's scale (Triton's reduction does). To others weights
come scaled: a shared slot then weighs 1, and has the bits of an MLP of its own."""
MAX_GROUPS = 64  # of experts, that native routing keeps on its stack


def kernels_for(op: str) -> tuple[KernelInfo, ...]:
    """The kernels of an op, preferred ones first."""
    return tuple(sorted((kernel for kernel in CATALOG if kernel.op == op), key=lambda kernel: kernel.rank))


def _whole_vectors(fact: str) -> Check:
    def check(facts: FactView) -> Blocked | None:
        odd = {name: [n for n in sizes if n % VECTOR] for name, sizes in facts[fact].items()}
        shown = ", ".join(f"{name} {size}" for name, sizes in odd.items() for size in sizes)
        if not shown:
            return None
        return Blocked(f"native works on whole vectors of {VECTOR}: {shown}", Source.CHECKPOINT)

    return check


def _small_heads(facts: FactView) -> Blocked | None:
    size = max(facts["spec.sizes"].get("head_dim", (0,)))
    return (
        None
        if size <= MAX_HEAD
        else Blocked(f"native heads have at most {MAX_HEAD} elements, not {size}", Source.CHECKPOINT)
    )


def _small_latent(facts: FactView) -> Blocked | None:
    sizes = facts["spec.latent_sizes"]
    rank, odd = max(sizes.get("rank", (0,))), [n for n in sizes.get("nope_dim", ()) if n % 2]
    index = max(sizes.get("index_dim", (0,)))
    if index > MAX_HEAD:
        return Blocked(f"native index keys have at most {MAX_HEAD} elements, not {index}", Source.CHECKPOINT)
    if rank > MAX_RANK:
        return Blocked(f"native latent rows have at most {MAX_RANK} elements, not {rank}", Source.CHECKPOINT)
    return (
        Blocked(f"native latent heads are made of pairs, not of {odd[0]} elements", Source.CHECKPOINT) if odd else None
    )


def _few_groups(facts: FactView) -> Blocked | None:
    groups = facts["spec.router_groups"]
    if groups <= MAX_GROUPS:
        return None
    return Blocked(f"native routes over at most {MAX_GROUPS} groups of experts, not {groups}", Source.CHECKPOINT)


def _known_mixers(facts: FactView) -> Blocked | None:
    others = [word for word in facts["spec.mixers"] if word not in NATIVE_MIXERS]
    return Blocked(f"native attention does not cover {', '.join(others)}", Source.CONSTRAINT) if others else None


def _whole_pages(facts: FactView) -> Blocked | None:
    size = facts["plan.page_size"]
    return (
        None
        if size % VECTOR == 0
        else Blocked(f"native pages are multiples of {VECTOR} rows, not {size}", Source.CONSTRAINT)
    )


def _cache_in_compute_type(facts: FactView) -> Blocked | None:
    cache, compute = facts["plan.kv_dtype"], facts["plan.dtype"]
    return None if cache == compute else Blocked(f"native reads a {compute} cache, not {cache}", Source.CONSTRAINT)


def _one_arrangement(facts: FactView) -> Blocked | None:
    others = sorted({ask for ask in facts["ask.attention"] if ask != NATIVE})
    if not others:
        return None
    return Blocked(
        f"{', '.join(others)} was asked for in a phase, and reads another cache arrangement", Source.CONSTRAINT
    )


def _native_conditions(op: str) -> tuple[Condition, ...]:
    host = (needs_cpu(NATIVE), needs_compiler(NATIVE), needs_vectors(NATIVE))
    if op == SAMPLE:
        return (*host, passed_self_test(NATIVE, "sample"), passed_self_test(NATIVE))
    sizes = "spec.expert_sizes" if op == MOE else "spec.sizes"
    stated = [condition(NATIVE, "sizes", (sizes,), _whole_vectors(sizes))]
    if op == MOE:
        stated += [condition(NATIVE, "groups", ("spec.router_groups",), _few_groups), passed_self_test(NATIVE, "moe")]
    elif op != MATMUL:
        stated += [
            condition(NATIVE, "mixers", ("spec.mixers",), _known_mixers),
            condition(NATIVE, "head", ("spec.sizes",), _small_heads),
            condition(NATIVE, "latent", ("spec.latent_sizes",), _small_latent),
            condition(NATIVE, "latent_self_test", ("spec.mixers", failure(NATIVE, "latent")), _passed_latent_test),
            condition(NATIVE, "page_size", ("plan.page_size",), _whole_pages),
            condition(NATIVE, "kv_dtype", ("plan.kv_dtype", "plan.dtype"), _cache_in_compute_type),
            condition(NATIVE, "arrangement", ("ask.attention",), _one_arrangement),
        ]
    return (*host, *stated, passed_self_test(NATIVE))


def _passed_latent_test(facts: FactView) -> Blocked | None:
    verdict = facts[failure(NATIVE, "latent")] if "mla" in facts["spec.mixers"] else None
    return Blocked(f"self-test {verdict}", Source.HARDWARE) if verdict else None


def _needs_onednn_vectors(facts: FactView) -> Blocked | None:
    isa = facts["caps.isa"]
    if {"avx2", "avx512f"} & set(isa):
        return None
    return Blocked(f"onednn is of use with avx2 or avx512f, not {' '.join(isa)}", Source.HARDWARE)


def _onednn_in_this_type(facts: FactView) -> Blocked | None:
    dtype, isa = facts["plan.dtype"], facts["caps.isa"]
    if dtype != DType.BF16.value or has_onednn_bf16(isa):
        return None
    return Blocked(f"onednn needs avx512bw and avx512vl for {dtype}, not {' '.join(isa)}", Source.HARDWARE)


def has_onednn_bf16(isa: Collection[str]) -> bool:
    """Whether torch's oneDNN computes in bfloat16 on a CPU with these flags; it refuses on others."""
    return {"avx512bw", "avx512vl"} <= set(isa)


def _matmuls_only(op: str) -> Condition:
    def check(_: FactView) -> Blocked:
        what = {MOE: "experts", SAMPLE: "sampling"}.get(op, "attention")
        return Blocked(f"onednn has matmuls only, no {what}", Source.CONSTRAINT)

    return condition(ONEDNN, "absent", (), check)


def _onednn_conditions(op: str) -> tuple[Condition, ...]:
    """Private ops of torch: a passed self-test is required, where native's may still be to come."""
    if op != MATMUL:
        return (_matmuls_only(op), needs_cpu(ONEDNN))
    return (
        needs_cpu(ONEDNN),
        condition(ONEDNN, "isa", ("caps.isa",), _needs_onednn_vectors),
        condition(ONEDNN, "dtype", ("plan.dtype", "caps.isa"), _onednn_in_this_type),
        tested(ONEDNN),
        passed_self_test(ONEDNN),
    )


def _backends(op: str) -> tuple[tuple[str, str, tuple[Condition, ...]], ...]:
    """(backend, what it needs in words, its conditions), preferred ones first."""
    return (
        (NATIVE, "a CPU with avx2 or avx512 and a C++ compiler", _native_conditions(op)),
        (ONEDNN, "a CPU with avx2 or avx512, for matmuls only", _onednn_conditions(op)),
        ("flashinfer", "a CUDA device", (absent("flashinfer"), needs_cuda("flashinfer"))),
        ("triton", "a CUDA device", (absent("triton"), needs_cuda("triton"))),
        (REFERENCE, "torch", (passed_self_test(REFERENCE),)),
    )


_DENSE_OPS = (*(phase_op("attention", phase) for phase in Phase), MATMUL, MOE, SAMPLE)
OPS = (*_DENSE_OPS, *DELTA_OPS)
CATALOG = (
    *(
        KernelInfo(
            op=op,
            backend=backend,
            requires=requires,
            needs=needs,
            exact=backend == NATIVE or (op, backend) == (SAMPLE, REFERENCE),
            rank=rank,
            has_slots=op == MOE and backend in (NATIVE, REFERENCE),
            scale_on=ScaleOn.OUTPUT if op == MOE and backend in SCALES_SUM else ScaleOn.WEIGHTS,
        )
        for op in _DENSE_OPS
        for rank, (backend, needs, requires) in enumerate(_backends(op))
    ),
    *DELTA_KERNELS,
)
