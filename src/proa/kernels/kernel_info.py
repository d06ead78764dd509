"""An entry of the kernel catalogue, and the requirements that entries of several ops share. Owns no table, no torch."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from proa.arch.layout import ScaleOn
from proa.conditions import Blocked, Blocks, Condition, FactView, Source
from proa.units import Phase

Check = Callable[[FactView], Blocked | None]
REFERENCE = "reference"
NATIVE = "native"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelInfo:
    """`exact`: a row's result depends on nothing else in the batch, the chunk or the verified rows. Lower `rank` is
    preferred. `needs` is the requirement in words. Of an experts kernel: `has_slots`, it runs shared experts as slots
    beside the routed ones; `scale_on`, where it wants the router's scale."""

    op: str
    backend: str
    requires: tuple[Condition, ...]
    needs: str
    exact: bool
    rank: int
    has_slots: bool = False
    scale_on: ScaleOn = ScaleOn.WEIGHTS


def phase_op(op: str, phase: Phase) -> str:
    return f"{op}.{phase.value}"


def condition(
    backend: str, name: str, reads: tuple[str, ...], check: Check, blocks: Blocks = Blocks.ALWAYS
) -> Condition:
    return Condition(id=f"kernel.{backend}.{name}", reads=reads, blocks=blocks, check=check)


def absent(backend: str) -> Condition:
    def check(_: FactView) -> Blocked:
        return Blocked(f"no {backend} kernels in this version of Proa", Source.CONSTRAINT)

    return condition(backend, "absent", (), check)


def needs_cuda(backend: str) -> Condition:
    def check(facts: FactView) -> Blocked | None:
        device = facts["plan.device"]
        return None if device == "cuda" else Blocked(f"{backend} needs a CUDA device, not {device}", Source.HARDWARE)

    return condition(backend, "device", ("plan.device",), check)


def needs_cpu(backend: str) -> Condition:
    def check(facts: FactView) -> Blocked | None:
        device = facts["plan.device"]
        return None if device == "cpu" else Blocked(f"{backend} runs on the CPU, not on {device}", Source.HARDWARE)

    return condition(backend, "device", ("plan.device",), check)


def needs_compiler(backend: str) -> Condition:
    def check(facts: FactView) -> Blocked | None:
        return None if facts["caps.has_compiler"] else Blocked("no C++ compiler was found", Source.HARDWARE)

    return condition(backend, "compiler", ("caps.has_compiler",), check)


def needs_vectors(backend: str) -> Condition:
    def check(facts: FactView) -> Blocked | None:
        isa = facts["caps.isa"]
        if has_native_vectors(isa):
            return None
        return Blocked(f"{backend} needs avx2, fma and f16c or avx512f, not {' '.join(isa)}", Source.HARDWARE)

    return condition(backend, "isa", ("caps.isa",), check)


def has_native_vectors(isa: Collection[str]) -> bool:
    """Whether the native kernels have a variant for a CPU with these flags."""
    return "avx512f" in isa or {"avx2", "fma", "f16c"} <= set(isa)


def passed_self_test(backend: str, part: str = "") -> Condition:
    """`part`: of native ops that are judged by themselves (kernels/verdicts.py: PARTS). Untested ones may run."""
    name, fact = f"{part}_self_test" if part else "self_test", failure(backend, part)

    def check(facts: FactView) -> Blocked | None:
        verdict = facts[fact]
        return Blocked(f"self-test {verdict}", Source.HARDWARE) if verdict else None

    return condition(backend, name, (fact,), check)


def tested(backend: str) -> Condition:
    """For kernels of other packages: they run only after a self-test, which `passed_self_test` then judges."""
    fact = f"caps.verdict.{backend}"

    def check(facts: FactView) -> Blocked | None:
        if facts[fact] is not None:
            return None
        return Blocked(
            "no self-test on this host yet: `proa doctor --build` or the first `proa run` does it", Source.HARDWARE
        )

    return condition(backend, "tested", (fact,), check)


def failure(backend: str, part: str = "") -> str:
    """The fact that says how a kernel's self-test failed; None of one that passed or is untested."""
    return f"caps.failed.{backend}{'.' if part else ''}{part}"
