"""Whole layers of linear attention and of gated attention against their formulas in float64, however rows are cut."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from proa.arch.blocks import AttentionSpec, NormSpec, QKNormSpec, RopeKind, RopeSpec
from proa.arch.delta_blocks import Decay, DeltaSpec, OutputGate, delta_parameters
from proa.arch.layout import ParameterInfo
from proa.arch.parameters import attention_parameters
from proa.cache.kv import KVCache, StateMemory
from proa.cache.state_values import NONE, StateSpan
from proa.kernels.bind import bind
from proa.kernels.delta import DeltaState
from proa.kernels.seam import LayerKV
from proa.layers.attention import Attention
from proa.layers.base import BuildContext
from proa.layers.delta import Delta
from proa.layers.norm import RMSNorm
from proa.layers.rope import Ropes
from proa.runner.batch import RowSpan, make_batch
from proa.units import DType, Phase
from tests.factories.layers import finish, layer_context

HIDDEN, ROWS = 24, 9
GDN = DeltaSpec(
    key_heads=2, value_heads=4, key_dim=6, value_dim=5, taps=4, decay=Decay.HEAD, gate=OutputGate.SILU,
    norm=NormSpec(eps=1e-6), rank=None,
)  # fmt: skip
KDA = replace(GDN, key_heads=4, decay=Decay.CHANNEL, gate=OutputGate.SIGMOID, rank=7, norm=NormSpec(eps=1e-5))
OFFSET = replace(GDN, norm=NormSpec(eps=1e-6, offset=1.0))
SPECS = {"gdn": GDN, "kda": KDA, "offset": OFFSET}
Array = np.ndarray


def filled(layer: nn.Module, context: BuildContext) -> dict[str, Array]:
    """Random parameters for a layer, and these in float64."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    values = {name: parameter.double().numpy() for name, parameter in layer.named_parameters()}
    finish(layer, context)
    return values


def delta_layer(spec: DeltaSpec, kernel: str = "reference") -> tuple[Delta, dict[str, Array]]:
    context = layer_context(delta_parameters(spec, HIDDEN), dtype=DType.F32, is_latent=False, delta=kernel)
    layer = Delta(context, spec)
    return layer, filled(layer, context)


def state_of(spec: DeltaSpec) -> DeltaState:
    memory = StateMemory(slots=4, kept_rows=6, dtype=torch.float32, delta_dtype=torch.float32)
    cache = KVCache([spec], num_pages=1, page_size=4, dtype=torch.float32, device="cpu", states=memory)
    (state,) = cache.layers
    assert isinstance(state, DeltaState)
    return state


def forward(layer: Delta, state: DeltaState, spans: list[tuple[torch.Tensor, Phase, StateSpan]]) -> torch.Tensor:
    """Rows of several requests in one batch."""
    made = [
        RowSpan(phase=phase, tokens=[0] * len(x), start=0, pages=[0, 1, 2], logits=(), state=states)
        for x, phase, states in spans
    ]
    batch = make_batch(made, page_size=4, windows=(None,), device="cpu")
    out, chosen = layer(torch.cat([x for x, _, _ in spans]), batch, {}, state, None)
    assert chosen is None
    return out


def span(source: int, target: int, rows: int) -> StateSpan:
    return StateSpan(source=source, targets=(*[NONE] * (rows - 1), target), kept=(NONE,) * rows)


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def heads(x: Array, count: int) -> Array:
    return x.reshape(len(x), count, -1)


