"""Stand-ins for fla-core and flashinfer: the documented functions, strict in what they take, computing the rule in
float64 by a loop over runs, heads and rows; states are float32 between rows. Written from those packages'
documentation, not from our code."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch


def rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor,
    states: torch.Tensor, ends: list[int], scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Rows [T, heads, size], `decay` [T, Hv, dk or 1] a factor, states [N, Hv, dk, dv]: results and states, float64."""
    q, k, v, decay, beta, states = (x.double() for x in (q, k, v, decay, beta, states))
    out, states = torch.zeros_like(v), states.clone()
    shared = v.shape[1] // k.shape[1]
    for run, (first, stop) in enumerate(zip(ends, ends[1:], strict=False)):
        for row in range(first, stop):
            for head in range(v.shape[1]):
                query, key = q[row, head // shared], k[row, head // shared]
                query, key = (x / math.sqrt(float(x @ x) + 1e-6) for x in (query, key))
                state = states[run, head] * decay[row, head][:, None]
                state = state + torch.outer(key, beta[row, head] * (v[row, head] - key @ state))
                states[run, head], out[row, head] = state.float(), scale * (query @ state)
    return out, states


def expect(what: str, x: torch.Tensor, shape: tuple[int, ...], *dtypes: torch.dtype) -> None:
    assert tuple(x.shape) == shape, f"{what} has shape {tuple(x.shape)}, not {shape}"
    assert x.dtype in dtypes, f"{what} is {x.dtype}, not {dtypes}"
    assert x.is_contiguous(), f"{what} is not contiguous"


class Fla:
    """fla.ops.gated_delta_rule and fla.ops.kda. `calls` are (function, rows of each run)."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[int]]] = []
        self.modules = {
            "fla.ops.gated_delta_rule": SimpleNamespace(
                fused_recurrent_gated_delta_rule=self._function("recurrent gdn", per_channel=False),
                chunk_gated_delta_rule=self._function("chunk gdn", per_channel=False),
            ),
            "fla.ops.kda": SimpleNamespace(
                fused_recurrent_kda=self._function("recurrent kda", per_channel=True),
                chunk_kda=self._function("chunk kda", per_channel=True),
            ),
        }

    def _function(self, name: str, *, per_channel: bool) -> Any:
        def function(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
            scale: float | None = None, initial_state: torch.Tensor | None = None, output_final_state: bool = False,
            use_qk_l2norm_in_kernel: bool = False, cu_seqlens: torch.Tensor | None = None,
        ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
            assert scale is not None and initial_state is not None and cu_seqlens is not None
            assert output_final_state and use_qk_l2norm_in_kernel
            ends, (_, rows, heads, dk), dv = cu_seqlens.tolist(), q.shape, v.shape[-1]
            hv, any_float = v.shape[2], (torch.float32, torch.bfloat16)
            expect("q", q, (1, rows, heads, dk), *any_float)
            expect("k", k, (1, rows, heads, dk), q.dtype)
            expect("v", v, (1, rows, hv, dv), q.dtype)
            expect("g", g, (1, rows, hv, dk) if per_channel else (1, rows, hv), torch.float32)
            expect("beta", beta, (1, rows, hv), torch.float32)
            expect("initial_state", initial_state, (len(ends) - 1, hv, dk, dv), torch.float32)
            assert cu_seqlens.dtype == torch.int64 and ends[0] == 0 and ends[-1] == rows and (g <= 0).all()
            decay = g[0].exp() if per_channel else g[0].exp().unsqueeze(-1).expand(rows, hv, dk)
            self.calls.append((name, [stop - first for first, stop in zip(ends, ends[1:], strict=False)]))
            out, states = rule(q[0], k[0], v[0], decay, beta[0], initial_state, ends, scale)
            return out.to(v.dtype).unsqueeze(0), states.float()

        return function


class FlashInfer:
    """flashinfer.gdn_prefill and flashinfer.gdn_decode."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[int]]] = []
        self.modules = {
            "flashinfer.gdn_prefill": SimpleNamespace(chunk_gated_delta_rule=self._prefill),
            "flashinfer.gdn_decode": SimpleNamespace(
                gated_delta_rule_decode=self._decoder(torch.float32, is_transposed=False),
                gated_delta_rule_decode_pretranspose=self._decoder(torch.bfloat16, is_transposed=True),
            ),
        }

    def _prefill(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
        scale: float, initial_state: torch.Tensor, output_final_state: bool, cu_seqlens: torch.Tensor,
        use_qk_l2norm_in_kernel: bool, output_state: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        ends, (rows, heads, dk), hv = cu_seqlens.tolist(), q.shape, v.shape[1]
        assert output_final_state and use_qk_l2norm_in_kernel and dk == v.shape[2] == 128
        expect("q", q, (rows, heads, 128), torch.bfloat16)
        expect("k", k, (rows, heads, 128), torch.bfloat16)
        expect("v", v, (rows, hv, 128), torch.bfloat16)
        expect("g", g, (rows, hv), torch.float32)
        expect("beta", beta, (rows, hv), torch.float32)
        expect("initial_state", initial_state, (len(ends) - 1, hv, 128, 128), torch.float32, torch.bfloat16)
        expect("output_state", output_state, tuple(initial_state.shape), initial_state.dtype)
        assert cu_seqlens.dtype in (torch.int32, torch.int64) and ends[-1] == rows
        assert ((g >= 0) & (g <= 1)).all(), "g is the decay itself"
        self.calls.append(("prefill", [stop - first for first, stop in zip(ends, ends[1:], strict=False)]))
        decay = g.unsqueeze(-1).expand(rows, hv, 128)
        out, states = rule(q, k, v, decay, beta, initial_state.transpose(2, 3), ends, scale)
        output_state.copy_(states.transpose(2, 3))
        return out.to(q.dtype), output_state

    def _decoder(self, state_dtype: torch.dtype, *, is_transposed: bool) -> Any:
        def decode(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, state: torch.Tensor, A_log: torch.Tensor,  # noqa: N803
            a: torch.Tensor, dt_bias: torch.Tensor, b: torch.Tensor, scale: float, use_qk_l2norm: bool = True,
        ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
            (batch, one, heads, dk), hv = q.shape, v.shape[2]
            assert one == 1 and use_qk_l2norm and dk == v.shape[3] == 128
            expect("q", q, (batch, 1, heads, 128), torch.bfloat16)
            expect("k", k, (batch, 1, heads, 128), torch.bfloat16)
            expect("v", v, (batch, 1, hv, 128), torch.bfloat16)
            expect("state", state, (batch, hv, 128, 128), state_dtype)
            expect("a", a, (batch, 1, hv), torch.bfloat16)
            expect("b", b, (batch, 1, hv), torch.bfloat16)
            expect("A_log", A_log, (hv,), torch.float32)
            expect("dt_bias", dt_bias, (hv,), torch.float32, torch.bfloat16)
            self.calls.append(("decode", [1] * batch))
            gate = -A_log.double().exp() * torch.log1p((a[:, 0].double() + dt_bias.double()).exp())
            decay = gate.exp().unsqueeze(-1).expand(batch, hv, 128)
            before = state.transpose(2, 3) if is_transposed else state
            beta = b[:, 0].double().sigmoid()
            out, states = rule(q[:, 0], k[:, 0], v[:, 0], decay, beta, before, list(range(batch + 1)), scale)
            state.copy_(states.transpose(2, 3) if is_transposed else states)
            return out.to(q.dtype).unsqueeze(1), state

        return decode


def install(monkeypatch: pytest.MonkeyPatch, package: Fla | FlashInfer) -> None:
    for name, module in package.modules.items():
        monkeypatch.setitem(sys.modules, name, module)
