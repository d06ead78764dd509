from __future__ import annotations

import json
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from proa.checkpoint.header import read_header
from proa.errors import CheckpointError
from tests.factories.raw_files import entry, safetensors, shard

FILE = "model.safetensors"


@pytest.fixture
def refused(tmp_path: Path):
    def read(content: bytes, slug: str, *words: str) -> CheckpointError:
        (tmp_path / FILE).write_bytes(content)
        with pytest.raises(CheckpointError) as error:
            read_header(tmp_path / FILE)
        assert error.value.slug == slug
        for word in (FILE, *words):
            assert word in str(error.value)
        return error.value

    return read


def test_names_types_shapes_and_bytes_are_those_that_the_safetensors_library_wrote(tmp_path: Path) -> None:
    kinds = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
    kinds += [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8]
    tensors = {str(kind): torch.arange(6).reshape(2, 3).to(kind) for kind in (*kinds, torch.bool)}
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 5)}
    save_file(tensors, tmp_path / FILE, {"format": "pt"})
    raw = (tmp_path / FILE).read_bytes()
    header = read_header(tmp_path / FILE)
    assert header.tensors.keys() == tensors.keys()
    assert header.size == len(raw) and not header.headers_only
    for name, info in header.tensors.items():
        stored = tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if info.nbytes else b""
        assert raw[info.offset : info.offset + info.nbytes] == stored
        assert info.shape == tuple(tensors[name].shape)
        assert info.name == info.stored_name == name and info.row_order is None


def test_a_file_cut_anywhere_is_refused_with_both_sizes_or_known_to_hold_headers_only(tmp_path: Path) -> None:
    whole = shard(["a", "b"])
    start = 8 + struct.unpack_from("<Q", whole)[0]
    for size in range(len(whole)):
        (tmp_path / FILE).write_bytes(whole[:size])
        if size == start:
            assert read_header(tmp_path / FILE).headers_only
            continue
        with pytest.raises(CheckpointError, match=rf"model\.safetensors: is truncated: it has {size} bytes") as error:
            read_header(tmp_path / FILE)
        assert error.value.slug == "checkpoint/truncated"
        if size >= start:
            assert str(len(whole)) in str(error.value)


def test_trailing_bytes_are_refused_with_both_sizes(refused: Any) -> None:
    whole = shard(["a"])
    refused(
        whole + b"xyz", "checkpoint/trailing-bytes", str(len(whole)), str(len(whole) + 3), "3 bytes belong to no tensor"
    )


@pytest.mark.parametrize("length", [100_000_001, 2**62, 2**63, 2**64 - 1])
def test_a_header_length_beyond_the_bound_is_refused_before_it_is_read(refused: Any, length: int) -> None:
    started = time.process_time()
    refused(struct.pack("<Q", length) + b"{" + bytes(100), "checkpoint/bad-header", str(length))
    assert time.process_time() - started < 0.1


@pytest.mark.parametrize(
    "content", [struct.pack("<Q", 0) + b"{" + bytes(50), struct.pack("<Q", 4) + b"[1] ", bytes(60)]
)
def test_a_header_that_is_not_a_json_object_is_refused(refused: Any, content: bytes) -> None:
    refused(content, "checkpoint/bad-json")


def test_duplicate_tensor_names_are_refused(refused: Any) -> None:
    one = json.dumps(entry("F32", [2], 0, 8))
    refused(safetensors(f'{{"a.weight": {one}, "a.weight": {one}}}', bytes(8)), "checkpoint/duplicate-key", "a.weight")


@pytest.mark.parametrize(
    ("metadata", "key"),
    [
        ('"__metadata__": {"format": "pt", "format": "np"}', "format"),
        ('"__metadata__": {"format": "pt"}, "__metadata__": {"format": "pt"}', "__metadata__"),
        # Numbers where texts belong have two quotes less each: ten in all hide those of a second tensor.
        ('"__metadata__": {"a": 1, "b": 1, "c": 1, "d": 1, "e": 1}, "a.weight": ENTRY', "a.weight"),
        ('"\\u0061.weight": ENTRY', "a.weight"),
    ],
)
def test_a_key_that_appears_twice_is_refused_wherever_it_stands(refused: Any, metadata: str, key: str) -> None:
    one = json.dumps(entry("F32", [1], 0, 4))
    header = f'{{"a.weight": {one}, {metadata.replace("ENTRY", one)}}}'
    refused(safetensors(header, bytes(4)), "checkpoint/duplicate-key", key)