def formula(spec: DeltaSpec, values: dict[str, Array], x: Array) -> Array:
    """Gated DeltaNet (Yang et al. 2024) with a convolution in front; KDA (Kimi Linear, 2025) decays by channel."""
    merged = x @ values["proj.weight"].T
    qkv, b, rest = np.split(merged, [spec.channels, spec.channels + spec.value_heads], 1)
    if spec.rank is None:
        a, z = np.split(rest, [spec.decays], 1)
    else:
        a, z = (x @ values[f"{name}_down.weight"].T @ values[f"{name}_up.weight"].T for name in "az")
    padded = np.concatenate((np.zeros((spec.taps - 1, spec.channels)), qkv))
    taps = [padded[tap : tap + len(x)] * values["conv.weight"][:, 0, tap] for tap in range(spec.taps)]
    mixed = np.sum(taps, axis=0)
    mixed = mixed * sigmoid(mixed)
    q, k, v = np.split(mixed, [spec.keys, 2 * spec.keys], 1)
    q, k, v = heads(q, spec.key_heads), heads(k, spec.key_heads), heads(v, spec.value_heads)
    q, k = (part / np.sqrt((part**2).sum(-1, keepdims=True) + 1e-6) for part in (q, k))
    q, k = (part.repeat(spec.value_heads // spec.key_heads, axis=1) for part in (q / np.sqrt(spec.key_dim), k))
    g = -np.exp(values["a_log"])[:, None] * heads(np.log1p(np.exp(a + values["dt_bias"])), spec.value_heads)
    state, out = np.zeros(spec.state_shape), np.zeros_like(v)
    for row in range(len(x)):
        state = state * np.exp(g[row])[:, :, None]
        change = sigmoid(b[row])[:, None] * (v[row] - np.einsum("hkv,hk->hv", state, k[row]))
        state = state + np.einsum("hk,hv->hkv", k[row], change)
        out[row] = np.einsum("hkv,hk->hv", state, q[row])
    out = out / np.sqrt((out**2).mean(-1, keepdims=True) + spec.norm.eps) * (values["norm.weight"] + spec.norm.offset)
    gate = sigmoid(z) * (z if spec.gate is OutputGate.SILU else 1)
    return (out * heads(gate, spec.value_heads)).reshape(len(x), -1) @ values["o.weight"].T


def rows(count: int = ROWS, seed: int = 1) -> torch.Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kernel", ["reference", "torch"])
@pytest.mark.parametrize("kind", SPECS)
def test_the_layer_is_the_formula_however_rows_are_cut(kind: str, kernel: str) -> None:
    spec, x = SPECS[kind], rows()
    layer, values = delta_layer(spec, kernel)
    state = state_of(spec)
    parts = [
        forward(layer, state, [(x[:4], Phase.PREFILL, span(NONE, 2, 4))]),
        forward(layer, state, [(x[4:5], Phase.DECODE, span(2, 0, 1))]),
        forward(layer, state, [(x[5:], Phase.VERIFY, span(0, 3, 4))]),
    ]
    expected = formula(spec, values, x.double().numpy())
    np.testing.assert_allclose(torch.cat(parts).detach().numpy(), expected, atol=2e-5)


@pytest.mark.parametrize("kind", SPECS)
def test_requests_and_phases_of_one_batch_do_not_see_each_other(kind: str) -> None:
    spec = SPECS[kind]
    layer, values = delta_layer(spec)
    state, (x, y) = state_of(spec), (rows(), rows(seed=2))
    forward(layer, state, [(x[:4], Phase.PREFILL, span(NONE, 0, 4))])
    out = forward(layer, state, [(y[:5], Phase.PREFILL, span(NONE, 1, 5)), (x[4:5], Phase.DECODE, span(0, 2, 1))])
    expected = [formula(spec, values, part.double().numpy()) for part in (y[:5], x[:5])]
    np.testing.assert_allclose(out[:5].detach().numpy(), expected[0], atol=2e-5)
    np.testing.assert_allclose(out[5:].detach().numpy(), expected[1][4:], atol=2e-5)


@pytest.mark.parametrize("kind", SPECS)
def test_a_replay_of_kept_rows_leaves_the_state_of_rows_that_were_decoded(kind: str) -> None:
    spec, x = SPECS[kind], rows()
    layer, _ = delta_layer(spec)
    state = state_of(spec)
    forward(layer, state, [(x[:4], Phase.PREFILL, span(NONE, 0, 4))])
    verified = StateSpan(source=0, targets=(NONE, NONE, NONE, 1), kept=(3, 5, 0, 1))
    forward(layer, state, [(x[4:8], Phase.VERIFY, verified)])
    replayed = make_batch(
        [RowSpan(phase=Phase.DECODE, tokens=[0] * 2, start=0, pages=[0], logits=(), state=StateSpan(
            source=0, targets=(NONE, 2), kept=(3, 5)))],
        page_size=4, windows=(), device="cpu",
    ).states[0]  # fmt: skip
    layer.replay(state, np.array([2]), replayed)
    fresh = state_of(spec)
    forward(layer, fresh, [(x[:4], Phase.PREFILL, span(NONE, 0, 4))])
    for at, (source, target) in ((4, (0, 1)), (5, (1, 0))):
        forward(layer, fresh, [(x[at : at + 1], Phase.DECODE, span(source, target, 1))])
    torch.testing.assert_close(state.delta[2], fresh.delta[0])
    torch.testing.assert_close(state.conv[2], fresh.conv[0])
    assert layer._kernels.calls["delta.replay", "reference"] == 1


@pytest.mark.parametrize("kind", SPECS)
def test_the_parameters_of_the_layer_are_those_of_the_table(kind: str) -> None:
    layer, _ = delta_layer(SPECS[kind])
    table = dict(delta_parameters(SPECS[kind], HIDDEN))
    assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == {n: i.shape for n, i in table.items()}


def test_calls_are_counted_by_phase_and_kernel() -> None:
    layer, _ = delta_layer(GDN, "torch")
    state, x = state_of(GDN), rows()
    forward(layer, state, [(x[:4], Phase.PREFILL, span(NONE, 0, 4)), (x[4:], Phase.VERIFY, span(NONE, 1, 5))])
    calls = layer._kernels.calls
    assert (calls["delta.prefill", "torch"], calls["delta.verify", "torch"], calls["delta.decode", "torch"]) == (
        1,
        1,
        0,
    )


def test_f31_a_layer_without_a_plan_for_it_is_a_type_error() -> None:
    """There is nothing that it could fall back to."""
    context = layer_context(delta_parameters(GDN, HIDDEN), dtype=DType.F32, is_latent=False, delta=None)
    with pytest.raises(TypeError, match="its plan has no kernel for prefill, decode, verify"):
        Delta(context.child("layers.3.attn"), GDN)
    names = replace(context.kernels.names, delta={Phase.PREFILL: "torch", Phase.DECODE: "torch"})
    with pytest.raises(TypeError, match=r"layers.3.attn is linear attention, and its plan has no kernel for verify"):
        Delta(replace(context, kernels=bind(names, None), prefix="layers.3.attn"), GDN)


# Gated attention, and norms whose stored weight lacks a constant

ROPE = RopeSpec(kind=RopeKind.DEFAULT, base=100.0, dim=4)
GATED = AttentionSpec(
    num_heads=4, num_kv_heads=2, head_dim=8, rope=ROPE, scale=0.4, qkv_bias=False, output_bias=False,
    qk_norm=QKNormSpec(eps=1e-6, is_whole=False, offset=1.0), window=None, is_gated=True,
)  # fmt: skip


def normed(x: Array, weight: Array) -> Array:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6) * weight


def turned(x: Array) -> Array:
    """The first four elements of each row's heads [T, H, d], halves as pairs, by position / 100^(pair / 2)."""
    angles = np.arange(len(x))[:, None] * 100.0 ** (-np.arange(2) / 2)
    pairs = (x[..., :2] + 1j * x[..., 2:4]) * np.exp(1j * angles)[:, None]
    return np.concatenate((pairs.real, pairs.imag, x[..., 4:]), axis=-1)


def gated_formula(values: dict[str, Array], x: Array) -> Array:
    q, k, v, gate = np.split(x @ values["qkv.weight"].T, [32, 48, 64], 1)
    queries = turned(normed(heads(q, 4), 1 + values["q_norm.weight"]))
    keys = turned(normed(heads(k, 2), 1 + values["k_norm.weight"])).repeat(2, axis=1)
    scores = 0.4 * np.einsum("qhd,khd->hqk", queries, keys)
    scores = np.where(np.tri(len(x), dtype=bool), np.exp(scores), 0)
    out = np.einsum("hqk,khd->qhd", scores / scores.sum(-1, keepdims=True), heads(v, 2).repeat(2, axis=1))
    return (out.reshape(len(x), -1) * sigmoid(gate)) @ values["o.weight"].T


def attention(spec: AttentionSpec) -> tuple[torch.Tensor, dict[str, Array]]:
    """What the layer makes of `rows()`, in two forwards."""
    context = layer_context(attention_parameters(spec, HIDDEN), dtype=DType.F32, is_latent=False)
    layer = Attention(context, spec)
    values = filled(layer, context)
    ropes = Ropes(layer_context((), dtype=DType.F32, is_latent=False), [spec.rope])
    ropes.finish(context.kernels)
    (kv,) = KVCache([spec], num_pages=3, page_size=4, dtype=torch.float32, device="cpu").layers
    assert isinstance(kv, LayerKV)
    parts = []
    for start, stop, phase in ((0, 5, Phase.PREFILL), (5, ROWS, Phase.VERIFY)):
        made = RowSpan(phase=phase, tokens=[0] * (stop - start), start=start, pages=[2, 0, 1], logits=())
        batch = make_batch([made], page_size=4, windows=(None,), device="cpu")
        parts.append(layer(rows()[start:stop], batch, ropes(batch.positions), kv, None)[0])
    return torch.cat(parts).detach(), values


def test_gated_attention_is_the_formula_however_rows_are_cut() -> None:
    out, values = attention(GATED)
    np.testing.assert_allclose(out.numpy(), gated_formula(values, rows().double().numpy()), atol=2e-5)


def test_a_gate_and_an_offset_are_only_where_the_spec_says_so() -> None:
    plain, without_offset = replace(GATED, is_gated=False), replace(GATED, qk_norm=QKNormSpec(eps=1e-6, is_whole=False))
    expected, _ = attention(GATED)
    for other in (plain, without_offset):
        assert (attention(other)[0] - expected).abs().max() > 1e-2


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_norm_multiplies_by_the_stored_weight_plus_its_offset(offset: float) -> None:
    context = layer_context([("weight", ParameterInfo(shape=(HIDDEN,)))], dtype=DType.F32, is_latent=False)
    norm = RMSNorm(context, NormSpec(eps=1e-6, offset=offset))
    values = filled(norm, context)
    expected = normed(rows().double().numpy(), values["weight"] + offset)
    np.testing.assert_allclose(norm(rows(), None).detach().numpy(), expected, atol=1e-6)
