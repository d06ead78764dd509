"""A model's forward as one native program, recorded from the layers' own code. Owns no op and no weight."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from proa.kernels.native.ops import request_rows
from proa.kernels.native.sink import Program
from proa.kernels.seam import LayerKV, Segment
from proa.layers.base import ForwardBatch
from proa.layers.decoder import Decoder
from proa.units import Phase

SMALLEST = 64  # rows of the first workspace: many decoding requests, or a short prompt


class RecordedForward:
    """Records when more rows are asked for than ever before; the workspace then doubles."""

    def __init__(self, model: Decoder, kv: Sequence[LayerKV], vocab: int) -> None:
        self._model, self._kv, self._vocab = model, kv, vocab
        self._program: Program | None = self._record(SMALLEST)

    @property
    def is_possible(self) -> bool:
        """Every kernel of the model can be recorded."""
        return self._program is not None

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        """Logits [R, V] float32, as the model gives them."""
        rows = len(batch.token_ids)
        if self._program is None or rows > self._program.capacity:
            self._program = self._record(max(SMALLEST, 1 << (rows - 1).bit_length()))
        if self._program is None:
            return self._model(batch, self._kv)
        wanted = torch.arange(rows) if batch.logits_rows is None else batch.logits_rows
        logits = torch.empty((len(wanted), self._vocab))
        fields = {
            "token_ids": batch.token_ids,
            "positions": batch.positions,
            "slots": batch.write_slots,
            "logits_rows": wanted,
            "requests": request_rows(batch.segments, 0),
            "logits": logits,
        }
        self._program.run(rows, fields)
        self._model.kernels.count(self._program, {segment.phase for segment in batch.segments})
        return logits

    def _record(self, capacity: int) -> Program | None:
        rows = torch.zeros(capacity, dtype=torch.int64)
        batch = ForwardBatch(
            token_ids=rows, positions=rows, write_slots=rows, segments=(_all_rows(capacity),), logits_rows=rows
        )
        return self._model.kernels.record(capacity, lambda: self._model(batch, self._kv))


def _all_rows(count: int) -> Segment:
    """One segment that stands for whatever requests a run will have."""
    return Segment(
        phase=Phase.DECODE,
        first=0,
        num_rows=count,
        requests=1,
        queries=count,
        rows=np.zeros((1, 3), dtype=np.int64),
        tables=np.zeros((1, 1), dtype=np.int32),
        pad=None,
        unpad=None,
        views={},
    )
