"""Every kernel by op and backend, with what it requires. Owns no kernel code and makes no choice: plan/rules do.

Backends that users know from elsewhere are listed too, so that asking for one says why it cannot run.
"""

from __future__ import annotations

from dataclasses import dataclass

from proa.conditions import Blocked, Blocks, Condition, FactView, Source
from proa.units import Phase

REFERENCE = "reference"


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


def _passed_self_test(backend: str) -> Condition:
    def check(facts: FactView) -> Blocked | None:
        verdict: str = facts["caps.kernels"].get(backend, "")
        return Blocked(f"self-test {verdict}", Source.HARDWARE) if verdict.startswith("failed") else None

    return Condition(id=f"kernel.{backend}.self_test", reads=("caps.kernels",), blocks=Blocks.ALWAYS, check=check)


def _backends() -> tuple[tuple[str, str, tuple[Condition, ...]], ...]:
    """(backend, what it needs in words, its conditions), preferred ones first."""
    compiler = Condition(
        id="kernel.native.compiler", reads=("caps.has_compiler",), blocks=Blocks.ALWAYS, check=_needs_compiler
    )
    return (
        ("native", "a CPU and a C++ compiler", (_absent("native"), _needs_cpu("native"), compiler)),
        ("onednn", "a CPU", (_absent("onednn"), _needs_cpu("onednn"))),
        ("flashinfer", "a CUDA device", (_absent("flashinfer"), _needs_cuda("flashinfer"))),
        ("triton", "a CUDA device", (_absent("triton"), _needs_cuda("triton"))),
        (REFERENCE, "torch", (_passed_self_test(REFERENCE),)),
    )


BACKENDS = tuple(name for name, _, _ in _backends())
OPS = (*(phase_op("attention", phase) for phase in Phase), "matmul")
CATALOG = tuple(
    KernelInfo(op=op, backend=backend, requires=requires, needs=needs, exact=False, rank=rank)
    for op in OPS
    for rank, (backend, needs, requires) in enumerate(_backends())
)
