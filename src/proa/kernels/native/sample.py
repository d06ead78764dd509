"""Native sampling: kernels/seam.py's SampleOps on the compiled library. Owns the calls, no arithmetic.

Where two tokens' scores, or a mass and its bound, are so close that another library's exponentials and logarithms could
decide otherwise, csrc/sample.h decides nothing and the reference does: the tokens are the reference's own.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from itertools import chain

import torch

from proa.kernels.native.abi import COp, Kind
from proa.kernels.native.sink import Sink
from proa.kernels.reference.sample import token_of
from proa.kernels.seam import Draw

UNDECIDED = -1  # of csrc/sample.h
DRAW = "qQqddd"  # struct Draw of csrc/sample.h: packed so, 32 rows take 12 µs, and 65 as ctypes structures


class NativeSample:
    """SampleOps on the compiled library."""

    name = "native"

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def sample(self, logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
        tokens = self.decided(logits, draws)
        for index, one in enumerate(draws):
            if tokens[index] == UNDECIDED:
                tokens[index] = token_of(logits[one.row].numpy(), one)
        return tokens

    def decided(self, logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
        """As `sample`, but UNDECIDED where rounding could matter."""
        rows = ctypes.create_string_buffer(struct.pack(DRAW * len(draws), *chain.from_iterable(draws)))
        tokens = (ctypes.c_int64 * len(draws))()
        op = COp(
            kind=Kind.SAMPLE,
            n=logits.shape[1],
            m=logits.stride(0),
            a=logits.data_ptr(),
            b=ctypes.addressof(rows),
            out=ctypes.addressof(tokens),
        )
        self._sink.emit(torch.float32, op, len(draws), (rows, tokens))
        return list(tokens)
