"""Kernels of linear attention by phase and backend, with what each requires. Owns no kernel code and makes no choice.

Notation: `gdn` decays by head, `kda` by channel (arch/delta_blocks.py). A runner's default is a kernel that `auto`
prefers in one phase, where it can run, for runners of some kinds only; nobody asked for it, and it stands in no intent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from proa.conditions import Blocked, Blocks, Condition, FactView, Source
from proa.kernels.kernel_info import (
    NATIVE,
    REFERENCE,
    KernelInfo,
    absent,
    condition,
    needs_compiler,
    needs_cpu,
    needs_cuda,
    needs_vectors,
    passed_self_test,
    phase_op,
    tested,
)
from proa.units import DType, Phase

DELTA = "delta"
GDN, KDA = "gdn", "kda"
TORCH, TRITON, FLASHINFER = "torch", "triton", "flashinfer"
DELTA_OPS = tuple(phase_op(DELTA, phase) for phase in Phase)
NATIVE_VALUES, NATIVE_KEY, NATIVE_TAPS = 16, 256, 8  # of csrc/delta.h: value heads in whole vectors; at most the others
TRITON_KEY, TRITON_SM = 256, (8, 0)
FLASHINFER_DIM = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    """`least` and later, up to but without `below`."""

    least: str
    below: str

    def holds(self, text: str) -> bool:
        return version(self.least) <= version(text) < version(self.below)

    def __str__(self) -> str:
        return f">={self.least},<{self.below}"


PACKAGES: Mapping[str, Mapping[str, Versions]] = MappingProxyType(
    {
        TRITON: {"triton": Versions(least="3.3", below="4"), "fla-core": Versions(least="0.6", below="0.7")},
        FLASHINFER: {"flashinfer-python": Versions(least="0.7", below="0.8")},
    }
)
"""By backend, as its extra in pyproject.toml: each was written after the sources of the least version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What FlashInfer's delta kernels ask for on one generation of GPUs: at least that CUDA (None: any), at most that
    many rows of a prefill, states of that type."""

    cuda: tuple[int, int] | None
    chunk: int
    state: DType


FLASHINFER_SM: Mapping[int, Limits] = MappingProxyType(
    {
        9: Limits(cuda=None, chunk=32768, state=DType.F32),
        10: Limits(cuda=(13, 0), chunk=8192, state=DType.BF16),
    }
)
"""By the major number of the compute capability; FlashInfer has no delta kernels for others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerDefault:
    """`backend` goes before every other in `phase` for a runner on `device` all of whose linear attention is `kind`."""

    phase: Phase
    backend: str
    kind: str
    device: str


DEFAULTS = (RunnerDefault(phase=Phase.PREFILL, backend=FLASHINFER, kind=GDN, device="cuda"),)


def _has_packages(backend: str) -> Condition:
    """Installed, and of a version whose interface the adapter was written for."""
    bounds = PACKAGES[backend]

    def check(facts: FactView) -> Blocked | None:
        found = {name: facts[f"caps.library.{name}"] for name in bounds}
        missing = [name for name, text in found.items() if text is None]
        other = [
            f"{name} {bounds[name]}, not {text}"
            for name, text in found.items()
            if text is not None and not bounds[name].holds(text)
        ]
        if not missing and not other:
            return None
        said = "; ".join([*([f"{' and '.join(missing)}, not installed"] if missing else []), *other])
        return Blocked(f"{backend} needs {said} (pip install 'proa[{backend}]')", Source.HARDWARE)

    return condition(backend, "library", tuple(f"caps.library.{name}" for name in bounds), check)


def _computes_in_bfloat16(backend: str) -> Condition:
    """In float32 their matrix products would be TF32, or there are none."""

    def check(facts: FactView) -> Blocked | None:
        dtype = facts["plan.dtype"]
        if dtype == DType.BF16.value:
            return None
        return Blocked(f"{backend} computes in bfloat16, not {dtype}", Source.CONSTRAINT)

    return condition(backend, "dtype", ("plan.dtype",), check)


def _kind(backend: str, *kinds: str) -> Condition:
    def check(facts: FactView) -> Blocked | None:
        others = [kind for kind in facts["spec.delta_kinds"] if kind not in kinds]
        if not others:
            return None
        return Blocked(f"{backend} has {' and '.join(kinds)}, no {' or '.join(others)}", Source.CHECKPOINT)

    return condition(backend, "kind", ("spec.delta_kinds",), check)


