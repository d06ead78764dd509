"""The data path: values arrive where they belong, whatever the chunk, the row order, the type and the offset."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
import torch

from proa.checkpoint.types import RopePermuted, TensorInfo
from proa.errors import CheckpointError, WeightError
from proa.loading import apply, files
from proa.loading.build import build, construct
from proa.loading.ledger import LoadLedger
from proa.loading.progress import Lines, Silent
from proa.plan.planned import Planned
from proa.units import DType
from tests.factories.checkpoints import FAMILIES, random_tensors, tiny_config, write_checkpoint
from tests.factories.headers import planned


def loaded(plan: Planned) -> dict[str, torch.Tensor]:
    return dict(build(plan, Silent(), None, None).model.named_parameters())


@pytest.mark.parametrize("chunk", [1, 1000, apply.CHUNK_ELEMENTS])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_holds_the_stored_values(
    family: str, chunk: int, tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apply, "CHUNK_ELEMENTS", chunk)
    stored = random_tensors(tiny_config(family), 0, torch.float32)
    parameters = loaded(planned(tiny(family)).target)
    prefix = "model.layers.1"
    merged = [stored[f"{prefix}.self_attn.{name}_proj.weight"] for name in "qkv"]
    assert torch.equal(parameters["layers.1.attn.qkv.weight"], torch.cat(merged))
    if family == "qwen2":
        biases = [stored[f"{prefix}.self_attn.{name}_proj.bias"] for name in "qkv"]
        assert torch.equal(parameters["layers.1.attn.qkv.bias"], torch.cat(biases))
    gates = [stored[f"{prefix}.mlp.{name}_proj.weight"] for name in ("gate", "up")]
    assert torch.equal(parameters["layers.1.ffn.gate_up.weight"], torch.cat(gates))
    assert torch.equal(parameters["embed.weight"], stored["model.embed_tokens.weight"])
    assert torch.equal(parameters["norm.weight"], stored["model.norm.weight"])


def test_values_are_rounded_to_the_compute_type(tiny: Callable[..., Path]) -> None:
    stored = random_tensors(tiny_config("llama"), 0, torch.float32)
    parameters = loaded(planned(tiny("llama"), dtype="bfloat16").target)
    assert torch.equal(parameters["embed.weight"], stored["model.embed_tokens.weight"].bfloat16())


def permuted(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """As llama.cpp's converter stores q and k: per head, the two rope halves interleaved."""
    out = torch.empty_like(rows)
    size = len(rows) // heads
    for head in range(heads):
        for i in range(size // 2):
            out[head * size + 2 * i] = rows[head * size + i]
            out[head * size + 2 * i + 1] = rows[head * size + size // 2 + i]
    return out


@pytest.mark.parametrize("chunk", [1, 100, 64 * 16, 64 * 24, apply.CHUNK_ELEMENTS])
def test_rows_that_gguf_permuted_are_put_back(tmp_path: Path, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apply, "CHUNK_ELEMENTS", chunk)
    config = tiny_config("llama")
    stored = random_tensors(config, 0, torch.float32)
    name = "model.layers.0.self_attn.q_proj.weight"
    path = write_checkpoint(tmp_path / "p", config, stored | {name: permuted(stored[name], 4)})
    plan = planned(path).target
    infos = dict(plan.checkpoint.tensors)
    infos[name] = infos[name]._replace(row_order=RopePermuted(heads=4))
    plan = replace(plan, checkpoint=replace(plan.checkpoint, tensors=MappingProxyType(infos)))
    assert torch.equal(loaded(plan)["layers.0.attn.qkv.weight"][:64], stored[name])


def test_a_tensor_at_an_odd_offset_is_read(tmp_path: Path, tiny: Callable[..., Path]) -> None:
    """The header's length, and so every offset, need not be a multiple of the element size."""
    source = tiny("llama") / "model.safetensors"
    raw = source.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.dumps(json.loads(raw[8 : 8 + size])).encode()
    header += b" " * (1 + -len(header) % 4)
    path = tmp_path / "odd"
    write_checkpoint(path, tiny_config("llama"), random_tensors(tiny_config("llama"), 0, torch.float32))
    (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + size :])
    expected = loaded(planned(tiny("llama")).target)
    assert all(torch.equal(value, expected[name]) for name, value in loaded(planned(path).target).items())


def tied_checkpoint(path: Path, change: Callable[[torch.Tensor], None]) -> Planned:
    config = tiny_config("qwen2")
    tensors = random_tensors(config, 0, torch.float32)
    head = tensors["model.embed_tokens.weight"].clone()
    change(head)
    return planned(write_checkpoint(path, config, tensors | {"lm_head.weight": head})).target


def test_an_equal_copy_of_a_tied_head_is_accepted(tmp_path: Path) -> None:
    built = build(tied_checkpoint(tmp_path, lambda head: None), Silent(), None, None)
    assert built.ledger.as_json()["tensors"]["tied"] == 1


@pytest.mark.parametrize("row", [0, 311, 511])
def test_a_copy_that_differs_in_one_element_is_refused(
    tmp_path: Path, row: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apply, "CHUNK_ELEMENTS", 64 * 100)

    def change(head: torch.Tensor) -> None:
        head[row, 63] += 1e-3

    with pytest.raises(WeightError, match=rf"lm_head\.weight .*model\.embed_tokens\.weight .*row {row} "):
        build(tied_checkpoint(tmp_path, change), Silent(), None, None)


def test_a_file_that_lost_its_end_after_planning_is_refused(tmp_path: Path) -> None:
    config = tiny_config("llama")
    path = write_checkpoint(tmp_path / "m", config, random_tensors(config, 0, torch.float32))
    plan = planned(path).target
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: .* ends 100 bytes after the end") as caught:
        build(plan, Silent(), None, None)
    assert caught.value.slug == "checkpoint/truncated"


def test_a_checkpoint_that_does_not_fit_is_refused_before_any_data_is_read(tmp_path: Path) -> None:
    config = tiny_config("llama")
    tensors = random_tensors(config, 0, torch.float32) | {"stray.weight": torch.ones(1)}
    path = write_checkpoint(tmp_path / "m", config, tensors)
    plan = planned(path).target
    (path / "model.safetensors").unlink()
    with pytest.raises(WeightError, match=r"stray\.weight"):
        build(plan, Silent(), None, None)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="resident pages are read from Linux's /proc")
