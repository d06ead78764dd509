"""kernels/memory.py: where large tensors lie, and that nothing else differs from torch.empty."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import pytest
import torch

from proa.kernels.memory import CHUNK, HUGE_PAGE, LINE, Room, empty

linux = pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="huge pages are Linux's")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(3, 5), (1025, 2049), (2, 1024, 1024)])
def test_as_torch_empty(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    made, expected = empty(shape, dtype), torch.empty(shape, dtype=dtype)
    assert (made.shape, made.dtype, made.stride()) == (expected.shape, expected.dtype, expected.stride())
    made.view(torch.uint8).fill_(7)
    assert int(made.view(torch.uint8).long().sum()) == 7 * expected.nbytes
    assert made.untyped_storage().data_ptr() == made.data_ptr()  # layers/linear.py: kept compares these


@linux
def test_a_large_tensor_begins_at_a_huge_page_and_a_small_one_takes_none() -> None:
    assert empty((HUGE_PAGE,), torch.uint8).data_ptr() % HUGE_PAGE == 0
    assert "hg" in flags(empty((2 * HUGE_PAGE,), torch.uint8))
    assert "hg" not in flags(torch.empty(64 * HUGE_PAGE, dtype=torch.uint8))


@linux
def test_memory_goes_with_its_tensor_and_not_before() -> None:
    whole = empty((64 * HUGE_PAGE,), torch.uint8)
    address, part = whole.data_ptr(), whole[HUGE_PAGE:].view(torch.float32)
    del whole
    part.fill_(1.0)
    assert flags_at(address)
    del part
    assert not flags_at(address)


def test_tensors_of_a_room_lie_on_whole_lines_one_behind_the_other() -> None:
    room = Room()
    first, second = room.empty((3, 5), torch.bfloat16), room.empty((7,), torch.float32)
    assert first.shape == (3, 5) and first.dtype == torch.bfloat16 and second.dtype == torch.float32
    assert first.data_ptr() % HUGE_PAGE == 0 and second.data_ptr() == first.data_ptr() + LINE
    assert second.untyped_storage().data_ptr() == second.data_ptr() and second.untyped_storage().nbytes() >= 28


@pytest.mark.parametrize("nbytes", [CHUNK // 2 + 1, CHUNK, CHUNK + 1])
def test_what_a_chunk_cannot_hold_begins_the_next(nbytes: int) -> None:
    room = Room()
    tensors = [room.empty((nbytes,), torch.uint8) for _ in range(3)]
    for value, tensor in enumerate(tensors):
        tensor[[0, -1]] = value
    assert [tensor[[0, -1]].tolist() for tensor in tensors] == [[0, 0], [1, 1], [2, 2]]
    assert all(tensor.data_ptr() % HUGE_PAGE == 0 for tensor in tensors)


def test_tensors_outlive_their_room() -> None:
    room = Room()
    tensor = room.empty((1000,), torch.int64)
    tensor.copy_(torch.arange(1000))
    del room
    assert tensor.tolist() == list(range(1000))


def test_another_device_is_torchs_own() -> None:
    assert empty((HUGE_PAGE,), torch.uint8, "meta").device.type == "meta"


def flags(tensor: torch.Tensor) -> list[str]:
    return flags_at(tensor.data_ptr())


def flags_at(address: int) -> list[str]:
    """The flags of the mapping that holds an address, as the system lists them; none where there is no mapping."""
    text = Path("/proc/self/smaps").read_text(encoding="utf-8")
    for first, last, named in re.findall(
        r"^([0-9a-f]+)-([0-9a-f]+) [^\n]*\n(?:[A-Z](?!mFlags)[^\n]*\n)*VmFlags:([^\n]*)", text, re.M
    ):
        if int(first, 16) <= address < int(last, 16):
            return named.split()
    return []