def _state(backend: str) -> Condition:
    def check(facts: FactView) -> Blocked | None:
        state = facts["plan.state_dtype"]
        if state == DType.F32.value:
            return None
        return Blocked(f"{backend} keeps states in float32, not {state}", Source.CONSTRAINT)

    return condition(backend, "state_dtype", ("plan.state_dtype",), check)


def _chains(backend: str, phase: Phase) -> tuple[Condition, ...]:
    """A verify works through chains: a tree's branches would each need a state of their own."""

    def check(facts: FactView) -> Blocked | None:
        return Blocked(f"{backend} verifies chains, no trees", Source.CONSTRAINT) if facts["verify.is_tree"] else None

    return (condition(backend, "trees", ("verify.is_tree",), check),) if phase is Phase.VERIFY else ()


def _not_exact(backend: str, blocks: Blocks) -> Condition:
    def check(facts: FactView) -> Blocked | None:
        if not facts["ask.exact"]:
            return None
        return Blocked(
            f"exact numerics were asked for, and {backend} sums in another order by batch", Source.CONSTRAINT
        )

    return condition(backend, "not_exact", ("ask.exact",), check, blocks)


def _sizes(backend: str, *, values: int, key: int, taps: int | None) -> Condition:
    def check(facts: FactView) -> Blocked | None:
        sizes = facts["spec.delta_sizes"]
        wrong = [f"value_dim {size}" for size in sizes.get("value_dim", ()) if size % values]
        wrong += [f"key_dim {size}" for size in sizes.get("key_dim", ()) if size > key]
        wrong += [f"taps {size}" for size in sizes.get("taps", ()) if taps is not None and size > taps]
        if not wrong:
            return None
        limits = [f"a multiple of {values} as value_dim"] if values > 1 else []
        limits += [f"at most {key} as key_dim", *([f"{taps} taps"] if taps is not None else [])]
        return Blocked(f"{backend} takes {', '.join(limits)}; here: {', '.join(wrong)}", Source.CHECKPOINT)

    return condition(backend, "sizes", ("spec.delta_sizes",), check)


def version(text: str | None) -> tuple[int, ...]:
    """`9.0` as numbers that compare; nothing known is less than everything."""
    return tuple(int(part) for part in (text or "").split(".") if part.isdecimal())


def _triton_sm(facts: FactView) -> Blocked | None:
    sm = facts["caps.sm"]
    if version(sm) >= TRITON_SM:
        return None
    return Blocked(f"triton needs compute capability {TRITON_SM[0]}.{TRITON_SM[1]}, not {sm}", Source.HARDWARE)


def _flashinfer_sm(facts: FactView) -> Blocked | None:
    if limits_of(facts["caps.sm"]) is not None:
        return None
    majors = " or ".join(f"{major}.x" for major in FLASHINFER_SM)
    return Blocked(f"flashinfer has delta kernels for SM {majors}, not {facts['caps.sm']}", Source.HARDWARE)


def limits_of(sm: str | None) -> Limits | None:
    """FlashInfer's on a GPU of that compute capability; None where it has no delta kernels."""
    return FLASHINFER_SM.get(next(iter(version(sm)), 0))


def _flashinfer_cuda(facts: FactView) -> Blocked | None:
    limits, cuda = limits_of(facts["caps.sm"]), facts["caps.cuda_version"]
    if limits is None or limits.cuda is None or version(cuda) >= limits.cuda:
        return None
    least = ".".join(map(str, limits.cuda))
    return Blocked(f"flashinfer needs CUDA {least} on SM {facts['caps.sm']}, not {cuda or 'unknown'}", Source.HARDWARE)


def _flashinfer_chunk(facts: FactView) -> Blocked | None:
    limits, chunk = limits_of(facts["caps.sm"]), facts["schedule.prefill_chunk"]
    if limits is None or chunk <= limits.chunk:
        return None
    return Blocked(
        f"flashinfer prefills at most {limits.chunk} rows on SM {facts['caps.sm']}, not {chunk}", Source.CONSTRAINT
    )


def _flashinfer_state(facts: FactView) -> Blocked | None:
    limits, state = limits_of(facts["caps.sm"]), facts["plan.state_dtype"]
    if limits is None or state == limits.state.value:
        return None
    return Blocked(
        f"flashinfer keeps states in {limits.state.value} on SM {facts['caps.sm']}, not {state}", Source.CONSTRAINT
    )


def _flashinfer_heads(facts: FactView) -> Blocked | None:
    sizes = facts["spec.delta_sizes"]
    wrong = [f"{name} {n}" for name in ("key_dim", "value_dim") for n in sizes.get(name, ()) if n != FLASHINFER_DIM]
    return (
        Blocked(f"flashinfer has heads of {FLASHINFER_DIM}, not {', '.join(wrong)}", Source.CHECKPOINT)
        if wrong
        else None
    )


