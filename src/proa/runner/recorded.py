"""A model's forward as one native program, recorded from the layers' own code. Owns no op and no weight."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from proa.arch.decoder import DecoderSpec
from proa.cache.kv import LayerCache
from proa.kernels.delta import NONE, StateSlots
from proa.kernels.native.delta import batch_states
from proa.kernels.native.ops import request_rows
from proa.kernels.native.sink import Program, lend
from proa.kernels.seam import Segment
from proa.layers.base import ForwardBatch
from proa.layers.decoder import Decoder
from proa.units import Phase

SMALLEST = 64  # rows of the first workspace: many decoding requests, or a short prompt


class RecordedForward:
    """Records when more rows are asked for than ever before; the workspace then doubles.

    `gives_hidden`: every batch wants its rows after the final norm. They lie in the workspace, and are returned as a
    copy. Logits are the caller's as long as it holds them; their memory then serves a later step, which finds its pages
    mapped.
    """

    def __init__(self, model: Decoder, spec: DecoderSpec, kv: Sequence[LayerCache], *, gives_hidden: bool) -> None:
        self._model, self._kv, self._vocab, self._gives_hidden = model, kv, spec.vocab, gives_hidden
        self._normed: torch.Tensor | None = None
        self._spare: list[np.ndarray] = []
        # Borrowed modules run their owner's kernels, which record nothing here, and no program reads hidden rows.
        is_out_of_reach = bool(spec.borrows) or spec.entry is not None
        self._program = None if is_out_of_reach else self._record(SMALLEST)

    @property
    def is_possible(self) -> bool:
        """Every kernel of the model can be recorded."""
        return self._program is not None

    def __call__(self, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As the model: logits [R, V] float32, and hidden rows [T, D] where they are given."""
        rows = batch.token_ids.shape[0]
        if self._program is None or rows > self._program.capacity:
            self._program = self._record(max(SMALLEST, 1 << (rows - 1).bit_length()))
        if self._program is None:
            return self._model(batch, self._kv)
        wanted = np.arange(rows) if batch.logits_rows is None else batch.logits_rows
        logits = self._logits(wanted.shape[0])
        fields = {
            "token_ids": batch.token_ids,
            "positions": batch.positions,
            "slots": batch.write_slots,
            "logits_rows": wanted,
            "requests": request_rows(batch.segments, 0),
            "logits": logits,
        }
        if batch.states:
            fields["states"] = batch_states(batch.segments, batch.states)
        self._program.run(rows, fields)
        self._model.kernels.count(self._program, {segment.phase for segment in batch.segments})
        return logits, None if self._normed is None else self._normed[:rows].clone()

    def _logits(self, rows: int) -> torch.Tensor:
        """Memory for them. What scores of a whole prompt take is not held on to."""
        if rows > SMALLEST:
            return torch.empty((rows, self._vocab))
        while self._spare and len(self._spare[-1]) < rows:
            self._spare.pop()
        memory = self._spare.pop() if self._spare else torch.empty((rows, self._vocab)).numpy()
        return lend(memory, rows, self._spare)

    def _record(self, capacity: int) -> Program | None:
        rows = torch.zeros(capacity, dtype=torch.int64)
        batch = ForwardBatch(
            token_ids=rows,
            positions=rows,
            write_slots=rows,
            segments=(_all_rows(capacity),),
            logits_rows=rows,
            states=(StateSlots.of([NONE], [NONE] * capacity),),
            wants_hidden=self._gives_hidden,
        )
        return self._model.kernels.record(capacity, lambda: self._forward(batch))

    def _forward(self, batch: ForwardBatch) -> None:
        """One run of the layers, for its recording."""
        _, self._normed = self._model(batch, self._kv)


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
