"""The catalogue of linear attention: every condition can hold and can fail, every known name says why it cannot run."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from proa.arch.delta_blocks import Decay
from proa.arch.registry import FAMILIES, read_config
from proa.checkpoint.open import open_checkpoint
from proa.conditions import Blocked, Condition, FactView, evaluate
from proa.kernels.catalog import CATALOG, OPS, kernels_for
from proa.kernels.delta_catalog import (
    DEFAULTS,
    DELTA_KERNELS,
    DELTA_OPS,
    ELSEWHERE,
    NATIVE_KEY,
    NATIVE_TAPS,
    NATIVE_VALUES,
    PACKAGES,
    version,
)
from proa.kernels.kernel_info import KernelInfo
from proa.kernels.native import delta as native
from proa.plan.families import families_json, families_table, linear_kernels
from proa.plan.shapes import delta_kinds
from proa.units import Phase
from tests.factories.hybrid_checkpoints import HYBRID_FAMILIES
from tests.plan.hybrid_headers import write_hybrid_headers

OWN = ("native", "triton", "torch", "flashinfer", "reference")
GOOD: dict[str, Any] = {
    "plan.device": "cuda", "plan.state_dtype": "float32", "spec.delta_kinds": ["gdn"], "ask.exact": False,
    "spec.delta_sizes": {"key_dim": [128], "value_dim": [128], "taps": [4]}, "verify.is_tree": False,
    "schedule.prefill_chunk": 512, "caps.has_compiler": True, "caps.isa": ["avx512f"], "caps.sm": "9.0",
    "caps.cuda_version": "12.4", "caps.library.triton": "3.5", "caps.library.fla-core": "0.6.2",
    "caps.library.flashinfer-python": "0.7.4", "plan.dtype": "bfloat16",
    "caps.verdict.triton": "passed", "caps.verdict.flashinfer": "passed",
    **{f"caps.failed.{name}": None for name in (*OWN, "native.delta")},
}  # fmt: skip
ON_CPU = {"plan.device": "cpu"}
SM100 = {"caps.sm": "10.0", "plan.state_dtype": "bfloat16", "caps.cuda_version": "13.0"}


def sizes(**changes: int) -> dict[str, Any]:
    return {
        "spec.delta_sizes": {"key_dim": [128], "value_dim": [128], "taps": [4]} | {k: [v] for k, v in changes.items()}
    }


TREES, EXACT, BF16 = {"verify.is_tree": True}, {"ask.exact": True}, {"plan.state_dtype": "bfloat16"}
BREAKS: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("native", "device", ON_CPU, {"plan.device": "cuda"}),
    ("native", "compiler", ON_CPU, {"caps.has_compiler": False}),
    ("native", "isa", ON_CPU, {"caps.isa": ["avx2"]}),
    ("native", "sizes", ON_CPU, sizes(value_dim=24)),
    ("native", "sizes", ON_CPU, sizes(key_dim=257)),
    ("native", "sizes", ON_CPU, sizes(taps=9)),
    ("native", "state_dtype", ON_CPU, BF16),
    ("native", "self_test", ON_CPU, {"caps.failed.native": "failed: x"}),
    ("native", "delta_self_test", ON_CPU, {"caps.failed.native.delta": "failed: x"}),
    ("native", "trees", ON_CPU, TREES),
    ("triton", "device", {}, ON_CPU),
    ("triton", "library", {}, {"caps.library.fla-core": None}),
    ("triton", "library", {}, {"caps.library.triton": None}),
    ("triton", "library", {}, {"caps.library.fla-core": "0.5.1"}),
    ("triton", "library", {}, {"caps.library.fla-core": "0.7"}),
    ("triton", "library", {}, {"caps.library.triton": "3.2.0"}),
    ("triton", "dtype", {}, {"plan.dtype": "float32"}),
    ("triton", "sm", {}, {"caps.sm": "7.5"}),
    ("triton", "sizes", {}, sizes(key_dim=512)),
    ("triton", "state_dtype", {}, BF16),
    ("triton", "not_exact", {}, EXACT),
    ("triton", "tested", {}, {"caps.verdict.triton": None}),
    ("triton", "self_test", {}, {"caps.failed.triton": "failed: x"}),
    ("triton", "trees", {}, TREES),
    ("torch", "state_dtype", {}, BF16),
    ("torch", "not_exact", {}, EXACT),
    ("torch", "self_test", {}, {"caps.failed.torch": "failed: x"}),
    ("torch", "trees", {}, TREES),
    ("flashinfer", "device", {}, ON_CPU),
    ("flashinfer", "library", {}, {"caps.library.flashinfer-python": None}),
    ("flashinfer", "library", {}, {"caps.library.flashinfer-python": "0.6.9"}),
    ("flashinfer", "library", {}, {"caps.library.flashinfer-python": "0.8.0"}),
    ("flashinfer", "dtype", {}, {"plan.dtype": "float32"}),
    ("flashinfer", "kind", {}, {"spec.delta_kinds": ["kda"]}),
    ("flashinfer", "sm", {}, {"caps.sm": "8.9"}),
    ("flashinfer", "sm", {}, {"caps.sm": None}),
    ("flashinfer", "cuda", SM100, {"caps.cuda_version": "12.9"}),
    ("flashinfer", "cuda", SM100, {"caps.cuda_version": None}),
    ("flashinfer", "state_dtype", {}, BF16),
    ("flashinfer", "state_dtype", SM100, {"plan.state_dtype": "float32"}),
    ("flashinfer", "heads", {}, sizes(key_dim=64)),
    ("flashinfer", "heads", {}, sizes(value_dim=256)),
    ("flashinfer", "chunk", {}, {"schedule.prefill_chunk": 32769}),
    ("flashinfer", "chunk", SM100, {"schedule.prefill_chunk": 8193}),
    ("flashinfer", "not_exact", {}, EXACT),
    ("flashinfer", "tested", {}, {"caps.verdict.flashinfer": None}),
    ("flashinfer", "self_test", {}, {"caps.failed.flashinfer": "failed: x"}),
    ("flashinfer", "trees", {}, TREES),
    ("reference", "state_dtype", {}, BF16),
    ("reference", "self_test", {}, {"caps.failed.reference": "failed: x"}),
    ("reference", "trees", {}, TREES),
]


def conditions_of(backend: str) -> list[Condition]:
    return [one for kernel in DELTA_KERNELS if kernel.backend == backend for one in kernel.requires]


@pytest.mark.parametrize(("backend", "name", "host", "change"), BREAKS)
def test_every_condition_can_hold_and_can_fail(
    backend: str, name: str, host: dict[str, Any], change: dict[str, Any]
) -> None:
    found = [one for one in conditions_of(backend) if one.id == f"kernel.{backend}.{name}"]
    assert found
    for condition in found:
        assert condition.check(FactView(GOOD | host, condition.reads)) is None
        assert isinstance(condition.check(FactView(GOOD | host | change, condition.reads)), Blocked)


@pytest.mark.parametrize(
    ("backend", "change", "says"),
    [
        ("triton", {"fla-core": None}, "triton needs fla-core, not installed (pip install 'proa[triton]')"),
        ("triton", {"fla-core": None, "triton": None}, "triton needs triton and fla-core, not installed (pip "),
        ("triton", {"fla-core": "0.5.1"}, "triton needs fla-core >=0.6,<0.7, not 0.5.1 (pip install 'proa[triton]')"),
        ("flashinfer", {"flashinfer-python": "0.8.0"}, "flashinfer needs flashinfer-python >=0.7,<0.8, not 0.8.0 (pip"),
    ],
)
def test_what_is_not_installed_is_said_with_the_command_that_installs_it(
    backend: str, change: dict[str, Any], says: str
) -> None:
    facts = GOOD | {f"caps.library.{name}": text for name, text in change.items()}
    (one, *_) = [c for c in conditions_of(backend) if c.id == f"kernel.{backend}.library"]
    blocked = one.check(FactView(facts, one.reads))
    assert blocked is not None and blocked.reason.startswith(says)


def test_the_extras_install_the_versions_that_the_conditions_ask_for() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    for backend, packages in PACKAGES.items():
        assert set(project["optional-dependencies"][backend]) == {f"{name}{one}" for name, one in packages.items()}


def test_no_condition_is_left_out_above() -> None:
    stated = {one.id for backend in OWN for one in conditions_of(backend)}
    assert stated == {f"kernel.{backend}.{name}" for backend, name, _, _ in BREAKS}


@pytest.mark.parametrize("facts", [GOOD, GOOD | ON_CPU, GOOD | SM100])
def test_some_kernel_runs_every_phase(facts: dict[str, Any]) -> None:
    for op in DELTA_OPS:
        able = [k.backend for k in kernels_for(op) if not any(v.blocked for v in evaluate(k.requires, facts))]
        assert able


def test_only_reference_and_native_are_exact() -> None:
    assert {kernel.backend for kernel in DELTA_KERNELS if kernel.exact} == {"reference", "native"}


def test_f33_trees_are_a_matter_of_the_verify_alone() -> None:
    for kernel in own_kernels():
        is_asked = any("verify.is_tree" in condition.reads for condition in kernel.requires)
        assert is_asked is (kernel.op == "delta.verify")


def own_kernels() -> list[KernelInfo]:
    return [kernel for kernel in DELTA_KERNELS if kernel.backend in OWN]


def test_kernels_known_from_elsewhere_are_named_and_none_of_them_can_run() -> None:
    known = {"cutedsl", "flashkda", "nvidia_kda", "ptx_kda", "helion", "intel_xpu", "nv_cutedsl"}
    assert known == ELSEWHERE == {kernel.backend for kernel in DELTA_KERNELS} - set(OWN)
    for kernel in DELTA_KERNELS:
        if kernel.backend in known:
            blocked = [v.blocked.reason for v in evaluate(kernel.requires, GOOD) if v.blocked]
            assert blocked[0] == f"no {kernel.backend} kernels in this version of Proa"


def test_the_catalogue_holds_them_all_and_reads_no_fact_that_it_does_not_declare() -> None:
    assert set(DELTA_KERNELS) <= set(CATALOG) and set(DELTA_OPS) <= set(OPS)
    for kernel in DELTA_KERNELS:
        evaluate(kernel.requires, GOOD)


def test_the_limits_of_native_are_those_of_its_code() -> None:
    assert (NATIVE_VALUES, NATIVE_KEY, NATIVE_TAPS) == (native.VECTOR, native.MAX_KEY, native.MAX_TAPS)


@pytest.mark.parametrize(("text", "numbers"), [("9.0", (9, 0)), ("10.3", (10, 3)), (None, ()), ("13", (13,))])
def test_versions_compare_as_numbers(text: str | None, numbers: tuple[int, ...]) -> None:
    assert version(text) == numbers
    assert version("10.0") > version("9.0") > version(None)


# explain --families


def test_families_show_the_kernels_that_decide_linear_attention_by_phase() -> None:
    listed = {entry["family"]: entry for entry in families_json(FAMILIES) if "family" in entry}
    assert listed["llama"]["linear_attention"] is None
    for family, kind in (("qwen3_next", "gdn"), ("qwen3_5", "gdn"), ("qwen3_5_moe", "gdn"), ("kimi_linear", "kda")):
        shown = listed[family]["linear_attention"]
        assert (shown["kind"], set(shown["kernels"])) == (kind, {"prefill", "decode", "verify"})
        assert shown["defaults"] == ({"prefill": "flashinfer"} if kind == "gdn" else {})
        assert ("flashinfer" in shown["kernels"]["prefill"]) is (kind == "gdn")
        assert "kernel.native.sizes" in shown["kernels"]["decode"]["native"]
    text = families_table(FAMILIES)
    assert "linear attention, gdn:  prefill native, triton, torch, flashinfer, reference; decode" in text
    assert "linear attention, kda:  prefill native, triton, torch, reference; decode" in text
    assert "by default flashinfer in prefill on cuda" in text
    assert [k.backend for k in linear_kernels("kda", Phase.VERIFY)] == ["native", "triton", "torch", "reference"]


@pytest.mark.parametrize("name", HYBRID_FAMILIES)
def test_a_family_that_says_which_linear_attention_it_has_parses_that_one(tmp_path: Any, name: str) -> None:
    reading = read_config(open_checkpoint(write_hybrid_headers(tmp_path / name, name)).config)
    assert reading.family.linear is (Decay.CHANNEL if name == "kimi_linear" else Decay.HEAD)
    assert delta_kinds(reading.spec) == ["kda" if name == "kimi_linear" else "gdn"]


def test_defaults_are_kernels_that_exist_in_their_phase() -> None:
    for default in DEFAULTS:
        assert default.backend in {kernel.backend for kernel in kernels_for(f"delta.{default.phase.value}")}
