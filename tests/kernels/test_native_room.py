"""Memory for packed weights: tensors lie beside each other, never in each other, and outlive the room."""

from __future__ import annotations

import pytest
import torch

from proa.kernels.native.room import CHUNK, HUGE, LINE, WeightRoom


def test_tensors_lie_on_whole_lines_one_behind_the_other() -> None:
    room = WeightRoom()
    first, second = room.empty((3, 5), torch.bfloat16), room.empty((7,), torch.float32)
    assert first.shape == (3, 5) and first.dtype == torch.bfloat16 and second.dtype == torch.float32
    assert first.data_ptr() % HUGE == 0 and second.data_ptr() == first.data_ptr() + LINE


@pytest.mark.parametrize("nbytes", [CHUNK // 2 + 1, CHUNK, CHUNK + 1])
def test_what_a_chunk_cannot_hold_begins_the_next(nbytes: int) -> None:
    room = WeightRoom()
    tensors = [room.empty((nbytes,), torch.uint8) for _ in range(3)]
    for value, tensor in enumerate(tensors):
        tensor[[0, -1]] = value
    assert [tensor[[0, -1]].tolist() for tensor in tensors] == [[0, 0], [1, 1], [2, 2]]
    assert all(tensor.data_ptr() % HUGE == 0 for tensor in tensors)


def test_tensors_outlive_the_room() -> None:
    room = WeightRoom()
    tensor = room.empty((1000,), torch.int64)
    tensor.copy_(torch.arange(1000))
    del room
    assert tensor.tolist() == list(range(1000))
