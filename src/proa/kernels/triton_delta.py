"""The delta rule by fla-core's Triton kernels (GDN and KDA). Owns the calls: which function, in what arrangement.

Facts, from the sources of fla-core 0.6.0 (fla/ops/gated_delta_rule, fla/ops/kda): rows are [1, T, heads, size] with
`cu_seqlens` for runs; value heads are a multiple of key heads, which serve neighbours; states are [N, Hv, dk, dv]
float32, and returned in new memory; `g` is a natural logarithm; with `use_qk_l2norm_in_kernel` q and k are divided by
sqrt(sum of squares + 1e-6). The recurrent kernels compute in float32. The chunkwise ones work by 64 rows from a run's
first one on, and multiply in q's type: float32 would be TF32.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from proa.kernels.delta import DeltaWeights
from proa.kernels.delta_catalog import TRITON
from proa.kernels.device_delta import RuleRows


class TritonRule:
    """A Rule (kernels/device_delta.py). Importing fla-core costs seconds, so only a plan that names it does."""

    name = TRITON
    is_stepwise = False

    def __init__(self) -> None:
        gdn, kda = import_module("fla.ops.gated_delta_rule"), import_module("fla.ops.kda")
        self._gdn = gdn.fused_recurrent_gated_delta_rule, gdn.chunk_gated_delta_rule
        self._kda = kda.fused_recurrent_kda, kda.chunk_kda

    def recur(
        self, states: torch.Tensor, rows: RuleRows, weights: DeltaWeights, ends: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return _call((self._gdn if rows.a.dim() == 2 else self._kda)[0], states, rows, weights, ends)

    def blocks(
        self, states: torch.Tensor, rows: RuleRows, weights: DeltaWeights, ends: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return _call((self._gdn if rows.a.dim() == 2 else self._kda)[1], states, rows, weights, ends)


def _call(
    function: Callable[..., Any], states: torch.Tensor, rows: RuleRows, weights: DeltaWeights, ends: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    g, beta = rows.gates(weights)
    q, k, v, g, beta = (part.contiguous().unsqueeze(0) for part in (rows.q, rows.k, rows.v, g, beta))
    out, after = function(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        scale=rows.q.shape[-1] ** -0.5,
        initial_state=states,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=ends.long(),
    )
    return out.squeeze(0), after
