"""Experts listed by token, and limits of activations, from a checkpoint's files to logits, in a family made by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from proa.arch import registry
from proa.arch.layout import ScaleOn, SharedWeight
from proa.cli.main import main
from proa.conditions import Blocks
from proa.errors import ConfigError, PlanError, WeightError
from proa.kernels import catalog
from proa.kernels.catalog import MOE
from proa.plan.footprint import step_bytes
from proa.runner.describe import promised
from proa.units import SharedExperts
from tests.factories.hand_made import FAMILY, TABLE, Tensors, write_hand_made
from tests.factories.headers import GPU_HOST, planned
from tests.factories.native import native_runner, probed, why_not
from tests.factories.runners import NUM_PAGES, Rows, built_runner, runner_of

PROMPT = [(7 * i * i + 3) % 512 for i in range(24)]
LISTED = TABLE.format(1)
LIMITS = {"swiglu_limit": 0.25, "shared_swiglu_limit": 0.25}


@pytest.fixture(autouse=True)
def families(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "FAMILIES", (*registry.FAMILIES, FAMILY))


def logits(path: Path, **asks: Any) -> torch.Tensor:
    return Rows(runner_of(path, dtype="float32", **asks), 1, 64).prefill(0, PROMPT)


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return ((one - other).abs().max() / other.abs().max()).item()


def test_the_table_of_a_listed_layer_is_loaded_counted_and_used(tmp_path: Path) -> None:
    path = write_hand_made(tmp_path / "m")
    runner = runner_of(path, dtype="float32")
    plan = planned(path, dtype="float32").target
    info = plan.parameters["layers.1.ffn.router.table"]
    assert (info.shape, info.nbytes(plan.plan.dtype.value)) == ((512, 2), 512 * 2 * 8)
    read = step_bytes(plan.spec, plan.parameters, plan.plan)
    plain = planned(write_hand_made(tmp_path / "plain", hashed=0), dtype="float32").target
    assert read == step_bytes(plain.spec, plain.parameters, plain.plan) + 2 * 8 - 8 * 4  # two ids, no bias of 8 experts
    assert runner.describe() == promised(plan.plan, plan.spec, plan.parameters, NUM_PAGES)
    before = logits(path)
    others = [
        logits(write_hand_made(tmp_path / str(axis), change=lambda t, axis=axis: t | {LISTED: t[LISTED].flip(axis)}))
        for axis in (0, 1)
    ]
    assert difference(others[0], before) > 1e-3  # the experts of other tokens
    assert difference(others[1], before) < 1e-5  # a token's own, in another order


def test_ids_do_not_say_how_the_model_is_stored(tmp_path: Path) -> None:
    """They are the most bytes of some tiny files, and no values to compute with."""
    for stored in (torch.int64, torch.int32):
        path = write_hand_made(
            tmp_path / str(stored), hashed=2, vocab_size=512,
            change=lambda t, stored=stored: {
                name: value.to(stored) if "tid2eid" in name else value.bfloat16() for name, value in t.items()
            },
        )  # fmt: skip
        plan = planned(path).target.plan
        assert (plan.dtype.value.value, plan.quantization.value, plan.dtype.notes) == ("bfloat16", "none", ())
        runner_of(path)


@pytest.mark.parametrize("asked", [{}, LIMITS])
def test_fused_and_separate_agree_and_the_check_at_load_covers_both(asked: dict[str, float], tmp_path: Path) -> None:
    path = write_hand_made(tmp_path, **asked)
    fused, separate = (logits(path, shared_experts=layout) for layout in ("fused", "separate"))
    assert difference(fused, separate) <= 1e-5


def test_a_limit_changes_the_model(tmp_path: Path) -> None:
    assert difference(logits(write_hand_made(tmp_path / "a", **LIMITS)), logits(write_hand_made(tmp_path / "b"))) > 0.02


def test_a_limit_that_the_layer_forgets_is_caught_at_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_hand_made(tmp_path, **LIMITS)
    monkeypatch.setattr("proa.kernels.reference.moe.activate", lambda gate, up, _: torch.nn.functional.silu(gate) * up)
    with pytest.raises(WeightError, match="they do not compute what the checkpoint's tensors mean"):
        logits(path, shared_experts="fused")


def test_a_table_that_is_read_wrongly_is_caught_at_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_hand_made(tmp_path)
    monkeypatch.setattr("proa.kernels.seam.PackedRouter.ids", lambda router, token_ids: token_ids + 1)
    with pytest.raises(WeightError, match="they do not compute what the checkpoint's tensors mean"):
        logits(path, shared_experts="fused")


@pytest.mark.skipif(why_not(probed()) is not None, reason="no native kernels")
@pytest.mark.parametrize("shared_experts", ["fused", "separate"])
def test_native_computes_the_same_and_rows_alone_have_the_bits_of_rows_together(
    shared_experts: str, tmp_path: Path
) -> None:
    path = write_hand_made(tmp_path, hashed=2, **LIMITS)
    runner = native_runner(path, probed(), dtype="float32", shared_experts=shared_experts)
    assert runner.plan.moe_kernel.value == "native"
    whole = Rows(runner, 1, 64).prefill(0, PROMPT)
    assert difference(whole, logits(path, moe_kernel="reference", shared_experts=shared_experts)) <= 2e-5
    rows = Rows(runner, 1, 64)
    parts = [rows.prefill(0, PROMPT[:17]), *(rows.decode([token]) for token in PROMPT[17:])]
    assert torch.equal(torch.cat(parts), whole)


def test_inspect_tells_listed_experts_and_limits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_hand_made(tmp_path, swiglu_limit=10.0, shared_swiglu_limit=7.0)
    assert main(["inspect", str(path), "--layers"]) == 0
    said = capsys.readouterr().out
    assert "gated MLP 128, limited to 10\n" in said and "1 shared 32, limited to 7\n" in said
    assert "8 experts 32, 2 per token, listed by token, limited to 10\n" in said
    assert "8 experts 32, 2 per token, limited to 10\n" in said


# What is refused


def edited(layer: int, row: int, value: int) -> Any:
    def change(tensors: Tensors) -> Tensors:
        table = tensors[TABLE.format(layer)].clone()
        table[row, 1] = value
        return tensors | {TABLE.format(layer): table}

    return change


@pytest.mark.parametrize("value", [-1, 8, 2**32 + 3])
def test_an_id_of_no_expert_is_refused_with_the_tensor_and_the_row(value: int, tmp_path: Path) -> None:
    path = write_hand_made(tmp_path, hashed=2, change=edited(2, 300, value))
    with pytest.raises(WeightError) as caught:
        runner_of(path)
    said = str(caught.value)
    assert (caught.value.slug, caught.value.role, caught.value.exit_code) == ("weights/bad-id", "target", 3)
    assert "model.layers.2.mlp.gate.tid2eid" in said and f"{value} in row 300" in said and "from 0 to 7" in said


@pytest.mark.parametrize(
    ("change", "slug", "says"),
    [
        (lambda table: table.float(), "weights/dtype", "expected I64 or I32"),
        (lambda table: table[:500], "weights/shape", r"expected \[512, 2\]"),
        (lambda table: None, "weights/missing", "fills layers.1.ffn.router.table"),
    ],
    ids=["floats", "short", "none"],
)
def test_a_table_of_another_type_or_shape_is_refused(change: Any, slug: str, says: str, tmp_path: Path) -> None:
    def changed(tensors: Tensors) -> Tensors:
        table = change(tensors.pop(TABLE.format(1)))
        return tensors if table is None else tensors | {TABLE.format(1): table}

    with pytest.raises(WeightError, match=says) as caught:
        runner_of(write_hand_made(tmp_path, change=changed))
    assert caught.value.slug == slug and "model.layers.1.mlp.gate.tid2eid" in str(caught.value)


def test_floats_stored_as_integers_are_no_table(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.gate.weight"
    with pytest.raises(WeightError, match=name) as caught:
        runner_of(write_hand_made(tmp_path, change=lambda tensors: tensors | {name: tensors[name].long()}))
    assert caught.value.slug == "weights/dtype"


@pytest.mark.parametrize("key", ["num_hash_layers", "swiglu_limit"])
def test_a_family_that_does_not_build_it_refuses_the_key(key: str, tmp_path: Path) -> None:
    path = write_hand_made(tmp_path, hashed=0, **{key: 1, "architectures": ["Glm4MoeForCausalLM"]})
    with pytest.raises(ConfigError, match=f"{key} = 1 changes the model, and the glm4_moe family does"):
        planned(path)


# The decision


@pytest.mark.parametrize(
    "limits", [{"swiglu_limit": 10.0}, {"shared_swiglu_limit": 10.0}, LIMITS | {"swiglu_limit": 1.0}]
)
def test_experts_of_different_limits_are_not_fused_and_cannot_be(limits: dict[str, float], tmp_path: Path) -> None:
    """As HYV4 has it: the limit is on routed experts only."""
    path = write_hand_made(tmp_path, **limits)
    decision = planned(path, caps=GPU_HOST).plans.target.shared_experts
    assert (decision.value, decision.rule) == (SharedExperts.SEPARATE, "moe.fuse.activation_differs")
    (checked,) = [one for one in decision.checked if one.condition == decision.rule]
    assert checked.blocks is Blocks.ALWAYS and set(checked.inputs) == {"routed.activation", "shared.activation"}
    with pytest.raises(PlanError, match=r"moe.fuse.activation_differs: routed experts are activated by silu") as caught:
        planned(path, caps=GPU_HOST, shared_experts="fused")
    assert caught.value.slug == "plan/shared-experts"


def test_experts_of_one_limit_are_fused(tmp_path: Path) -> None:
    decision = planned(write_hand_made(tmp_path, **LIMITS), caps=GPU_HOST).plans.target.shared_experts
    assert decision.value is SharedExperts.FUSED


# Where a kernel wants the router's scale


@pytest.mark.parametrize("scale", [1.0, 2.5, 16.0])
def test_f7_a_kernel_that_scales_the_sum_gets_weights_that_undo_it(
    scale: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_hand_made(tmp_path, routed_scaling_factor=scale)
    expected = logits(path, shared_experts="separate")
    scaling = tuple(
        replace(kernel, scale_on=ScaleOn.OUTPUT) if kernel.op == MOE else kernel for kernel in catalog.CATALOG
    )
    monkeypatch.setattr("proa.plan.rules.moe.CATALOG", scaling)
    for layout, is_fused in (("fused", True), ("separate", False)):
        plan = planned(path, dtype="float32", shared_experts=layout).target
        made = {(one.is_fused, one.scale_on, one.shared_weight) for _, one in plan.plan.layout.moe}
        assert made == {(is_fused, ScaleOn.OUTPUT, SharedWeight.INVERSE_SCALE)}
        assert difference(Rows(built_runner(plan), 1, 64).prefill(0, PROMPT), expected) <= 1e-5
