"""The gated delta rule by FlashInfer's kernels (GDN). Owns the calls: which function, in what arrangement.

Facts, from the sources of flashinfer-python 0.7.4 (gdn_prefill.py, gdn_decode.py). Heads are 128 x 128; value heads are
a multiple of key heads, which serve neighbours; q, k, v are bfloat16 and become of length 1 in the kernel (eps 1e-6).
Prefill takes rows [T, heads, 128] with `cu_seqlens`, `g` as the decay itself (not its logarithm) and beta, float32, and
states [N, Hv, dv, dk]. Decode takes one row per request and the gates as they were projected, `a` and `b` in the
compute type beside float32 `A_log` and `dt_bias`; it changes the states in place: [N, Hv, dk, dv] float32 in
`gated_delta_rule_decode`, [N, Hv, dv, dk] bfloat16 in `gated_delta_rule_decode_pretranspose`.
"""

from __future__ import annotations

from importlib import import_module

import torch

from proa.kernels.delta import DeltaWeights
from proa.kernels.delta_catalog import FLASHINFER
from proa.kernels.device_delta import RuleRows


class FlashInferRule:
    """A Rule (kernels/device_delta.py). FlashInfer compiles kernels when it is first called."""

    name = FLASHINFER
    is_stepwise = True

    def __init__(self) -> None:
        decode = import_module("flashinfer.gdn_decode")
        self._prefill = import_module("flashinfer.gdn_prefill").chunk_gated_delta_rule
        self._decode, self._decode_transposed = (
            decode.gated_delta_rule_decode,
            decode.gated_delta_rule_decode_pretranspose,
        )

    def recur(
        self, states: torch.Tensor, rows: RuleRows, weights: DeltaWeights, ends: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The runs are of one row each, so that a verify makes the calls of a decode."""
        is_plain = states.dtype == torch.float32
        after = states.contiguous() if is_plain else _transposed(states)
        q, k, v, a, b = (part.contiguous().unsqueeze(1) for part in (rows.q, rows.k, rows.v, rows.a, rows.b))
        out, _ = (self._decode if is_plain else self._decode_transposed)(
            q=q,
            k=k,
            v=v,
            state=after,
            A_log=weights.rate.log(),
            a=a,
            dt_bias=weights.bias,
            b=b,
            scale=rows.q.shape[-1] ** -0.5,
            use_qk_l2norm=True,
        )
        return out.squeeze(1), after if is_plain else _transposed(after)

    def blocks(
        self, states: torch.Tensor, rows: RuleRows, weights: DeltaWeights, ends: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        g, beta = rows.gates(weights)
        before = _transposed(states)
        after = torch.empty_like(before)
        out, _ = self._prefill(
            q=rows.q.contiguous(),
            k=rows.k.contiguous(),
            v=rows.v.contiguous(),
            g=g.exp(),
            beta=beta,
            scale=rows.q.shape[-1] ** -0.5,
            initial_state=before,
            output_final_state=True,
            cu_seqlens=ends,
            use_qk_l2norm_in_kernel=True,
            output_state=after,
        )
        return out, _transposed(after)


def _transposed(states: torch.Tensor) -> torch.Tensor:
    return states.transpose(-1, -2).contiguous()
