"""Every kernel by op and backend, with what it requires. Owns no kernel code and makes no choice: plan/rules do.

Backends that users know from elsewhere are listed too, so that asking for one says why it cannot run.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from proa.conditions import Blocked, Blocks, Condition, FactView, Source
from proa.units import DType, Phase, Storage

REFERENCE = "reference"
NATIVE = "native"
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
MAX_HEAD = 256  # elements of a head that native attention keeps on its stack


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelInfo:
    """`exact`: a row's result depends on nothing else in the batch, the chunk or the verified rows. Lower `rank` is
    preferred. `needs` is the requirement in words."""

    op: str
    backend: str
    requires: tuple[Condition, ...]
    needs: str
    exact: bool
    rank: int


def kernels_for(op: str) -> tuple[KernelInfo, ...]:
    """The kernels of an op, preferred ones first."""
    return tuple(sorted((kernel for kernel in CATALOG if kernel.op == op), key=lambda kernel: kernel.rank))


def phase_op(op: str, phase: Phase) -> str:
    return f"{op}.{phase.value}"


def _absent(backend: str) -> Condition:
    def check(_: FactView) -> Blocked:
        return Blocked(f"no {backend} kernels in this version of Proa", Source.CONSTRAINT)

    return Condition(id=f"kernel.{backend}.absent", reads=(), blocks=Blocks.ALWAYS, check=check)


def _needs_cuda(backend: str) -> Condition:
    def check(facts: FactView) -> Blocked | None:
        device = facts["plan.device"]
        return None if device == "cuda" else Blocked(f"{backend} needs a CUDA device, not {device}", Source.HARDWARE)

    return Condition(id=f"kernel.{backend}.device", reads=("plan.device",), blocks=Blocks.ALWAYS, check=check)


def _needs_cpu(backend: str) -> Condition:
    def check(facts: FactView) -> Blocked | None:
        device = facts["plan.device"]
        return None if device == "cpu" else Blocked(f"{backend} runs on the CPU, not on {device}", Source.HARDWARE)

    return Condition(id=f"kernel.{backend}.device", reads=("plan.device",), blocks=Blocks.ALWAYS, check=check)


def _needs_compiler(facts: FactView) -> Blocked | None:
    return None if facts["caps.has_compiler"] else Blocked("no C++ compiler was found", Source.HARDWARE)


def _needs_vectors(facts: FactView) -> Blocked | None:
    isa = facts["caps.isa"]
    if has_native_vectors(isa):
        return None
    return Blocked(f"native needs avx2, fma and f16c or avx512f, not {' '.join(isa)}", Source.HARDWARE)


def has_native_vectors(isa: Collection[str]) -> bool:
    """Whether the native kernels have a variant for a CPU with these flags."""
    return "avx512f" in isa or {"avx2", "fma", "f16c"} <= set(isa)


def _whole_vectors(facts: FactView) -> Blocked | None:
    odd = {name: size for name, size in facts["spec.sizes"].items() if size % VECTOR}
    if not odd:
        return None
    shown = ", ".join(f"{name} {size}" for name, size in odd.items())
    return Blocked(f"native works on whole vectors of {VECTOR}: {shown}", Source.CHECKPOINT)


def _small_heads(facts: FactView) -> Blocked | None:
    size = facts["spec.sizes"]["head_dim"]
    return (
        None
        if size <= MAX_HEAD
        else Blocked(f"native heads have at most {MAX_HEAD} elements, not {size}", Source.CHECKPOINT)
    )


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
    always = {
        "compiler": (("caps.has_compiler",), _needs_compiler),
        "isa": (("caps.isa",), _needs_vectors),
        "sizes": (("spec.sizes",), _whole_vectors),
    }
    if op != "matmul":
        always |= {
            "head": (("spec.sizes",), _small_heads),
            "page_size": (("plan.page_size",), _whole_pages),
            "kv_dtype": (("plan.kv_dtype", "plan.dtype"), _cache_in_compute_type),
            "arrangement": (("ask.attention",), _one_arrangement),
        }
    stated = (
        Condition(id=f"kernel.native.{name}", reads=reads, blocks=Blocks.ALWAYS, check=check)
        for name, (reads, check) in always.items()
    )
    return (_needs_cpu(NATIVE), *stated, _passed_self_test(NATIVE))


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


def _tested(facts: FactView) -> Blocked | None:
    if facts["caps.kernels"].get(ONEDNN) is not None:
        return None
    return Blocked(
        "no self-test on this host yet: `proa doctor --build` or the first `proa run` does it", Source.HARDWARE
    )


def _no_attention(_: FactView) -> Blocked:
    return Blocked("onednn has matmuls only, no attention", Source.CONSTRAINT)


def _onednn_conditions(op: str) -> tuple[Condition, ...]:
    """Private ops of torch: a passed self-test is required, where native's may still be to come."""
    if op != "matmul":
        absent = Condition(id="kernel.onednn.absent", reads=(), blocks=Blocks.ALWAYS, check=_no_attention)
        return (absent, _needs_cpu(ONEDNN))
    stated = (
        ("isa", ("caps.isa",), _needs_onednn_vectors),
        ("dtype", ("plan.dtype", "caps.isa"), _onednn_in_this_type),
        ("tested", ("caps.kernels",), _tested),
    )
    conditions = (
        Condition(id=f"kernel.onednn.{name}", reads=reads, blocks=Blocks.ALWAYS, check=check)
        for name, reads, check in stated
    )
    return (_needs_cpu(ONEDNN), *conditions, _passed_self_test(ONEDNN))


def _passed_self_test(backend: str) -> Condition:
    def check(facts: FactView) -> Blocked | None:
        verdict: str = facts["caps.failed_kernels"].get(backend, "")
        return Blocked(f"self-test {verdict}", Source.HARDWARE) if verdict else None

    return Condition(
        id=f"kernel.{backend}.self_test", reads=("caps.failed_kernels",), blocks=Blocks.ALWAYS, check=check
    )


def _backends(op: str) -> tuple[tuple[str, str, tuple[Condition, ...]], ...]:
    """(backend, what it needs in words, its conditions), preferred ones first."""
    return (
        (NATIVE, "a CPU with avx2 or avx512 and a C++ compiler", _native_conditions(op)),
        (ONEDNN, "a CPU with avx2 or avx512, for matmuls only", _onednn_conditions(op)),
        ("flashinfer", "a CUDA device", (_absent("flashinfer"), _needs_cuda("flashinfer"))),
        ("triton", "a CUDA device", (_absent("triton"), _needs_cuda("triton"))),
        (REFERENCE, "torch", (_passed_self_test(REFERENCE),)),
    )


OPS = (*(phase_op("attention", phase) for phase in Phase), "matmul")
CATALOG = tuple(
    KernelInfo(op=op, backend=backend, requires=requires, needs=needs, exact=backend == NATIVE, rank=rank)
    for op in OPS
    for rank, (backend, needs, requires) in enumerate(_backends(op))
)
BACKENDS = tuple(dict.fromkeys(kernel.backend for kernel in CATALOG))
