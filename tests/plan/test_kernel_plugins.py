"""Kernels that other packages bring: found by entry point, chosen where their own conditions hold, never otherwise."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

from proa.conditions import Source
from proa.errors import KernelUnavailable, PlanError
from proa.kernels.bind import bind
from proa.kernels.caps import DeviceCaps, caps_from_json, caps_to_json
from proa.kernels.delta_catalog import DELTA_KERNELS
from proa.kernels.plugins import GROUP, KernelPlugin, read_plugins
from proa.layers.base import kernel_names
from proa.plan.prepare import host_caps
from proa.plan.runner_plan import LinearAttentionPlan
from proa.units import Phase
from tests.factories.headers import LAPTOP, asked, planned, write_tiny_headers
from tests.plan.hybrid_headers import SM90, WIDE, write_hybrid_headers

PACKAGE = Path(__file__).parents[1] / "plugins" / "ascend"
ASCEND = replace(LAPTOP, device="ascend", no_cuda="no CUDA device or driver", compiler=None)


@pytest.fixture
def ascend(monkeypatch: pytest.MonkeyPatch) -> Iterator[KernelPlugin]:
    """The package as installed: its folder, dist-info included, is on the path."""
    monkeypatch.syspath_prepend(str(PACKAGE))
    (plugin,) = read_plugins(pytest.fail)
    yield plugin
    for name in ("proa_ascend", "proa_ascend_ops"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def gdn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hybrid_headers(tmp_path_factory.mktemp("plugins") / "gdn", "qwen3_next", **WIDE)


def triple(plan: LinearAttentionPlan) -> tuple[str | None, ...]:
    return plan.prefill.value, plan.decode.value, plan.verify.value


def test_without_an_installed_package_there_are_none() -> None:
    assert read_plugins(pytest.fail, []) == ()


def test_an_installed_package_is_found_and_its_kernels_are_chosen_on_its_device(
    ascend: KernelPlugin, gdn: Path
) -> None:
    plan = planned(gdn, caps=ASCEND, plugins=(ascend,)).plans.target
    assert (plan.device.value, plan.device.source) == ("ascend", Source.HARDWARE)
    assert triple(plan.linear_attention) == ("ascend", "ascend", "torch")
    assert plan.attention.decode.value == "reference"


def test_a_verify_that_cannot_follow_says_why(ascend: KernelPlugin, gdn: Path) -> None:
    plan = planned(gdn, caps=ASCEND, plugins=(ascend,), linear_attention="ascend").plans.target.linear_attention
    assert triple(plan) == ("ascend", "ascend", "torch")
    assert [plan.prefill.source, plan.decode.source] == [Source.ASKED, Source.ASKED]
    assert "ascend was asked for all phases (linear_attention): it has no verify kernel" in plan.verify.notes[0].reason
    with pytest.raises(KernelUnavailable, match="ascend has no verify kernel, only prefill and decode"):
        planned(gdn, caps=ASCEND, plugins=(ascend,), linear_attention_verify="ascend")


@pytest.mark.parametrize("caps", [LAPTOP, SM90])
def test_on_another_device_its_own_conditions_stand_against_it(
    ascend: KernelPlugin, gdn: Path, caps: DeviceCaps
) -> None:
    with_it, without = (planned(gdn, caps=caps, plugins=found).plans.target for found in ((ascend,), ()))
    assert triple(with_it.linear_attention) == triple(without.linear_attention)
    assert "ascend needs an Ascend device" in with_it.linear_attention.decode.rejected[0].reason
    with pytest.raises(KernelUnavailable, match="ascend needs an Ascend device"):
        planned(gdn, caps=caps, plugins=(ascend,), linear_attention_decode="ascend")


def test_on_another_family_its_own_conditions_stand_against_it(ascend: KernelPlugin, tmp_path: Path) -> None:
    kda = write_hybrid_headers(tmp_path / "kda", "kimi_linear")
    plan = planned(kda, caps=ASCEND, plugins=(ascend,)).plans.target.linear_attention
    assert triple(plan) == ("torch", "torch", "torch")
    assert "ascend has gdn only, no kda" in plan.decode.reason


def test_a_device_without_an_installed_package_is_not_used_and_its_kernel_is_unknown(gdn: Path) -> None:
    plan = planned(gdn, caps=ASCEND).plans.target
    assert plan.device.value == "cpu"
    assert [(r.value, r.rule) for r in plan.device.rejected][0] == ("ascend", "device.served")
    with pytest.raises(PlanError, match="ascend was asked for"):
        planned(gdn, caps=ASCEND, linear_attention_decode="ascend")


def test_each_runner_of_a_pair_hands_the_backend_its_own_plan(ascend: KernelPlugin, gdn: Path) -> None:
    flags = {"--draft.linear-attention.prefill": "reference", "--target.linear-attention.verify": "reference"}
    resolved = planned(gdn, draft=gdn, caps=ASCEND, plugins=(ascend,), flags=flags)
    (plugin,) = resolved.plugins
    made = [plugin.delta(kernels_of(runner.plan.linear_attention)) for runner in resolved.runners]
    assert [ops.plan[Phase.PREFILL] for ops in made] == ["ascend", "reference"]
    assert [ops.plan[Phase.VERIFY] for ops in made] == ["reference", "torch"]
    assert made[0].name == "ascend" and made[0] is not made[1]


def test_a_plan_that_names_the_backend_binds_its_ops_and_only_from_the_package(ascend: KernelPlugin, gdn: Path) -> None:
    resolved = planned(gdn, caps=ASCEND, plugins=(ascend,))
    names = kernel_names(resolved.target.plan, resolved.target.spec)
    assert dict(bind(names, None, resolved.plugins).names.delta) == kernels_of(resolved.target.plan.linear_attention)
    with pytest.raises(KernelUnavailable, match="linear_attention.prefill = ascend is no kernel"):
        bind(names, None, ())


def kernels_of(plan: LinearAttentionPlan) -> dict[Phase, str]:
    leaves = {Phase.PREFILL: plan.prefill, Phase.DECODE: plan.decode, Phase.VERIFY: plan.verify}
    return {phase: leaf.value for phase, leaf in leaves.items() if leaf.value is not None}


def test_f31_without_a_plan_there_is_no_backend(ascend: KernelPlugin) -> None:
    with pytest.raises(TypeError, match="plan"):
        ascend.delta()  # type: ignore[call-arg]  # what the test is about


def test_reading_what_is_installed_imports_no_torch() -> None:
    code = "import sys; sys.path.insert(0, sys.argv[1]); from proa.kernels.plugins import read_plugins; "
    code += "found = read_plugins(print); assert len(found) == 1 and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, str(PACKAGE)], check=True)


def test_a_host_with_such_a_device_is_described_as_one(
    ascend: KernelPlugin, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = asked(tmp_path, device="cpu")
    assert host_caps(config, tmp_path).device == "cpu"
    present = replace(ascend, is_present=lambda: True)
    monkeypatch.setattr(sys.modules["proa_ascend"], "PLUGIN", present)
    assert host_caps(asked(tmp_path), tmp_path).device in ("ascend", "cuda")
    assert caps_from_json(caps_to_json(ASCEND), where="x") == ASCEND


def test_a_package_changes_nothing_for_a_model_without_linear_attention(ascend: KernelPlugin, tmp_path: Path) -> None:
    model = write_tiny_headers(tmp_path / "m", "llama")
    with_it, without = (planned(model, plugins=found).plans for found in ((ascend,), ()))
    assert with_it.digest == without.digest


def entry(name: str, value: str) -> metadata.EntryPoint:
    return metadata.EntryPoint(name=name, value=value, group=GROUP)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("no_such_module:PLUGIN", "ModuleNotFoundError"),
        ("proa_ascend:NOTHING", "AttributeError"),
        ("proa_ascend:PHASES", "it names no KernelPlugin"),
    ],
)
def test_a_package_that_cannot_be_read_is_noted_and_passed_over(ascend: KernelPlugin, value: str, says: str) -> None:
    notes: list[str] = []
    found = read_plugins(notes.append, [entry("broken", value), entry("fine", "proa_ascend:PLUGIN")])
    assert found == (ascend,)
    assert len(notes) == 1 and says in notes[0] and f"broken ({value})" in notes[0]


def test_one_backend_is_added_once(ascend: KernelPlugin) -> None:
    notes: list[str] = []
    found = read_plugins(notes.append, [entry(name, "proa_ascend:PLUGIN") for name in ("b", "a")])
    assert found == (ascend,) and "b (proa_ascend:PLUGIN) is passed over: it adds ascend again" in notes[0]


def test_a_package_adds_kernels_of_its_own_backend_for_linear_attention_only(ascend: KernelPlugin) -> None:
    with pytest.raises(ValueError, match="not native for delta"):
        replace(ascend, kernels=DELTA_KERNELS[:1])
    with pytest.raises(ValueError, match="not ascend for matmul"):
        replace(ascend, kernels=(replace(ascend.kernels[0], op="matmul"),))