def test_overlapping_tensors_are_refused_and_both_are_named(refused: Any) -> None:
    header = {"first": entry("F32", [2], 0, 8), "second": entry("F32", [2], 4, 12)}
    refused(safetensors(header, bytes(12)), "checkpoint/overlap", "first", "second")


def test_a_hole_between_tensors_is_refused(refused: Any) -> None:
    header = {"first": entry("F32", [2], 0, 8), "second": entry("F32", [2], 12, 20)}
    refused(safetensors(header, bytes(20)), "checkpoint/hole", "first", "second")


@pytest.mark.parametrize("shape", [[0, 2**40], [2**62, 0], [1, 0, 2**25]])
def test_a_huge_tensor_without_elements_is_refused(refused: Any, shape: list[int]) -> None:
    refused(safetensors({"void": entry("F32", shape, 0, 0)}, b""), "checkpoint/huge-empty-tensor", "void")


@pytest.mark.parametrize("dtype", ["F31", "f32", "", None, 7, ["F32"], "Q4_0"])
def test_an_unknown_dtype_is_refused_by_name(refused: Any, dtype: Any) -> None:
    refused(safetensors({"w": entry(dtype, [2], 0, 8)}, bytes(8)), "checkpoint/unknown-dtype", "w", repr(dtype))


@pytest.mark.parametrize("shape", [[-1, -2], [2.0], [True, 2], "2", None, [[2]], {"0": 2}])
def test_a_shape_that_is_not_a_list_of_naturals_is_refused(refused: Any, shape: Any) -> None:
    bad = {"dtype": "F32", "shape": shape, "data_offsets": [0, 8]}
    refused(safetensors({"w": bad}, bytes(8)), "checkpoint/bad-header", "w", "shape")


@pytest.mark.parametrize("offsets", [[8, 0], [0], [0, 8, 8], [-8, 0], [0.0, 8], None, "08", [True, 8]])
def test_offsets_that_are_no_range_are_refused(refused: Any, offsets: Any) -> None:
    bad = {"dtype": "F32", "shape": [2], "data_offsets": offsets}
    refused(safetensors({"w": bad}, bytes(8)), "checkpoint/bad-header", "w", "data_offsets")


@pytest.mark.parametrize("shape", [[3], [2**61, 2], [], [2, 2]])
def test_a_shape_that_does_not_fill_its_bytes_is_refused(refused: Any, shape: list[int]) -> None:
    refused(safetensors({"w": entry("F32", shape, 0, 8)}, bytes(8)), "checkpoint/bad-header", "w", "span 8")


@pytest.mark.parametrize("bad", [3, None, [], {}, {"dtype": "F32"}, entry("F32", [2], 0, 8) | {"extra": 1}])
def test_an_entry_of_another_form_is_refused(refused: Any, bad: Any) -> None:
    refused(safetensors({"w": bad}, bytes(8)), "checkpoint/bad-header", "w")


@pytest.mark.parametrize(
    ("head", "slug"),
    [
        (b"PK\x03\x04" + bytes(60), "checkpoint/pickle"),
        (b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20" + bytes(60), "checkpoint/pickle"),
        (b"\x80\x05\x95\x10\x00\x00\x00\x00\x00\x00\x00}" + bytes(60), "checkpoint/pickle"),
        (b"GGUF\x03\x00\x00\x00" + bytes(60), "checkpoint/wrong-form"),
    ],
)
def test_another_format_under_the_name_of_safetensors_is_refused_by_its_magic(
    refused: Any, head: bytes, slug: str
) -> None:
    refused(head, slug)


def test_a_header_whose_length_looks_like_a_pickle_is_still_safetensors(tmp_path: Path) -> None:
    content = safetensors({"w": entry("F32", [2], 0, 8), "__metadata__": {}}, b"")
    padded = content[8:] + b" " * (0x0280 - len(content[8:]))
    (tmp_path / FILE).write_bytes(struct.pack("<Q", 0x0280) + padded + bytes(8))
    assert (tmp_path / FILE).read_bytes()[:2] == b"\x80\x02"
    assert list(read_header(tmp_path / FILE).tensors) == ["w"]


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 200), byte=st.integers(0, 255))
def test_one_changed_byte_never_makes_the_reader_fail_in_another_way(tmp_path: Path, at: int, byte: int) -> None:
    content = bytearray(shard(["a.weight", "b.weight"]))
    content[at % len(content)] = byte
    (tmp_path / FILE).write_bytes(content)
    with suppress(CheckpointError):
        read_header(tmp_path / FILE)
