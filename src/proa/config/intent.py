"""What was asked: the frozen intent. Owns the shape only; fields.py names the leaves and load.py fills them.

Every leaf is a Choice: a value with its origin, or AUTO. The plan is the only reader.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from proa.choice import AUTO, Choice
from proa.units import Algorithm, DType, Numerics, Rollback, SharedExperts, Switch, Verification


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerIntent:
    """What one runner was asked to be. `path` is MODEL for the target and `--draft` for the draft.

    Kernel names and the quantisation are plain words here: the plan knows which exist.
    `page_size` counts rows per cache page.
    """

    path: Choice[str] = AUTO
    device: Choice[str] = AUTO
    dtype: Choice[DType] = AUTO
    quantization: Choice[str] = AUTO
    kv_dtype: Choice[DType] = AUTO
    numerics: Choice[Numerics] = AUTO
    attention_prefill: Choice[str] = AUTO
    attention_decode: Choice[str] = AUTO
    attention_verify: Choice[str] = AUTO
    linear_attention_prefill: Choice[str] = AUTO
    linear_attention_decode: Choice[str] = AUTO
    linear_attention_verify: Choice[str] = AUTO
    state_dtype: Choice[DType] = AUTO
    rollback: Choice[Rollback] = AUTO
    matmul_kernel: Choice[str] = AUTO
    moe_kernel: Choice[str] = AUTO
    sampling_kernel: Choice[str] = AUTO
    shared_experts: Choice[SharedExperts] = AUTO
    page_size: Choice[int] = AUTO


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeIntent:
    """`num_draft_tokens` is the longest proposal per step; 0 is plain decoding."""

    algorithm: Choice[Algorithm] = AUTO
    num_draft_tokens: Choice[int] = AUTO
    verification: Choice[Verification] = AUTO


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheIntent:
    """`memory_bytes` is for the KV pages of both runners together; `snapshots` are states of each for prefix reuse."""

    prefix_cache: Choice[Switch] = AUTO
    memory_bytes: Choice[int] = AUTO
    snapshots: Choice[int] = AUTO


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleIntent:
    """`prefill_chunk` counts prompt tokens per step, over all requests."""

    max_model_len: Choice[int] = AUTO
    max_num_seqs: Choice[int] = AUTO
    prefill_chunk: Choice[int] = AUTO


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelIntent:
    """Numbers of ranks."""

    tensor_parallel: Choice[int] = AUTO
    expert_parallel: Choice[int] = AUTO


@dataclass(frozen=True, slots=True, kw_only=True)
class HostIntent:
    threads: Choice[int] = AUTO


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadIntent:
    """`allow_unexpected` holds globs of tensor names that are left out on purpose."""

    allow_unexpected: Choice[tuple[str, ...]] = AUTO


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything that was asked, for both runners. A leaf that nobody asked for is AUTO, never absent."""

    model: str
    target: RunnerIntent = RunnerIntent()
    draft: RunnerIntent = RunnerIntent()
    speculative: SpeculativeIntent = SpeculativeIntent()
    cache: CacheIntent = CacheIntent()
    schedule: ScheduleIntent = ScheduleIntent()
    parallel: ParallelIntent = ParallelIntent()
    host: HostIntent = HostIntent()
    load: LoadIntent = LoadIntent()

    def leaves(self) -> Iterator[tuple[str, Choice[Any]]]:
        """Every leaf by its attribute path (`draft.kv_dtype`, `cache.memory_bytes`), in order."""
        for section in fields(self):
            if section.name != "model":
                part = getattr(self, section.name)
                yield from ((f"{section.name}.{leaf.name}", getattr(part, leaf.name)) for leaf in fields(part))
