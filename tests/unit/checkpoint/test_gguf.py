from __future__ import annotations

import struct
import time
import tracemalloc
from contextlib import suppress
from pathlib import Path
from typing import Any

import gguf as reference
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proa.checkpoint.gguf import read_gguf
from proa.errors import CheckpointError
from tests.factories import raw_files as raw
from tests.factories.raw_files import STRING, U32, array, pair, tensor, text

# Seconds of the processor: a busy machine must not fail the test.
MAX_SECONDS, MAX_BYTES = 0.1, 64 * 2**20
F32, Q8_0 = 0, 8
_TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
NAME = pair("general.architecture", STRING, "llama")
W = tensor("w", [8], F32, 0)
SMALL = raw.gguf(
    [NAME, pair("n", U32, 7), array("t", STRING, 2, text("ab") + text("c")), array("f", raw.F32, 2, bytes(8))],
    [W, tensor("v", [32, 2], Q8_0, 32)],
    bytes(32) + bytes(68) + bytes(28),
)


@pytest.fixture
def refused(tmp_path: Path):
    """The file is refused with this slug and these words, within the issue's bounds of time and memory."""

    def read(content: bytes, slug: str, *words: str) -> None:
        path = tmp_path / "m.gguf"
        path.write_bytes(content)
        tracemalloc.start()
        started = time.process_time()
        try:
            with pytest.raises(CheckpointError) as error:
                read_gguf(path)
            seconds, peak = time.process_time() - started, tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert error.value.slug == slug
        for word in ("m.gguf", *words):
            assert word in str(error.value)
        assert seconds < MAX_SECONDS and peak < MAX_BYTES

    return read


@pytest.mark.parametrize("version", [2, 3])
def test_metadata_of_every_scalar_type_texts_and_arrays_are_read(tmp_path: Path, version: int) -> None:
    values = {0: 200, 1: -5, 2: 60000, 3: -300, U32: 2**32 - 1, 5: -(2**31), raw.F32: 0.5, raw.BOOL: True}
    values |= {raw.U64: 2**64 - 1, 11: -(2**63), 12: 1e300}
    pairs = [pair(f"s{kind}", kind, value) for kind, value in values.items()] + [pair("text", STRING, "é↑")]
    for kind, value in values.items():
        pairs.append(array(f"a{kind}", kind, 2, raw.scalar(kind, value) * 2))
    pairs += [array("texts", STRING, 3, text("a") + text("") + text("▁b")), array("none", U32, 0, b"")]
    (tmp_path / "m.gguf").write_bytes(raw.gguf(pairs, [], b"", version=version))
    metadata = read_gguf(tmp_path / "m.gguf").metadata
    for kind, value in values.items():
        assert metadata[f"s{kind}"] == value and type(metadata[f"s{kind}"]) is type(value)
        assert metadata[f"a{kind}"] == (value, value)
    assert metadata["text"] == "é↑" and metadata["texts"] == ("a", "", "▁b") and metadata["none"] == ()


