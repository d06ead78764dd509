"""When native kernels and stored blocks are planned, what stands against them, and what follows for the numerics."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType

from proa.conditions import Source
from proa.errors import KernelUnavailable
from proa.kernels.caps import DeviceCaps
from proa.plan.decision import Decision
from proa.units import DType, Numerics
from tests.factories.checkpoints import tiny_config
from tests.factories.gguf_files import MATRICES, write_block_gguf
from tests.factories.headers import LAPTOP, SERVER, planned, write_headers, write_tiny_headers

KNOBS = ("attention.prefill", "attention.decode", "attention.verify", "matmul_kernel")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_headers(tmp_path_factory.mktemp("native") / "llama", "llama")


def decided(model: Path, knob: str, caps: DeviceCaps = SERVER, **settings: Any) -> Decision[Any]:
    return planned(model, caps=caps, **settings).plans.target.decisions()[knob]


def test_on_a_server_every_op_is_native_and_the_numerics_are_exact(llama: Path) -> None:
    assert [decided(llama, knob).value for knob in KNOBS] == ["native"] * 4
    assert decided(llama, "numerics").value is Numerics.EXACT
    assert decided(llama, "numerics", numerics="exact").source is Source.ASKED
    assert decided(llama, "numerics", numerics="fast").value is Numerics.FAST


@pytest.mark.parametrize(
    ("caps", "settings", "knob", "words"),
    [
        (replace(SERVER, compiler=None), {}, "matmul_kernel", "no C++ compiler"),
        (replace(SERVER, isa=("avx2",)), {}, "matmul_kernel", "needs avx2, fma and f16c or avx512f, not avx2"),
        (
            replace(SERVER, kernels={"native": "failed: ffn differs"}),
            {},
            "matmul_kernel",
            "self-test failed: ffn differs",
        ),
        (SERVER, {"page_size": 4}, "attention.decode", "multiples of 16 rows, not 4"),
        (SERVER, {"dtype": "bfloat16", "kv_dtype": "float32"}, "attention.verify", "a bfloat16 cache, not float32"),
        (SERVER, {"attention_verify": "reference"}, "attention.decode", "reference was asked for in a phase"),
        (SERVER, {"device": "meta"}, "attention.prefill", "runs on the CPU, not on meta"),
    ],
)
def test_auto_passes_over_native_with_the_reason(
    llama: Path, caps: DeviceCaps, settings: dict[str, Any], knob: str, words: str
) -> None:
    decision = decided(llama, knob, caps, **settings)
    assert decision.value != "native"
    assert words in next(r.reason for r in decision.rejected if r.value == "native")
    with pytest.raises(KernelUnavailable, match="native was asked for"):
        decided(llama, knob, caps, **settings, **{knob.replace(".", "_"): "native"})


def test_sizes_that_are_no_whole_vectors_are_named(tmp_path: Path) -> None:
    model = write_headers(tmp_path / "m", {**tiny_config("llama"), "intermediate_size": 100})
    decision = decided(model, "matmul_kernel")
    assert decision.value != "native" and "ffn_width 100" in decision.rejected[0].reason


def test_a_cache_in_another_arrangement_is_never_shared_between_phases(llama: Path) -> None:
    for asked in ("prefill", "decode", "verify"):
        values = {decided(llama, knob, **{f"attention_{asked}": "reference"}).value for knob in KNOBS[:3]}
        assert values == {"reference"}


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF with linear maps in Q4_0, but mixed formats in layer 0's q, k and v; embedding (and head) in Q8_0."""
    formats = dict.fromkeys(MATRICES, GGMLQuantizationType.Q4_0)
    formats |= dict.fromkeys(("blk.0.attn_v", "token_embd"), GGMLQuantizationType.Q8_0)
    return write_block_gguf(tmp_path_factory.mktemp("blocks") / "m.gguf", formats)


def test_linear_maps_run_on_stored_blocks_of_one_format(blocks: Path) -> None:
    decision = decided(blocks, "quantization")
    assert (decision.value, decision.source) == ("q4_0", Source.CHECKPOINT)
    assert "3 in q4_0" in decision.reason and "1 in q8_0" in decision.reason and "8 bits" in decision.reason
    target = planned(blocks, caps=SERVER).target
    kept = {name: info.dtype for name, info in target.parameters.items() if info.dtype is not None}
    assert kept == {
        "embed.weight": DType.Q8_0,
        "layers.0.attn.o.weight": DType.Q4_0,
        "layers.0.ffn.gate_up.weight": DType.Q4_0,
        "layers.0.ffn.down.weight": DType.Q4_0,
    }


@pytest.mark.parametrize(
    ("caps", "settings", "words"),
    [
        (replace(SERVER, isa=("avx512f",)), {}, "no avx512_vnni"),
        (LAPTOP, {}, "does not compute on stored blocks"),
        (SERVER, {"matmul_kernel": "reference"}, "reference does not compute on stored blocks"),
        (SERVER, {"dtype": "float32"}, "float32 was asked for"),
        (SERVER, {"quantization": "none"}, "asked"),
    ],
)
def test_blocks_are_dequantised_at_load_with_the_reason(
    blocks: Path, caps: DeviceCaps, settings: dict[str, Any], words: str
) -> None:
    decision = decided(blocks, "quantization", caps, **settings)
    assert decision.value == "none" and words in decision.reason
    assert planned(blocks, caps=caps, **settings).target.plan.layout.blocks == ()


def test_an_ask_for_blocks_overrides_float32_with_a_note_and_is_refused_where_no_kernel_can(blocks: Path) -> None:
    decision = decided(blocks, "quantization", dtype="float32", quantization="q4_0")
    assert (decision.value, decision.source) == ("q4_0", Source.ASKED)
    assert [note.condition for note in decision.notes] == ["quantization.float32"]
    with pytest.raises(KernelUnavailable, match="quantization = q4_0 was asked for"):
        decided(blocks, "quantization", LAPTOP, quantization="q4_0")
