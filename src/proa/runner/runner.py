"""One runner: a built model with its own cache, block tables and state tables. Runs forwards; decides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from proa.arch.decoder import DecoderSpec
from proa.arch.delta_blocks import BLOCK
from proa.cache.kv import KVCache, StateMemory
from proa.cache.pages import PagePool
from proa.cache.state import StateTables
from proa.cache.state_values import Replay, StateRoom
from proa.cache.tables import BlockTables
from proa.cache.transaction import Participant
from proa.kernels.delta import NONE, StateSlots
from proa.kernels.kernel_set import KernelSet
from proa.layers.base import state_dtype, torch_dtype
from proa.layers.decoder import Decoder
from proa.loading.ledger import LoadLedger
from proa.plan.runner_plan import RunnerPlan
from proa.runner import describe
from proa.runner.batch import ForwardOutput, RowSpan, make_batch
from proa.runner.recorded import RecordedForward
from proa.units import Phase


class Runner:
    """`tables` says which rows of the cache belong to whom; the caller reserves rows before it asks for a forward.

    `states` does so for the states of delta layers; None where the model has no such layers. `gives_hidden`: each
    forward also returns its rows after the final norm, because a drafter reads them.
    """

    def __init__(
        self,
        plan: RunnerPlan,
        spec: DecoderSpec,
        model: Decoder,
        ledger: LoadLedger,
        num_pages: int,
        *,
        gives_hidden: bool,
        room: StateRoom | None = None,
    ) -> None:
        """`room` is for the states of delta layers. Raises TypeError if the model has such layers and there is none, or
        the reverse."""
        if (room is not None) != bool(spec.delta_layers):
            raise TypeError(f"a model with {len(spec.delta_layers)} delta layers was given {room} for their states")
        self.plan = plan
        self.ledger = ledger
        self.room = room
        self.tables = BlockTables(PagePool(num_pages), plan.page_size.value)
        self._model = model
        self._windows = frozenset(layer.mixer.window for layer in spec.layers)
        self._device = plan.device.value
        self._kv = KVCache(
            (layer.mixer for layer in spec.layers),
            num_pages=num_pages,
            page_size=plan.page_size.value,
            dtype=torch_dtype(plan.kv_dtype.value),
            device=self._device,
            states=None if room is None else _memory(plan, room),
        )
        replay = partial(_replay, model, self._kv)  # not a method: the tables do not hold the runner
        self.states = None if room is None else StateTables(room, state_dtype(plan), replay)
        self._gives_hidden = gives_hidden
        recorded = RecordedForward(model, spec, self._kv.layers, gives_hidden=gives_hidden)
        # A program runs none of torch's ops, and entering the mode costs as much as building a batch.
        by_layers = torch.inference_mode()(partial(model, kv=self._kv.layers))
        self._forward = recorded if recorded.is_possible else by_layers

    @property
    def kernels(self) -> KernelSet:
        """The planned kernels, of which sampling is of use to others."""
        return self._model.kernels

    @property
    def participants(self) -> tuple[Participant, ...]:
        """What a step's transaction holds of this runner."""
        return (self.tables,) if self.states is None else (self.tables, self.states)

    def forward(self, spans: Sequence[RowSpan]) -> ForwardOutput:
        """Compute the rows of all spans, write their keys, values and states, return the logits that the spans want."""
        self._check_states(spans)
        batch = make_batch(
            spans,
            page_size=self._kv.page_size,
            windows=self._windows,
            device=self._device,
            wants_hidden=self._gives_hidden,
        )
        logits, hidden = self._forward(batch)
        return ForwardOutput(logits=logits, hidden=hidden)

    def _check_states(self, spans: Sequence[RowSpan]) -> None:
        """A row's bits must not depend on how its prompt was cut (arch/delta_blocks.py: BLOCK)."""
        for span in spans:
            if (span.state is None) != (self.states is None):
                raise RuntimeError(f"rows from {span.start} on came {'with' if span.state else 'without'} states")
            if self.states is not None and span.phase is Phase.PREFILL and span.start % BLOCK:
                raise RuntimeError(
                    f"a prefill begins at row {span.start}: for linear attention prompts are cut at multiples of "
                    f"{BLOCK} only, and rows after a prompt's end are decoded or verified"
                )

    def describe(self) -> dict[str, Any]:
        """What was really built: kernels per phase, types, layout, sizes. Equal to what the plan promised."""
        return describe.built(self._model, self._kv)

    def kernel_calls(self) -> dict[str, int]:
        """Calls so far, by `op/backend`."""
        return {f"{op}/{backend}": count for (op, backend), count in sorted(self._model.kernels.calls.items())}


def _memory(plan: RunnerPlan, room: StateRoom) -> StateMemory:
    return StateMemory(
        slots=room.slots,
        kept_rows=room.kept_rows,
        dtype=torch_dtype(plan.dtype.value),
        delta_dtype=torch_dtype(state_dtype(plan)),
    )


@torch.inference_mode()
def _replay(model: Decoder, kv: KVCache, replays: Sequence[Replay]) -> None:
    targets = [slot for one in replays for slot in (*[NONE] * (len(one.kept) - 1), one.target)]
    kept = [row for one in replays for row in one.kept]
    slots = StateSlots.of([one.source for one in replays], targets, kept)
    model.replay(kv.layers, np.array([len(one.kept) for one in replays]), slots)