def test_tensors_are_where_the_gguf_librarys_writer_put_them(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    rng = np.random.default_rng(0)
    kinds = [k for k in reference.GGMLQuantizationType if k.name in _TYPES]
    assert len(kinds) == 11
    stored: dict[str, Any] = {}
    writer = reference.GGUFWriter(path, "llama")
    writer.add_block_count(3)
    writer.add_token_list(["a", "b"])
    for kind in kinds:
        _, block_bytes = reference.GGML_QUANT_SIZES[kind]
        width = 256 // reference.GGML_QUANT_SIZES[kind][0] * block_bytes
        stored[kind.name] = rng.integers(0, 256, (3, 5, width), dtype=np.uint8)
        writer.add_tensor(kind.name, stored[kind.name], raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = read_gguf(path)
    assert found.metadata["llama.block_count"] == 3 and found.metadata["tokenizer.ggml.tokens"] == ("a", "b")
    content = path.read_bytes()
    assert [info.name for info in found.tensors] == list(stored)
    for info in found.tensors:
        assert info.shape == (3, 5, 256)
        assert info.dtype.name == info.name
        assert content[info.offset : info.offset + info.nbytes] == stored[info.name].tobytes()


def test_shapes_are_the_hubs_with_rows_first(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(SMALL)
    shapes = {info.name: info.shape for info in read_gguf(tmp_path / "m.gguf").tensors}
    assert shapes == {"w": (8,), "v": (2, 32)}


def test_another_alignment_is_followed(tmp_path: Path) -> None:
    pairs = [pair("general.alignment", U32, 64)]
    content = raw.gguf(pairs, [W, tensor("x", [8], F32, 64)], b"a" * 32 + bytes(32) + b"b" * 32, alignment=64)
    (tmp_path / "m.gguf").write_bytes(content)
    for info, letter in zip(read_gguf(tmp_path / "m.gguf").tensors, (b"a", b"b"), strict=True):
        assert content[info.offset : info.offset + info.nbytes] == letter * 32


@pytest.mark.parametrize("size", range(4 + 20))
def test_a_file_shorter_than_its_fixed_part_is_refused(refused: Any, size: int) -> None:
    refused(SMALL[:size], "checkpoint/bad-gguf" if size < 4 else "checkpoint/truncated")


def test_a_file_cut_at_any_byte_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    whole = SMALL[:-28]  # without the padding after the last tensor, which no reader needs
    path.write_bytes(whole)
    assert len(read_gguf(path).tensors) == 2
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"m\.gguf"):
            read_gguf(path)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, len(SMALL) - 1), value=st.binary(min_size=1, max_size=9))
def test_changed_bytes_never_make_the_reader_fail_in_another_way(tmp_path: Path, at: int, value: bytes) -> None:
    content = bytearray(SMALL)
    content[at : at + len(value)] = value
    (tmp_path / "m.gguf").write_bytes(content)
    with suppress(CheckpointError):
        read_gguf(tmp_path / "m.gguf")


@pytest.mark.parametrize("kind", [STRING, U32, raw.U64, raw.BOOL, 1])
@pytest.mark.parametrize("count", [2**50, 2**63, 2**64 - 1, 2**32, 1000])
def test_an_array_length_beyond_the_file_is_refused(refused: Any, kind: int, count: int) -> None:
    refused(raw.gguf([NAME, array("big", kind, count, bytes(64))], [], b""), "checkpoint/truncated", "big")


def test_more_array_elements_than_any_vocabulary_has_are_refused_before_they_are_built(refused: Any) -> None:
    count = 2**21 + 1
    refused(raw.gguf([array("big", raw.BOOL, count, bytes(count))], [], b""), "checkpoint/bad-gguf", "big", str(count))
    half = array("one", 1, 2**20 + 1, bytes(2**20 + 1)), array("two", 1, 2**20, bytes(2**20))
    refused(raw.gguf(half, [], b""), "checkpoint/bad-gguf", "two")


@pytest.mark.parametrize("kind", [raw.ARRAY])
def test_nested_arrays_are_refused(refused: Any, kind: int) -> None:
    inner = struct.pack("<IQ", kind, 1) * 1000
    refused(raw.gguf([array("nested", kind, 1, inner)], [], b""), "checkpoint/bad-gguf", "nested", "array of arrays")


@pytest.mark.parametrize("kind", [13, 255, 2**31])
def test_an_unknown_value_type_is_refused(refused: Any, kind: int) -> None:
    refused(
        raw.gguf([text("odd") + struct.pack("<I", kind) + bytes(8)], [], b""), "checkpoint/bad-gguf", "odd", str(kind)
    )
    refused(raw.gguf([array("odd", kind, 1, bytes(8))], [], b""), "checkpoint/bad-gguf", "odd", str(kind))


@pytest.mark.parametrize("length", [2**50, 2**63, 2**64 - 1, 500])
def test_a_text_longer_than_the_file_is_refused(refused: Any, length: int) -> None:
    body = struct.pack("<Q", length) + b"abc"
    refused(raw.gguf([text("key") + struct.pack("<I", STRING) + body], [], b""), "checkpoint/truncated", "key")
    refused(raw.gguf([body + bytes(20)], [], b""), "checkpoint/truncated", "a metadata key")
    refused(raw.gguf([array("list", STRING, 1, body)], [], b""), "checkpoint/truncated", "list")


