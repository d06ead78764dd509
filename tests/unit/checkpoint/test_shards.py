from __future__ import annotations

from math import prod
from pathlib import Path

import pytest

from proa.checkpoint.shards import read_weights, refuse_other_data
from proa.errors import CheckpointError
from tests.factories.raw_files import entry, hub, safetensors, shard

ONE, TWO, THREE = (f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3))
OWNERS = {"a": ONE, "b": ONE, "c": TWO, "d": THREE}
FILES = {ONE: shard(["a", "b"]), TWO: shard(["c"]), THREE: shard(["d"])}


def refused(folder: Path, slug: str, *words: str) -> CheckpointError:
    with pytest.raises(CheckpointError) as error:
        read_weights(folder)
    assert error.value.slug == slug
    for word in words:
        assert word in str(error.value)
    return error.value


def test_a_single_file_needs_no_index(tmp_path: Path) -> None:
    content = shard(["a", "b"])
    weights = read_weights(hub(tmp_path, {"model.safetensors": content}, None))
    assert list(weights.tensors) == ["a", "b"]
    assert (weights.files.total_bytes, weights.files.shards) == (len(content), 1)
    assert weights.files.not_in_index == weights.files.damaged == ()


def test_shards_are_joined_by_the_index_and_each_tensor_knows_its_file(tmp_path: Path) -> None:
    weights = read_weights(hub(tmp_path, FILES, OWNERS))
    assert {name: info.file.name for name, info in weights.tensors.items()} == OWNERS
    assert weights.files.shards == 3
    assert weights.files.total_bytes == sum(map(len, FILES.values()))


def test_a_missing_shard_is_named_with_what_is_lost(tmp_path: Path) -> None:
    folder = hub(tmp_path, FILES, OWNERS)
    (folder / ONE).unlink()
    refused(folder, "checkpoint/missing-shard", ONE, "2 tensors", "a, b")


def test_a_shard_that_is_a_dangling_link_is_missing(tmp_path: Path) -> None:
    folder = hub(tmp_path, FILES, OWNERS)
    (folder / TWO).unlink()
    (folder / TWO).symlink_to(tmp_path / "gone")
    refused(folder, "checkpoint/missing-shard", TWO, "1 tensors: c")


def test_links_as_in_the_hubs_cache_are_followed(tmp_path: Path) -> None:
    folder = hub(tmp_path / "snapshots" / "rev", {}, OWNERS)
    (tmp_path / "blobs").mkdir()
    for name, content in FILES.items():
        (tmp_path / "blobs" / f"sha-{name[:11]}").write_bytes(content)
        (folder / name).symlink_to(Path("../../blobs") / f"sha-{name[:11]}")
    weights = read_weights(folder)
    assert set(weights.tensors) == set(OWNERS)
    assert all(info.file.read_bytes() == FILES[OWNERS[name]] for name, info in weights.tensors.items())


def test_a_shard_file_that_the_index_does_not_name_is_refused(tmp_path: Path) -> None:
    folder = hub(tmp_path, FILES | {"model-00004-of-00004.safetensors": shard(["e"])}, OWNERS)
    refused(folder, "checkpoint/unlisted-shard", "model-00004-of-00004.safetensors", "model.safetensors.index.json")


def test_renamed_shards_under_a_stale_index_name_both_sides(tmp_path: Path) -> None:
    folder = hub(tmp_path, FILES, {"a": "old-1.safetensors", "b": "old-1.safetensors", "c": TWO, "d": THREE})
    refused(folder, "checkpoint/missing-shard", "old-1.safetensors", ONE, "index must be written anew")


def test_a_tensor_in_the_index_but_not_in_its_file_is_named_with_the_file(tmp_path: Path) -> None:
    folder = hub(tmp_path, FILES | {ONE: shard(["a"])}, OWNERS)
    refused(folder, "checkpoint/missing-tensor", f"{ONE}: b is not in this file")


def test_a_tensor_that_another_file_holds_than_the_index_says_is_missing_and_found_elsewhere(tmp_path: Path) -> None:
    folder = hub(tmp_path, FILES | {ONE: shard(["a"]), TWO: shard(["b", "c"])}, OWNERS)
    refused(folder, "checkpoint/missing-tensor", f"{ONE}: b", f"found elsewhere: {TWO}: b")


def test_of_a_tensor_in_two_shards_the_indexs_owner_wins_and_the_copy_is_listed(tmp_path: Path) -> None:
    weights = read_weights(hub(tmp_path, FILES | {THREE: shard(["a", "d"])}, OWNERS))
    assert weights.tensors["a"].file.name == ONE
    assert weights.files.not_in_index == (f"{THREE}: a",)
    (copy,) = weights.files.copies
    assert (copy.name, copy.file.name) == ("a", THREE)
    refuse_other_data(copy, weights.tensors["a"])


@pytest.mark.parametrize(("dtype", "shape"), [("F32", [2, 1]), ("F32", [1]), ("I32", [2])])
def test_a_copy_of_another_form_is_named_with_both_files(tmp_path: Path, dtype: str, shape: list[int]) -> None:
    end = 4 * prod(shape)
    other = safetensors({"a": entry(dtype, shape, 0, end), "d": entry("F32", [2], end, end + 8)}, bytes(end + 8))
    folder = hub(tmp_path, FILES | {THREE: other}, OWNERS)
    refused(folder, "checkpoint/copy-differs", f"{THREE}: a is {dtype} {shape} here, and F32 [2] in {ONE}")