def _flashinfer(phase: Phase) -> Iterator[Condition]:
    yield needs_cuda(FLASHINFER)
    yield _has_packages(FLASHINFER)
    yield _computes_in_bfloat16(FLASHINFER)
    yield _kind(FLASHINFER, GDN)
    yield condition(FLASHINFER, "sm", ("caps.sm",), _flashinfer_sm)
    yield condition(FLASHINFER, "cuda", ("caps.sm", "caps.cuda_version"), _flashinfer_cuda)
    yield condition(FLASHINFER, "state_dtype", ("caps.sm", "plan.state_dtype"), _flashinfer_state)
    yield condition(FLASHINFER, "heads", ("spec.delta_sizes",), _flashinfer_heads)
    if phase is Phase.PREFILL:
        yield condition(FLASHINFER, "chunk", ("caps.sm", "schedule.prefill_chunk"), _flashinfer_chunk)
    yield _not_exact(FLASHINFER, Blocks.ALWAYS)
    yield tested(FLASHINFER)
    yield passed_self_test(FLASHINFER)
    yield from _chains(FLASHINFER, phase)


def _own(phase: Phase) -> Iterator[tuple[str, str, bool, tuple[Condition, ...]]]:
    """(backend, what it needs in words, whether it is exact, its conditions), preferred ones first."""
    chains = {backend: _chains(backend, phase) for backend in (NATIVE, TRITON, TORCH, REFERENCE)}
    sizes = _sizes(NATIVE, values=NATIVE_VALUES, key=NATIVE_KEY, taps=NATIVE_TAPS)
    host = (needs_cpu(NATIVE), needs_compiler(NATIVE), needs_vectors(NATIVE))
    tests = (passed_self_test(NATIVE), passed_self_test(NATIVE, DELTA))
    native = (*host, sizes, _state(NATIVE), *tests, *chains[NATIVE])
    yield NATIVE, "a CPU with avx2 or avx512 and a C++ compiler", True, native
    sm = condition(TRITON, "sm", ("caps.sm",), _triton_sm)
    keys = _sizes(TRITON, values=1, key=TRITON_KEY, taps=None)
    device = (needs_cuda(TRITON), _has_packages(TRITON), _computes_in_bfloat16(TRITON), sm, keys, _state(TRITON))
    triton = (*device, _not_exact(TRITON, Blocks.AUTO), tested(TRITON), passed_self_test(TRITON), *chains[TRITON])
    yield TRITON, "a CUDA device and fla-core", False, triton
    torch = (_state(TORCH), _not_exact(TORCH, Blocks.AUTO), passed_self_test(TORCH), *chains[TORCH])
    yield TORCH, "torch", False, torch
    yield FLASHINFER, "a CUDA device and flashinfer-python", False, tuple(_flashinfer(phase))
    yield REFERENCE, "torch", True, (_state(REFERENCE), passed_self_test(REFERENCE), *chains[REFERENCE])


_EVERY = tuple(Phase)
_ELSEWHERE = (
    ("cutedsl", (Phase.PREFILL, Phase.DECODE), (GDN, KDA)),
    ("flashkda", (Phase.PREFILL,), (KDA,)),
    ("nvidia_kda", (Phase.PREFILL,), (KDA,)),
    ("ptx_kda", (Phase.PREFILL,), (KDA,)),
    ("helion", _EVERY, (KDA,)),
    ("intel_xpu", (Phase.PREFILL, Phase.DECODE), (GDN,)),
    ("nv_cutedsl", (Phase.VERIFY,), (KDA,)),
)
"""(backend, phases, kinds) of kernels that users may know from other engines."""


def _kernels() -> Iterator[KernelInfo]:
    for phase in Phase:
        op = phase_op(DELTA, phase)
        for rank, (backend, needs, exact, requires) in enumerate(_own(phase)):
            yield KernelInfo(op=op, backend=backend, requires=requires, needs=needs, exact=exact, rank=rank)
    for backend, phases, kinds in _ELSEWHERE:
        for phase in phases:
            requires = (absent(backend), _kind(backend, *kinds))
            op, needs = phase_op(DELTA, phase), "another engine"
            yield KernelInfo(op=op, backend=backend, requires=requires, needs=needs, exact=False, rank=len(_ELSEWHERE))


DELTA_KERNELS = tuple(_kernels())
ELSEWHERE = frozenset(backend for backend, _, _ in _ELSEWHERE)