def test_texts_that_are_far_too_long_are_refused_without_reading_them(refused: Any) -> None:
    refused(raw.gguf([pair("t", STRING, "x" * (2**22 + 1))], [], b""), "checkpoint/bad-gguf", "t is a text of")
    refused(raw.gguf([pair("k" * 2000, U32, 1)], [], b""), "checkpoint/bad-gguf", "a metadata key is a text of 2000")


def test_a_text_that_is_not_utf8_is_refused(refused: Any) -> None:
    refused(
        raw.gguf([text("t") + struct.pack("<I", STRING) + text(b"\xff\xfe")], [], b""),
        "checkpoint/bad-gguf",
        "not UTF-8",
    )


def test_values_that_are_no_truth_value_and_no_number_are_refused(refused: Any) -> None:
    refused(raw.gguf([text("b") + struct.pack("<IB", raw.BOOL, 2)], [], b""), "checkpoint/bad-gguf", "b has a boolean")
    refused(raw.gguf([pair("x", raw.F32, float("nan"))], [], b""), "checkpoint/bad-gguf", "x is nan")
    refused(raw.gguf([pair("x", 12, float("inf"))], [], b""), "checkpoint/bad-gguf", "x is inf")


@pytest.mark.parametrize("counts", [(2**60, 1), (0, 2**60), (2**64 - 1, 2**64 - 1), (30, 1)])
def test_counts_that_the_file_cannot_hold_are_refused(refused: Any, counts: tuple[int, int]) -> None:
    refused(raw.gguf([NAME], [W], bytes(32), counts=counts), "checkpoint/bad-gguf", str(counts[0]), str(counts[1]))


def test_duplicate_keys_and_tensor_names_are_refused_by_name(refused: Any) -> None:
    refused(raw.gguf([NAME, NAME], [], b""), "checkpoint/duplicate-key", "general.architecture")
    refused(raw.gguf([], [W, tensor("w", [8], F32, 32)], bytes(64)), "checkpoint/duplicate-tensor", "w")


@pytest.mark.parametrize("value", [0, 1, 4, 12, 33, 2**17, 2**31])
def test_an_alignment_that_is_no_sensible_power_of_two_is_refused(refused: Any, value: int) -> None:
    refused(
        raw.gguf([pair("general.alignment", U32, value)], [W], bytes(32)),
        "checkpoint/bad-gguf",
        "alignment",
        str(value),
    )


def test_an_alignment_of_another_type_is_refused(refused: Any) -> None:
    refused(raw.gguf([pair("general.alignment", STRING, "32")], [W], bytes(32)), "checkpoint/bad-gguf", "alignment")
    refused(raw.gguf([pair("general.alignment", raw.BOOL, True)], [W], bytes(32)), "checkpoint/bad-gguf", "alignment")


@pytest.mark.parametrize("offset", [64, 2**40, 2**63, 2**64 - 32])
def test_an_offset_beyond_the_file_is_refused(refused: Any, offset: int) -> None:
    refused(raw.gguf([], [tensor("far", [8], F32, offset)], bytes(32)), "checkpoint/truncated", "far")


def test_an_offset_off_the_alignment_is_refused(refused: Any) -> None:
    refused(raw.gguf([], [tensor("odd", [8], F32, 16)], bytes(64)), "checkpoint/bad-gguf", "odd", "16")


def test_overlapping_tensors_are_refused_and_both_are_named(refused: Any) -> None:
    same = [tensor("first", [16], F32, 0), tensor("second", [8], F32, 32)]
    refused(raw.gguf([], same, bytes(64)), "checkpoint/overlap", "first", "second")
    refused(
        raw.gguf([], [tensor("first", [8], F32, 0), tensor("second", [8], F32, 0)], bytes(32)),
        "checkpoint/overlap",
        "second",
    )