@pytest.mark.parametrize("at", [0, 2**20 - 1, 2**20, 3 * 2**20 - 1])
def test_a_copy_with_one_other_byte_is_named_with_both_files(tmp_path: Path, at: int) -> None:
    size = 3 * 2**20
    data = bytearray(size)
    data[at] = 1
    header = {"a": entry("F32", [size // 4], 0, size)}
    files = {ONE: safetensors(header, bytes(size)), TWO: shard(["c"])}
    owners, extra = {"a": ONE, "c": TWO, "d": THREE}, {"d": entry("F32", [2], size, size + 8)}
    for content in (bytes(size), bytes(data)):
        folder = hub(tmp_path, files | {THREE: safetensors({**header, **extra}, content + bytes(8))}, owners)
        weights = read_weights(folder)
        if content == bytes(size):
            refuse_other_data(weights.files.copies[0], weights.tensors["a"])
            continue
        with pytest.raises(CheckpointError, match=f"{THREE}: a has other values here than in {ONE}") as error:
            refuse_other_data(weights.files.copies[0], weights.tensors["a"])
        assert error.value.slug == "checkpoint/copy-differs"


def test_a_tensor_that_the_index_does_not_list_at_all_is_refused(tmp_path: Path) -> None:
    folder = hub(tmp_path, FILES | {TWO: shard(["c", "stray"])}, OWNERS)
    refused(folder, "checkpoint/unlisted-tensor", TWO, "stray")


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/model.safetensors", "sub/model.safetensors", "..", "", 3, None]
)
def test_an_index_cannot_lead_out_of_its_folder(tmp_path: Path, name: object) -> None:
    refused(hub(tmp_path, FILES, OWNERS | {"a": name}), "checkpoint/bad-index", "a")


@pytest.mark.parametrize("text", ["{}", '{"weight_map": {}}', '{"weight_map": []}', '{"weight_map": null}'])
def test_an_index_without_a_weight_map_is_refused(tmp_path: Path, text: str) -> None:
    folder = hub(tmp_path, FILES, {})
    (folder / "model.safetensors.index.json").write_text(text)
    refused(folder, "checkpoint/bad-index", "weight_map")


def test_a_tensor_listed_twice_in_the_index_is_refused(tmp_path: Path) -> None:
    folder = hub(tmp_path, FILES, {})
    (folder / "model.safetensors.index.json").write_text(f'{{"weight_map": {{"a": "{ONE}", "a": "{TWO}"}}}}')
    refused(folder, "checkpoint/duplicate-key", "'a'", "model.safetensors.index.json")


def test_an_index_that_names_pickles_is_refused(tmp_path: Path) -> None:
    refused(
        hub(tmp_path, FILES, {"a": "pytorch_model-00001-of-00002.bin"}),
        "checkpoint/pickle",
        "pytorch_model-00001-of-00002.bin",
    )


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "weights.pkl", "model.CKPT"])
def test_a_directory_with_pickles_only_is_refused_by_their_name(tmp_path: Path, name: str) -> None:
    refused(hub(tmp_path, {name: b"anything"}, None), "checkpoint/pickle", name)


def test_a_pickle_beside_safetensors_is_not_in_the_way(tmp_path: Path) -> None:
    weights = read_weights(hub(tmp_path, {"model.safetensors": shard(["a"]), "training_args.bin": b"x"}, None))
    assert list(weights.tensors) == ["a"]


def test_hidden_files_are_none_of_the_checkpoints(tmp_path: Path) -> None:
    weights = read_weights(hub(tmp_path, {"model.safetensors": shard(["a"]), "._model.safetensors": b"x"}, None))
    assert list(weights.tensors) == ["a"]


def test_a_directory_without_weights_is_refused_and_a_gguf_in_it_is_pointed_at(tmp_path: Path) -> None:
    refused(hub(tmp_path / "a", {}, None), "checkpoint/no-weights", "no .safetensors file")
    refused(hub(tmp_path / "b", {"m.gguf": b"GGUF"}, None), "checkpoint/no-weights", "m.gguf")


def test_shards_without_an_index_are_refused(tmp_path: Path) -> None:
    refused(hub(tmp_path / "a", FILES, None), "checkpoint/no-index", ONE, THREE)
    refused(hub(tmp_path / "b", {ONE: FILES[ONE]}, None), "checkpoint/no-index", ONE)
    only = "model-00001-of-00001.safetensors"
    assert list(read_weights(hub(tmp_path / "c", {only: shard(["a"])}, None)).tensors) == ["a"]


def test_the_native_copy_of_a_mistral_checkpoint_is_listed_and_not_read(tmp_path: Path) -> None:
    native = {"consolidated.safetensors": b"not even read"}
    weights = read_weights(hub(tmp_path / "a", FILES | native, OWNERS))
    assert weights.files.not_in_index == ("consolidated.safetensors: (whole file)",)
    refused(hub(tmp_path / "b", native, None), "checkpoint/no-weights", "consolidated.safetensors")


def test_a_file_that_holds_its_header_only_is_listed_as_damaged(tmp_path: Path) -> None:
    content = shard(["a", "b"])
    weights = read_weights(hub(tmp_path, {"model.safetensors": content[:-16]}, None))
    assert weights.files.damaged == ("model.safetensors: header only, no tensor data",)
    assert set(weights.tensors) == {"a", "b"}
