from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import gguf as reference
import pytest

from proa.checkpoint.open import open_checkpoint, require_data
from proa.errors import CheckpointError, ConfigError
from tests.factories import raw_files as raw
from tests.factories.raw_files import STRING, array, hub, pair, shard

TOOL = {"name": "tool", "template": "T"}


def refused(path: Path, slug: str, *words: str) -> None:
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(path)
    assert error.value.slug == slug
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_a_hub_directory_is_opened_with_all_its_parts(tiny: Callable[..., Path], family: str) -> None:
    folder = tiny(family)
    checkpoint = open_checkpoint(folder)
    assert (checkpoint.path, checkpoint.form) == (folder, "hub")
    config = json.loads((folder / "config.json").read_text())
    assert checkpoint.config.int("hidden_size") == config["hidden_size"]
    assert checkpoint.config.where == str(folder / "config.json")
    assert dict(checkpoint.generation) == json.loads((folder / "generation_config.json").read_text())
    assert checkpoint.tokenizer is not None and checkpoint.tokenizer.json_file == folder / "tokenizer.json"
    assert checkpoint.tensors["model.embed_tokens.weight"].shape == (config["vocab_size"], config["hidden_size"])
    require_data(checkpoint)


def test_a_directory_of_config_and_headers_can_be_planned_but_not_loaded(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(hub(tmp_path, {"model.safetensors": shard(["a"])[:-8]}, None))
    assert list(checkpoint.tensors) == ["a"] and checkpoint.tokenizer is None and checkpoint.generation == {}
    with pytest.raises(CheckpointError, match=r"model\.safetensors: header only") as error:
        require_data(checkpoint)
    assert error.value.slug == "checkpoint/headers-only"


def test_what_is_not_there_is_said_so(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "checkpoint/not-found", "nowhere: is not there")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    refused(tmp_path / "link", "checkpoint/not-found", "link that leads nowhere")
    refused(tmp_path, "checkpoint/no-config", "has no config.json")
    (tmp_path / "m.gguf").write_bytes(b"")
    refused(tmp_path, "checkpoint/no-config", "give the file itself", "m.gguf")
    refused(hub(tmp_path / "empty", {}, None), "checkpoint/no-weights")


def test_what_the_system_refuses_to_read_is_an_error_with_its_name(tmp_path: Path) -> None:
    refused(tmp_path / ("x" * 300), "checkpoint/unreadable", "x" * 300)


def test_text_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    folder = hub(tmp_path, {"model.safetensors": shard(["a"]), "tokenizer.json": b"{}"}, None)
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    refused(folder, "checkpoint/bad-text", "chat_template.jinja")


@pytest.mark.parametrize("name", ["m.bin", "m.pt", "m.pth", "m.pkl", "m.ckpt", "m.safetensors", "m.gguf", "m"])
def test_a_pickle_given_as_the_model_is_refused_by_name_and_by_magic(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x80\x02}q\x00." + bytes(40))
    refused(tmp_path / name, "checkpoint/pickle", name)
    (tmp_path / name).write_bytes(b"PK\x03\x04" + bytes(40))
    refused(tmp_path / name, "checkpoint/pickle", name)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(shard(["a"]))
    refused(tmp_path / "m.safetensors", "checkpoint/wrong-form", f"give the directory: {tmp_path}")


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer_config.json", "chat_template.json"]
)
def test_a_duplicate_key_in_any_json_file_is_refused(tiny: Callable[..., Path], tmp_path: Path, name: str) -> None:
    folder = hub(tmp_path, {"model.safetensors": shard(["a"]), "tokenizer.json": b"{}"}, None)
    (folder / name).write_text('{"hidden_size": 1, "hidden_size": 2}')
    refused(folder, "checkpoint/duplicate-key", name, "hidden_size")


def test_a_config_of_not_a_number_is_refused(tmp_path: Path) -> None:
    folder = hub(tmp_path, {"model.safetensors": shard(["a"])}, None)
    (folder / "config.json").write_text('{"rope_theta": Infinity}')
    refused(folder, "checkpoint/bad-json", "config.json", "Infinity")


def test_a_wrappers_config_is_kept_whole(tmp_path: Path) -> None:
    folder = hub(tmp_path, {"model.safetensors": shard(["a"])}, None)
    (folder / "config.json").write_text('{"architectures": ["X"], "text_config": {"hidden_size": 5}}')
    config = open_checkpoint(folder).config
    assert config.keys() == ("architectures", "text_config") and config.wrapper is None


@pytest.mark.parametrize(
    ("files", "template"),
    [
        ({}, None),
        ({"tokenizer_config.json": {"chat_template": "A"}}, "A"),
        ({"tokenizer_config.json": {"chat_template": [TOOL, {"name": "default", "template": "D"}]}}, "D"),
        ({"tokenizer_config.json": {"chat_template": [TOOL]}}, None),
        ({"tokenizer_config.json": {"chat_template": "A"}, "chat_template.json": {"chat_template": "B"}}, "B"),
        ({"tokenizer_config.json": {"chat_template": "A"}, "chat_template.jinja": "C"}, "C"),
    ],
)
def test_the_chat_template_is_found_wherever_it_is_kept(tmp_path: Path, files: dict, template: str | None) -> None:
    folder = hub(tmp_path, {"model.safetensors": shard(["a"]), "tokenizer.json": b"{}"}, None)
    for name, content in files.items():
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    tokenizer = open_checkpoint(folder).tokenizer
    assert tokenizer is not None and tokenizer.chat_template == template