def test_pages_of_the_file_are_given_back_chunk_by_chunk(tmp_path: Path) -> None:
    chunk, size = 2**20, 16 * 2**20
    path = tmp_path / "data"
    path.write_bytes(os.urandom(size))
    info = TensorInfo(
        name="x", stored_name="x", shape=(16, chunk), dtype=DType.U8, file=path, offset=0, nbytes=size, row_order=None
    )
    with files.MappedFile(path) as file:
        kept = [file.raw(info, (row, row + 1)).sum() and resident(path) for row in range(8)]
        assert kept[-1] >= 8 * chunk  # what reading alone leaves behind
        file.forget(info, (0, 8))
        reader = files.Reader(info, file, is_raw=False, scale=None, block=(1, 1))
        peak = max(int(values.sum()) and resident(path) for _, values in reader.chunks(chunk))
        assert peak <= 3 * chunk  # a chunk, and what the system maps around a page that is touched


def resident(path: Path) -> int:
    """Bytes of this process's mapping of `path` that are in memory."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    at = next(number for number, line in enumerate(lines) if line.endswith(str(path)))
    return next(int(line.split()[1]) * 1024 for line in lines[at:] if line.startswith("Rss:"))


def test_progress_counts_every_byte_once(tiny: Callable[..., Path]) -> None:
    plan, lines = planned(tiny("llama")).target, list[str]()
    ledger, model = LoadLedger(plan), construct(plan, None, None)
    apply.load_weights(dict(model.named_parameters()), ledger, Lines(lines.append))
    assert [line.rpartition("(")[2] for line in lines][-1] == "100 %)"
    assert lines[-1].startswith("loading target weights: ")
