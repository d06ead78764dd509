"""The gated delta rule as a block spec (GDN, KDA) and its parameters. Data only; torch-free; no family is named here.

Notation of all delta files: Hk key heads and Hv value heads (each key head serves Hv / Hk neighbours), dk and dv their
sizes, K taps of the convolution, C = 2 Hk dk + Hv dv its channels: queries, keys, values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from proa.arch.blocks import NormSpec, StateShape, StateTensor
from proa.arch.layout import ParameterInfo
from proa.units import DType

BLOCK = 64
"""Rows of a prefill block of the chunkwise form. Blocks lie at absolute multiples of it: a row's result does not depend
on how the prompt was cut, as long as it was cut there."""


class Decay(Enum):
    """What forgets: a whole head at one rate per row (GDN), or each of its key channels (KDA)."""

    HEAD = "head"
    CHANNEL = "channel"


class OutputGate(Enum):
    """What a head's normed result is multiplied with, of the row's gate z."""

    SILU = "silu"
    SIGMOID = "sigmoid"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaSpec:
    """Gated delta rule: a state S [dk, dv] per value head instead of cached rows.

    Per row: q, k, v = silu(causal depthwise convolution over K rows); q and k are divided by their lengths, q by
    sqrt(dk) too. With beta = sigmoid(b) and g = -exp(A) softplus(a + bias):
        S <- diag(e^g) S;   S <- S + k (beta (v - S^T k))^T;   out = norm(S^T q) * gate(z)
    `rank` None: b, a and z are rows of the input projection; else a and z come through low-rank maps of that width.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    decay: Decay
    gate: OutputGate
    norm: NormSpec
    rank: int | None

    @property
    def keys(self) -> int:
        """Channels of the keys, and as many of the queries."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Channels of the values, and elements of z and of the result."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        return 2 * self.keys + self.values

    @property
    def decays(self) -> int:
        """Elements of a row's `a`."""
        return self.value_heads * (self.key_dim if self.decay is Decay.CHANNEL else 1)

    @property
    def input_rows(self) -> int:
        """Of the merged input projection: q, k, v, b, then a and z where they are not low-rank."""
        width = self.channels + self.value_heads
        return width if self.rank is not None else width + self.decays + self.values

    @property
    def kept_width(self) -> int:
        """Elements that a row of inputs takes, kept to be applied again: q, k, v, b, a before the convolution."""
        return self.channels + self.value_heads + self.decays

    @property
    def conv_shape(self) -> tuple[int, int]:
        """Of one request's convolution state: the last K - 1 rows of q, k, v, oldest first."""
        return self.taps - 1, self.channels

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Of one request's delta state, float32."""
        return self.value_heads, self.key_dim, self.value_dim

    @property
    def window(self) -> None:
        return None

    @property
    def state(self) -> StateShape:
        conv = StateTensor(name="conv", shape=self.conv_shape, dtype=None)
        delta = StateTensor(name="delta", shape=self.state_shape, dtype=DType.F32)
        return StateShape(kv_width=0, window=None, recurrent=(conv, delta))


def delta_parameters(spec: DeltaSpec, hidden: int) -> Iterator[tuple[str, ParameterInfo]]:
    """Name -> shape. `proj` rows are q, k, v, b, a, z, each head by head; `conv` rows are the channels of q, k, v."""
    yield "proj.weight", ParameterInfo(shape=(spec.input_rows, hidden))
    if spec.rank is not None:
        for name, out in (("a", spec.decays), ("z", spec.values)):
            yield f"{name}_down.weight", ParameterInfo(shape=(spec.rank, hidden))
            yield f"{name}_up.weight", ParameterInfo(shape=(out, spec.rank))
    yield "conv.weight", ParameterInfo(shape=(spec.channels, 1, spec.taps))
    yield "a_log", ParameterInfo(shape=(spec.value_heads,), dtype=DType.F32)
    yield "dt_bias", ParameterInfo(shape=(spec.decays,), dtype=DType.F32)
    yield "norm.weight", ParameterInfo(shape=(spec.value_dim,))
    yield "o.weight", ParameterInfo(shape=(hidden, spec.values))
