"""This host's native kernels, compiled once per machine, for tests that need the real thing.

PROA_TEST_ISA has them compiled for fewer CPU flags than this host has; tests/kernels/test_avx2_variant.py uses it.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from proa.env import TEST_ISA, read_environment
from proa.kernels.caps import read_caps
from proa.kernels.kernel_info import has_native_vectors
from proa.kernels.probing.probe import Probed, probe
from proa.kernels.verdicts import PASSED
from proa.loading.build import build
from proa.loading.progress import Silent
from proa.plan.planned import Planned
from proa.runner.runner import Runner
from tests.factories.headers import planned
from tests.factories.runners import room_of


def probed() -> Probed:
    caps, isa = read_caps("cpu"), os.environ.get(TEST_ISA.name)
    if isa:
        caps = replace(caps, isa=tuple(isa.split()))
    return probe(caps, read_environment().cache_dir, lambda line: None)


def why_not(found: Probed) -> str | None:
    """Why this host cannot have native kernels at all; None where it can. Kernels that fail here are a failed test."""
    if found.caps.compiler is None:
        return "no C++ compiler"
    if not has_native_vectors(found.caps.isa):
        return f"native kernels have no variant for {' '.join(found.caps.isa)}"
    if found.library is None or found.caps.kernels["native"] != PASSED:
        raise RuntimeError(f"native kernels cannot be used on a host that should: {found.caps.kernels.get('native')}")
    return None


def native_plan(path: Path, found: Probed, **asks: Any) -> Planned:
    return planned(path, caps=replace(found.caps, device="cpu"), **asks).target


def native_runner(path: Path, found: Probed, *, num_pages: int = 64, gives_hidden: bool = False, **asks: Any) -> Runner:
    plan = native_plan(path, found, **asks)
    built = build(plan, Silent(), found.library, None)
    return Runner(
        plan.plan, plan.spec, built.model, built.ledger, num_pages, gives_hidden=gives_hidden, room=room_of(plan)
    )