def test_holes_and_trailing_bytes_are_refused(refused: Any) -> None:
    refused(raw.gguf([], [W, tensor("x", [8], F32, 64)], bytes(96)), "checkpoint/hole", "x")
    refused(raw.gguf([], [W], bytes(32 + 32)), "checkpoint/trailing-bytes")


@pytest.mark.parametrize("dims", [[2**40, 2**40], [2**62], [2**63, 2], [3, 2**30]])
def test_a_tensor_larger_than_the_file_is_refused(refused: Any, dims: list[int]) -> None:
    refused(raw.gguf([], [tensor("huge", dims, F32, 0)], bytes(32)), "checkpoint/truncated", "huge")


def test_a_huge_tensor_without_elements_is_refused(refused: Any) -> None:
    refused(raw.gguf([], [tensor("void", [0, 2**40], F32, 0)], b""), "checkpoint/huge-empty-tensor", "void")


@pytest.mark.parametrize("rank", [0, 5, 2**32 - 1])
def test_a_tensor_of_no_or_too_many_dimensions_is_refused(refused: Any, rank: int) -> None:
    table = text("w") + struct.pack("<I", rank) + bytes(64)
    refused(raw.gguf([], [table], b""), "checkpoint/bad-gguf", "w", str(rank))


def test_rows_that_are_not_whole_blocks_are_refused(refused: Any) -> None:
    refused(raw.gguf([], [tensor("w", [16, 2], Q8_0, 0)], bytes(64)), "checkpoint/bad-gguf", "w", "16", "Q8_0")


@pytest.mark.parametrize(
    ("kind", "word"), [(10, "Q2_K"), (20, "IQ4_NL"), (26, "I32"), (39, "MXFP4"), (4, "type 4"), (99, "type 99")]
)
def test_a_tensor_type_without_code_is_refused_by_name(refused: Any, kind: int, word: str) -> None:
    refused(raw.gguf([], [tensor("blk.0.w", [256], kind, 0)], bytes(256)), "checkpoint/unknown-dtype", "blk.0.w", word)


def test_names_of_tensor_types_are_the_gguf_librarys() -> None:
    from proa.checkpoint import gguf as own

    known = {kind: dtype.name for kind, dtype in own._DTYPES.items()} | dict(own._OTHER_TYPES)
    theirs = {kind.value: kind.name for kind in reference.GGMLQuantizationType}
    assert {kind: known[kind] for kind in known.keys() & theirs.keys()} == {
        kind: theirs[kind] for kind in known.keys() & theirs.keys()
    }


@pytest.mark.parametrize("version", [0, 1, 4, 2**31])
def test_other_versions_are_refused(refused: Any, version: int) -> None:
    refused(raw.gguf([NAME], [], b"", version=version), "checkpoint/gguf-version", str(version))


@pytest.mark.parametrize("version", [2, 3])
def test_big_endian_files_are_refused_by_that_name(refused: Any, version: int) -> None:
    refused(raw.gguf([NAME], [], b"", version=version << 24), "checkpoint/gguf-version", "big endian")


def test_other_formats_are_refused_by_magic(refused: Any) -> None:
    refused(b"PK\x03\x04" + bytes(100), "checkpoint/pickle", "zip")
    refused(b"\x80\x02\x8a\x0a" + bytes(100), "checkpoint/pickle")
    refused(b"ggml" + bytes(100), "checkpoint/bad-gguf", "not a GGUF file")


def test_a_vocabulary_of_150_thousand_tokens_with_merges_is_read_in_well_under_a_second(tmp_path: Path) -> None:
    tokens = [f"token{i}" for i in range(150_000)]
    payload = b"".join(map(text, tokens))
    pairs = [array("tokens", STRING, len(tokens), payload), array("merges", STRING, len(tokens), payload)]
    (tmp_path / "m.gguf").write_bytes(raw.gguf(pairs, [], b""))
    started = time.process_time()
    metadata = read_gguf(tmp_path / "m.gguf").metadata
    assert time.process_time() - started < 1.5
    assert metadata["tokens"] == metadata["merges"] == tuple(tokens)
