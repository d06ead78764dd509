"""GGUF files of models with experts, written with gguf's own names: logits are those of transformers in float32, and in
blocks those of the same model with the values that gguf's own code makes of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from proa.checkpoint.open import open_checkpoint
from proa.errors import ConfigError, PlanError, WeightError
from proa.loading import apply
from proa.loading.build import build
from proa.loading.ledger import LoadLedger
from proa.loading.progress import Silent
from proa.runner.runner import Runner
from proa.units import DType, Phase
from tests.factories.headers import SERVER, planned
from tests.factories.mla_checkpoints import write_mla
from tests.factories.moe_gguf import write_dequantised, write_moe_gguf
from tests.factories.native import native_runner, probed, why_not
from tests.factories.oracles import TOLERANCE, assert_close, assert_greedy, greedy, read_reference
from tests.factories.runners import Rows, runner_of

FAMILIES = ("qwen2_moe", "qwen3_moe", "glm4_moe")
KINDS = ("Q8_0", "Q4_0", "Q4_1")
PROMPT = [int(token) for token in torch.randint(3, 200, (40,), generator=torch.Generator().manual_seed(0))]
FOUND = probed()
WHY_NOT = why_not(FOUND) or (None if "avx512_vnni" in FOUND.caps.isa else "this CPU has no avx512_vnni")
native = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))


@pytest.fixture(scope="module")
def files(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    root = tmp_path_factory.mktemp("gguf")

    def write(family: str, kind: str) -> Path:
        path = root / f"{family}-{kind}.gguf"
        return path if path.exists() else write_moe_gguf(path, tiny(family), kind)

    return write


def logits_of(runner: Runner) -> torch.Tensor:
    """Of the prompt, and of a few decoded rows."""
    rows = Rows(runner, 1, 64)
    parts = [rows.prefill(0, PROMPT[:17]), rows.prefill(0, PROMPT[17:36]), *(rows.decode([t]) for t in PROMPT[36:])]
    return torch.cat(parts)


@pytest.mark.oracle
@pytest.mark.parametrize("family", (*FAMILIES, "deepseek_v2_lite", "deepseek_v2", "deepseek_v3"))
@pytest.mark.parametrize("kind", ["F32", "BF16"])
def test_logits_and_tokens_are_those_of_transformers(family: str, kind: str, oracle_dir: Path, tmp_path: Path) -> None:
    hub = oracle_dir / "plain" / family
    reference = read_reference(hub)
    runner = runner_of(write_moe_gguf(tmp_path / "m.gguf", hub, kind), dtype="float32")
    rows = Rows(runner, 1, 128)
    logits = rows.prefill(0, reference.prompt)
    if kind == "F32":
        assert_close(logits, reference.logits)
        assert_greedy(greedy(rows, logits[-1:], 32)[0], reference)
    else:  # bfloat16 weights are those of the oracle rounded: close, and not the same
        assert TOLERANCE < (logits - reference.logits).norm() / reference.logits.norm() < 0.1


@pytest.mark.oracle
@pytest.mark.parametrize("family", ["deepseek_v2_lite", "deepseek_v2", "deepseek_v3"])
def test_split_up_projections_are_put_together_again(family: str, oracle_dir: Path, tmp_path: Path) -> None:
    hub = oracle_dir / "plain" / family
    path, reference = write_moe_gguf(tmp_path / "m.gguf", hub, "F32", split=True), read_reference(hub)
    assert not [name for name in open_checkpoint(path).tensors if "kv_b" in name]
    assert_close(Rows(runner_of(path, dtype="float32"), 1, 128).prefill(0, reference.prompt), reference.logits)


@pytest.mark.parametrize("chunk", [1, 1000, apply.CHUNK_ELEMENTS])
@pytest.mark.parametrize("family", [*FAMILIES, "deepseek_v3"])
def test_parameters_are_those_of_the_hubs_form_whatever_the_chunk(
    family: str, chunk: int, tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apply, "CHUNK_ELEMENTS", chunk)
    is_latent = family == "deepseek_v3"
    hub = write_mla(family, tmp_path / "hub") if is_latent else tiny(family)
    path = write_moe_gguf(tmp_path / "m.gguf", hub, "F32", split=is_latent)
    ours, expected = (
        dict(build(planned(each, dtype="float32").target, Silent(), None, None).model.named_parameters())
        for each in (path, hub)
    )
    assert ours.keys() == expected.keys()
    assert {name for name in ours if not torch.equal(ours[name], expected[name])} == set()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_that_are_dequantised_have_gguf_s_values(
    family: str, kind: str, files: Callable[[str, str], Path], tiny: Callable[..., Path], tmp_path: Path
) -> None:
    runner = runner_of(files(family, kind), dtype="float32", quantization="none")
    expected = logits_of(runner_of(write_dequantised(tmp_path / "hub", tiny(family), kind), dtype="float32"))
    assert_close(logits_of(runner), expected)


@native
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_kept_blocks_differ_by_the_rounding_of_activations(
    family: str, kind: str, files: Callable[[str, str], Path], tiny: Callable[..., Path], tmp_path: Path
) -> None:
    path = files(family, kind)
    kept = native_runner(path, FOUND, dtype="float32", quantization=kind.lower())
    assert kept.plan.quantization.value == kind.lower()
    assert {name for name, _ in kept.plan.layout.blocks} >= {
        "layers.1.ffn.experts.gate_up",
        "layers.1.ffn.experts.down",
    }
    expected = logits_of(runner_of(write_dequantised(tmp_path / "hub", tiny(family), kind), dtype="float32"))
    ours = logits_of(kept)
    # 8 bits per activation: a hundredth per product. A row whose router is undecided may take another expert.
    errors = (ours - expected).norm(dim=1) / expected.norm(dim=1)
    assert 0 < errors.median() < 0.03


@native
@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_k_blocks_are_those_of_gguf_dequantised_and_kept(kind: str, tiny: Callable[..., Path], tmp_path: Path) -> None:
    hub = tiny("qwen3_moe", hidden_size=256, moe_intermediate_size=256)
    path = write_moe_gguf(tmp_path / "m.gguf", hub, kind)
    expected = logits_of(runner_of(write_dequantised(tmp_path / "hub", hub, kind), dtype="float32"))
    plain = logits_of(runner_of(path, dtype="float32", quantization="none"))
    assert (plain - expected).abs().max() < 1e-4 * expected.abs().max()
    kept = native_runner(path, FOUND, dtype="float32", quantization=kind.lower())
    assert dict(kept.plan.layout.blocks)["layers.0.ffn.experts.down"].name == kind
    errors = (logits_of(kept) - expected).norm(dim=1) / expected.norm(dim=1)
    assert 0 < errors.median() < 0.03


@native
def test_rows_of_kept_blocks_have_the_same_bits_beside_other_requests(files: Callable[[str, str], Path]) -> None:
    path = files("qwen3_moe", "Q4_0")
    rows = Rows(native_runner(path, FOUND), 4, 64)
    assert rows.runner.plan.quantization.value == "q4_0"
    together = rows.runner.forward([rows.span(i, Phase.PREFILL, PROMPT[i : i + 20]) for i in range(4)]).logits
    alone = Rows(native_runner(path, FOUND), 4, 64)
    assert torch.equal(torch.cat([alone.prefill(i, PROMPT[i : i + 20]) for i in range(4)]), together)


@native
@pytest.mark.parametrize("kind", KINDS)
def test_fused_is_separate_on_kept_blocks(kind: str, files: Callable[[str, str], Path]) -> None:
    """The shared expert has the width of the routed ones, and the same stored form."""
    asks: dict[str, Any] = {"dtype": "float32", "quantization": kind.lower()}
    fused, separate = (
        native_runner(files("glm4_moe", kind), FOUND, shared_experts=how, **asks) for how in ("fused", "separate")
    )
    assert fused.plan.layout.moe_of(1).is_fused and not separate.plan.layout.moe_of(1).is_fused
    ours, expected = logits_of(fused), logits_of(separate)
    # Sums in another order; a value beside a rounding border may then fall to the other side.
    assert ((ours - expected).norm(dim=1) / expected.norm(dim=1)).median() < 1e-5


def test_the_plan_keeps_experts_in_blocks_with_their_bytes(files: Callable[[str, str], Path]) -> None:
    target = planned(files("qwen3_moe", "Q4_0"), caps=SERVER).target
    assert target.plan.quantization.value == "q4_0"
    assert target.parameters["layers.2.ffn.experts.down"].dtype is DType.Q4_0
    assert target.parameters["layers.2.ffn.router.weight"].dtype is None
    assert LoadLedger(target).findings == ()
    assert target.parameters["layers.2.ffn.experts.down"].nbytes(DType.BF16) == 8 * 64 * 32 // 32 * 18


def test_without_native_experts_all_is_dequantised_and_the_reason_says_so(files: Callable[[str, str], Path]) -> None:
    path = files("qwen3_moe", "Q4_0")
    decision = planned(path, caps=SERVER, moe_kernel="reference").target.plan.quantization
    assert decision.value == "none"
    assert "reference does not compute on stored blocks" in decision.reason
    with pytest.raises(PlanError, match="reference does not compute on stored blocks"):
        planned(path, caps=SERVER, moe_kernel="reference", quantization="q4_0")


@pytest.mark.parametrize(
    ("forms", "why"),
    [
        ({"ffn_down_exps": "Q5_0"}, "experts.down (no kernel computes on q5_0 blocks)"),
        ({"ffn_up_exps": "Q4_0"}, "experts.gate_up (merged with parts that are stored otherwise)"),
        ({"ffn_up_exps": "F16"}, "experts.gate_up (merged with parts that are stored plain)"),
    ],
)
def test_experts_that_cannot_stay_in_blocks_are_named_and_linear_maps_stay(
    forms: dict[str, str], why: str, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    path = write_moe_gguf(tmp_path / "m.gguf", tiny("qwen3_moe"), "Q8_0", forms=forms)
    plan = planned(path, caps=SERVER).target.plan
    kept = {name for name, _ in plan.layout.blocks}
    assert "layers.0.attn.qkv.weight" in kept and not [name for name in kept if "experts" in name]
    assert why in plan.quantization.reason
    assert "(the other half of the experts is not kept)" in plan.quantization.reason


def test_a_router_in_blocks_is_dequantised_and_named(tiny: Callable[..., Path], tmp_path: Path) -> None:
    path = write_moe_gguf(tmp_path / "m.gguf", tiny("qwen3_moe"), "Q8_0", forms={"ffn_gate_inp.": "Q8_0"})
    plan = planned(path, caps=SERVER).target.plan
    assert plan.quantization.value == "q8_0"
    assert "layers.#.ffn.router.weight (scores decide" in plan.quantization.reason
    assert not [name for name, _ in plan.layout.blocks if "router" in name]


def test_a_projection_that_lacks_is_missing_by_name(tiny: Callable[..., Path], tmp_path: Path) -> None:
    path = write_moe_gguf(tmp_path / "m.gguf", tiny("qwen3_moe"), "F32", without=("layers.1.mlp.experts.up_proj",))
    with pytest.raises(WeightError, match=r"model\.layers\.1\.mlp\.experts\.up_proj\.weight"):
        LoadLedger(planned(path, caps=SERVER).target).refuse_findings()


def test_a_router_that_scores_otherwise_than_its_family_is_refused_by_name(
    tiny: Callable[..., Path], tmp_path: Path
) -> None:
    path = write_moe_gguf(tmp_path / "m.gguf", tiny("qwen3_moe"), "F32", gating=gguf.ExpertGatingFuncType.SIGMOID)
    with pytest.raises(ConfigError, match="scoring_func = 'sigmoid' changes the model, and the qwen3_moe family"):
        planned(path, caps=SERVER)
