"""One runner: a built model with its own cache and block tables. Runs forwards; decides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from proa.arch.decoder import DecoderSpec
from proa.cache.kv import KVCache
from proa.cache.pages import PagePool
from proa.cache.tables import BlockTables
from proa.layers.base import torch_dtype
from proa.layers.decoder import Decoder
from proa.loading.ledger import LoadLedger
from proa.plan.runner_plan import RunnerPlan
from proa.runner import describe
from proa.runner.batch import ForwardOutput, RowSpan, make_batch
from proa.runner.recorded import RecordedForward


class Runner:
    """`tables` says which rows of the cache belong to whom; the caller reserves rows before it asks for a forward."""

    def __init__(self, plan: RunnerPlan, spec: DecoderSpec, model: Decoder, ledger: LoadLedger, num_pages: int) -> None:
        self.plan = plan
        self.ledger = ledger
        self.tables = BlockTables(PagePool(num_pages), plan.page_size.value)
        self._model = model
        self._windows = frozenset(layer.mixer.window for layer in spec.layers)
        self._device = plan.device.value
        self._kv = KVCache(
            ((layer.mixer.num_kv_heads, layer.mixer.head_dim) for layer in spec.layers),
            num_pages=num_pages,
            page_size=plan.page_size.value,
            dtype=torch_dtype(plan.kv_dtype.value),
            device=self._device,
        )
        recorded = RecordedForward(model, self._kv.layers, spec.vocab)
        self._forward = recorded if recorded.is_possible else partial(model, kv=self._kv.layers)

    @torch.inference_mode()
    def forward(self, spans: Sequence[RowSpan]) -> ForwardOutput:
        """Compute the rows of all spans, write their keys and values, return the logits that the spans want."""
        batch = make_batch(spans, page_size=self._kv.page_size, windows=self._windows, device=self._device)
        return ForwardOutput(logits=self._forward(batch))

    def describe(self) -> dict[str, Any]:
        """What was really built: kernels per phase, types, layout, sizes. Equal to what the plan promised."""
        return describe.built(self._model, self._kv)

    def kernel_calls(self) -> dict[str, int]:
        """Calls so far, by `op/backend`."""
        return {f"{op}/{backend}": count for (op, backend), count in sorted(self._model.kernels.calls.items())}
