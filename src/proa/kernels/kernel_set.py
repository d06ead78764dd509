"""The kernels of one runner and the count of their calls. Owns no choice and no backend: bind.py brings them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from proa.arch.blocks import ActivationSpec, IndexerSpec, QueryScale, RouterSpec
from proa.arch.delta_blocks import DeltaSpec
from proa.kernels.delta import DeltaOps, DeltaRows, DeltaState, DeltaWeights, StateSlots
from proa.kernels.latent_seam import Absorbed, Chosen, IndexNorm, LatentKV, LatentOps, LatentShape
from proa.kernels.native.ops import NativeDense
from proa.kernels.native.sink import Program, Recorder, Sink
from proa.kernels.seam import (
    AttentionOps,
    Blocks,
    Codes,
    DenseOps,
    Draw,
    HeadNorm,
    Heads,
    LayerKV,
    MoEOps,
    Packed,
    PackedExperts,
    PackedRouter,
    RopeRows,
    Routed,
    SampleOps,
    Segment,
)
from proa.units import DType, Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelNames:
    """What a plan says about kernels: the backend of the dense ops, of attention and of linear attention (`delta`) in
    each phase, of experts and of sampling.

    `is_latent`: the model attends over latent rows (MLA), which is an op of its own. `delta` is empty and `moe` None
    where the model has nothing of the kind.
    """

    matmul: str
    attention: Mapping[Phase, str]
    is_latent: bool
    delta: Mapping[Phase, str]
    moe: str | None
    sampling: str


@runtime_checkable
class Recordable(Protocol):
    """A backend whose ops go to a sink: they run at once, or are recorded (kernels/native/sink.py)."""

    name: str
    sink: Sink


class KernelSet:
    """The ops of one runner. Layers call these and nothing else; what each op means is said in kernels/seam.py.

    `calls` counts them by (op, backend), `attention` and `delta` by phase.
    """

    def __init__(
        self,
        *,
        dense: DenseOps,
        attention: Mapping[Phase, AttentionOps],
        latent: Mapping[Phase, LatentOps],
        delta: Mapping[Phase, DeltaOps],
        moe: MoEOps | None,
        sampling: SampleOps,
    ) -> None:
        self._dense = dense
        self._attention = dict(attention)
        self._latent = dict(latent)
        self._delta = dict(delta)
        self._moe_ops = moe
        self._sampling = sampling
        self.calls: Counter[tuple[str, str]] = Counter()

    # Phases share one arrangement of the cache (a plan rule), so any of them can write for all.

    @property
    def _writer(self) -> AttentionOps:
        return next(iter(self._attention.values()))

    @property
    def _latent_writer(self) -> LatentOps:
        return next(iter(self._latent.values()))

    @property
    def _moe(self) -> MoEOps:
        if self._moe_ops is None:
            raise RuntimeError("a model without experts asked for a kernel of theirs")
        return self._moe_ops

    @property
    def names(self) -> KernelNames:
        """The names of the backends that are bound, as they give them themselves."""
        ops = self._latent or self._attention
        return KernelNames(
            matmul=self._dense.name,
            attention={phase: one.name for phase, one in ops.items()},
            is_latent=bool(self._latent),
            delta={phase: one.name for phase, one in self._delta.items()},
            moe=None if self._moe_ops is None else self._moe_ops.name,
            sampling=self._sampling.name,
        )

    def unpacked(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self._dense.unpacked(shape, dtype)

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Packed:
        """The weight's own memory may become that of the packed form."""
        self.calls["pack", self._dense.name] += 1
        return self._dense.pack_in_place(weight, bias)

    def pack_blocks(self, blocks: torch.Tensor, bias: torch.Tensor | None, format: DType, dtype: torch.dtype) -> Packed:
        self.calls["pack", self._dense.name] += 1
        return self._dense.pack_blocks(blocks, bias, format, dtype)

    def pack_codes(self, weight: Codes, bias: torch.Tensor | None, dtype: torch.dtype) -> Packed:
        self.calls["pack", self._dense.name] += 1
        return self._dense.pack_codes(weight, bias, dtype)

    def matmul(self, x: torch.Tensor, packed: Packed) -> torch.Tensor:
        self.calls["matmul", self._dense.name] += 1
        return self._dense.matmul(x, packed)

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype) -> torch.Tensor:
        self.calls["norm", self._dense.name] += 1
        return self._dense.norm(x, weight, eps, dtype)

    def add_norm(
        self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype
    ) -> torch.Tensor:
        self.calls["add_norm", self._dense.name] += 1
        return self._dense.add_norm(x, delta, weight, eps, dtype)

    def attn_in(
        self,
        x: torch.Tensor,
        qkv: Packed,
        heads: Heads,
        norm: HeadNorm | None,
        rope: RopeRows,
        kv: LayerKV,
        write_slots: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Project x [T, D] and hand the rows to the cache's owner; the queries [T, H, d], and what a projected row has
        behind its heads, [T, W], in place."""
        self.calls["attn_in", self._writer.name] += 1
        projected = self._dense.matmul(x, qkv)
        return self._writer.write(projected, heads, norm, rope, kv, write_slots), projected[:, heads.width :]

    def gate(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        self.calls["gate", self._dense.name] += 1
        return self._dense.gate(x, gate)

    def logits(self, x: torch.Tensor, packed: Packed) -> torch.Tensor:
        self.calls["logits", self._dense.name] += 1
        return self._dense.logits(x, packed)

    def select(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return self._dense.select(x, rows)

    def rotation(
        self, positions: torch.Tensor, frequencies: torch.Tensor, signs: torch.Tensor, magnitude: float
    ) -> RopeRows:
        return self._dense.rotation(positions, frequencies, signs, magnitude)

    def lookup(self, packed: Packed, token_ids: torch.Tensor) -> torch.Tensor:
        self.calls["lookup", self._dense.name] += 1
        return self._dense.lookup(packed, token_ids)

    def table(self, weight: torch.Tensor) -> Packed:
        return self._dense.table(weight)

    def has_rows(self, packed: Packed) -> bool:
        """Whether `lookup` can read rows of what `pack` made: not where torch keeps the arrangement to itself."""
        return not packed.weight.is_mkldnn

    def attention(
        self, queries: torch.Tensor, kv: LayerKV, segment: Segment, *, window: int | None, scale: float
    ) -> torch.Tensor:
        ops = self._attention[segment.phase]
        self.calls[f"attention.{segment.phase.value}", ops.name] += 1
        return ops.attention(queries, kv, segment, window=window, scale=scale)

    def scale_queries(self, queries: torch.Tensor, positions: torch.Tensor, spec: QueryScale) -> torch.Tensor:
        self.calls["scale_queries", self._dense.name] += 1
        return self._dense.scale_queries(queries, positions, spec)

    def ffn(self, x: torch.Tensor, gate_up: Packed, down: Packed, activation: ActivationSpec) -> torch.Tensor:
        self.calls["ffn", self._dense.name] += 1
        return self._dense.ffn(x, gate_up, down, activation)

    # Latent attention

    def absorb(self, weight: torch.Tensor, shape: LatentShape) -> Absorbed:
        self.calls["absorb", self._latent_writer.name] += 1
        return self._latent_writer.absorb(weight, shape)

    def query_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        self.calls["query_norm", self._latent_writer.name] += 1
        return self._latent_writer.query_norm(x, weight, eps)

    def latent_write(
        self,
        queries: torch.Tensor,
        latent: torch.Tensor,
        norm: torch.Tensor,
        eps: float,
        shape: LatentShape,
        rope: RopeRows | None,
        kv: LatentKV,
        write_slots: torch.Tensor,
    ) -> torch.Tensor:
        ops = self._latent_writer
        self.calls["latent_write", ops.name] += 1
        return ops.latent_write(queries, latent, norm, eps, shape, rope, kv, write_slots)

    def latent_attention(
        self,
        queries: torch.Tensor,
        absorbed: Absorbed,
        kv: LatentKV,
        segment: Segment,
        *,
        scale: float,
        visible: torch.Tensor | None,
    ) -> torch.Tensor:
        ops = self._latent[segment.phase]
        self.calls[f"attention.{segment.phase.value}", ops.name] += 1
        return ops.latent_attention(queries, absorbed, kv, segment, scale=scale, visible=visible)

    def index(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        weights: torch.Tensor,
        norm: IndexNorm,
        spec: IndexerSpec,
        rope: RopeRows,
        kv: LatentKV,
        segments: Sequence[Segment],
        write_slots: torch.Tensor,
    ) -> Chosen:
        ops = self._latent_writer
        self.calls["index", ops.name] += 1
        return ops.index(queries, keys, weights, norm, spec, rope, kv, segments, write_slots)

    # Linear attention

    def delta(
        self,
        rows: DeltaRows,
        weights: DeltaWeights,
        spec: DeltaSpec,
        state: DeltaState,
        segment: Segment,
        slots: StateSlots,
    ) -> torch.Tensor:
        ops = self._delta[segment.phase]
        self.calls[f"delta.{segment.phase.value}", ops.name] += 1
        return ops.delta(rows, weights, spec, state, segment, slots)

    def replay(
        self, weights: DeltaWeights, spec: DeltaSpec, state: DeltaState, counts: np.ndarray, slots: StateSlots
    ) -> None:
        """By the kernel that decodes, whose states these are to be."""
        ops = self._delta[Phase.DECODE]
        self.calls["delta.replay", ops.name] += 1
        ops.replay(weights, spec, state, counts, slots)

    # Experts

    def pack_router(self, weight: torch.Tensor, bias: torch.Tensor | None, table: torch.Tensor | None) -> PackedRouter:
        return self._moe.pack_router(weight, bias, table)

    def pack_experts(self, gate_up: torch.Tensor, down: torch.Tensor) -> PackedExperts:
        self.calls["pack_experts", self._moe.name] += 1
        return self._moe.pack_experts(gate_up, down)

    def pack_expert_codes(self, gate_up: Codes, down: Codes, dtype: torch.dtype) -> PackedExperts:
        self.calls["pack_experts", self._moe.name] += 1
        return self._moe.pack_expert_codes(gate_up, down, dtype)

    def pack_expert_blocks(self, gate_up: Blocks, down: Blocks, dtype: torch.dtype) -> PackedExperts:
        self.calls["pack_experts", self._moe.name] += 1
        return self._moe.pack_expert_blocks(gate_up, down, dtype)

    def route(
        self,
        x: torch.Tensor,
        router: PackedRouter,
        spec: RouterSpec,
        top_k: int,
        shared: Sequence[int],
        shared_weight: float,
        gate: torch.Tensor | None,
        token_ids: torch.Tensor,
    ) -> Routed:
        self.calls["route", self._moe.name] += 1
        return self._moe.route(x, router, spec, top_k, shared, shared_weight, gate, token_ids)

    def experts(
        self,
        x: torch.Tensor,
        routed: Routed,
        packed: PackedExperts,
        *,
        scale: float,
        shared: torch.Tensor | None,
        gate: torch.Tensor | None,
        activation: ActivationSpec,
    ) -> torch.Tensor:
        self.calls["experts", self._moe.name] += 1
        return self._moe.experts(x, routed, packed, scale=scale, shared=shared, gate=gate, activation=activation)

    # Behind the logits

    def sample(self, logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
        self.calls["sample", self._sampling.name] += 1
        return self._sampling.sample(logits, draws)

    def record(self, capacity: int, forward: Callable[[], object]) -> Program | None:
        """What `forward` asks of these kernels, over `capacity` rows, as one program; None where one op or more cannot
        be part of it, because its backend has no sink."""
        ops = [self._dense, *self._attention.values(), *self._latent.values(), *self._delta.values()]
        ops += [] if self._moe_ops is None else [self._moe_ops]
        sinks = [one for one in ops if isinstance(one, Recordable)]
        if len(sinks) < len(ops) or not isinstance(self._dense, NativeDense):
            return None
        recorder, direct, before = Recorder(capacity), [one.sink for one in sinks], self.calls.copy()
        try:
            for one in sinks:
                one.sink = recorder
            forward()
        finally:
            for one, sink in zip(sinks, direct, strict=True):
                one.sink = sink
        calls, self.calls = self.calls - before, before
        if {backend for _, backend in calls} - {one.name for one in sinks}:
            return None
        return Program(self._dense.library, recorder, calls)

    def count(self, program: Program, phases: Iterable[Phase]) -> None:
        """Add the calls of one run. A program mixes all rows at once; each phase in it counts as if alone."""
        phases = tuple(phases)
        for (op, backend), times in program.calls.items():
            kind, _, phase = op.partition(".")
            if phase:
                for one in phases:
                    self.calls[f"{kind}.{one.value}", backend] += times
            else:
                self.calls[op, backend] += times