def test_a_hub_cache_of_links_is_opened(tiny: Callable[..., Path], tmp_path: Path) -> None:
    real = tiny("llama")
    snapshot = tmp_path / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for file in real.iterdir():
        (snapshot / file.name).symlink_to(file)
    linked, direct = open_checkpoint(snapshot), open_checkpoint(real)
    assert linked.tensors.keys() == direct.tensors.keys()
    assert linked.files == direct.files


def test_a_gguf_is_opened_with_tokenizer_and_template_under_any_suffix(tmp_path: Path) -> None:
    pairs = [
        pair("general.architecture", STRING, "llama"),
        pair("llama.block_count", raw.U32, 1),
        pair("tokenizer.ggml.model", STRING, "gpt2"),
        array("tokenizer.ggml.tokens", STRING, 2, raw.text("a") + raw.text("b")),
        pair("tokenizer.ggml.eos_token_id", raw.U32, 1),
        pair("tokenizer.chat_template", STRING, "{{ x }}"),
    ]
    for name in ("m.gguf", "blob"):
        content = raw.gguf(pairs, [raw.tensor("token_embd.weight", [8, 2], 0, 0)], bytes(64))
        (tmp_path / name).write_bytes(content)
        checkpoint = open_checkpoint(tmp_path / name)
        assert checkpoint.form == "gguf" and checkpoint.config.int("num_hidden_layers") == 1
        assert checkpoint.files.total_bytes == len(content) and dict(checkpoint.generation) == {"eos_token_id": 1}
        assert checkpoint.tokenizer is not None and checkpoint.tokenizer.gguf is not None
        assert dict(checkpoint.tokenizer.gguf) == {"model": "gpt2", "tokens": ("a", "b"), "eos_token_id": 1}
        assert checkpoint.tokenizer.chat_template == "{{ x }}"
        assert checkpoint.tensors["model.embed_tokens.weight"].shape == (2, 8)


def test_sampling_defaults_beside_a_gguf_are_read_and_its_own_token_ids_win(tmp_path: Path) -> None:
    pairs = [
        pair("general.architecture", STRING, "llama"),
        pair("llama.block_count", raw.U32, 1),
        pair("tokenizer.ggml.model", STRING, "gpt2"),
        array("tokenizer.ggml.tokens", STRING, 2, raw.text("a") + raw.text("b")),
        pair("tokenizer.ggml.eos_token_id", raw.U32, 1),
    ]
    content = raw.gguf(pairs, [raw.tensor("token_embd.weight", [8, 2], 0, 0)], bytes(64))
    (tmp_path / "m.gguf").write_bytes(content)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.2, "eos_token_id": 0}')
    assert dict(open_checkpoint(tmp_path / "m.gguf").generation) == {"temperature": 0.2, "eos_token_id": 1}


def test_an_error_of_a_ggufs_config_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(raw.gguf([pair("general.architecture", STRING, "llama")], [], b""))
    with pytest.raises(ConfigError, match=r"m\.gguf: hidden_size is missing"):
        open_checkpoint(tmp_path / "m.gguf").config.int("hidden_size")


def test_opening_imports_no_torch(tiny: Callable[..., Path]) -> None:
    code = "import sys; from pathlib import Path; from proa.checkpoint.open import open_checkpoint;"
    code += f"open_checkpoint(Path({str(tiny('llama'))!r})); sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.model
def test_the_real_model_is_opened_quickly_with_the_gguf_librarys_facts(smollm2: Path) -> None:
    started = time.process_time()
    checkpoint = open_checkpoint(smollm2)
    assert time.process_time() - started < 0.3
    theirs = {tensor.name: tensor for tensor in reference.GGUFReader(smollm2).tensors}
    assert len(checkpoint.tensors) == len(theirs) == 272
    for info in checkpoint.tensors.values():
        tensor = theirs[info.stored_name]
        assert info.shape == tuple(int(size) for size in reversed(tensor.shape))
        assert (info.dtype.name, info.nbytes, info.offset) == (
            tensor.tensor_type.name,
            tensor.n_bytes,
            tensor.data_offset,
        )
    layers = {f"model.layers.{i}" for i in range(30)}
    assert {name.rpartition(".self_attn.q_proj")[0] for name in checkpoint.tensors if "q_proj" in name} == layers
    config = checkpoint.config
    facts = {"num_hidden_layers": 30, "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3}
    facts |= {"intermediate_size": 1536, "vocab_size": 49152, "max_position_embeddings": 8192}
    assert {key: config.int(key) for key in facts} == facts
    assert config.flag("tie_word_embeddings") and config.float("rope_theta") == 100000.0
    assert config.float("rms_norm_eps") == pytest.approx(1e-5, rel=1e-6)
