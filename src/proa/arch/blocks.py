"""Block specs: what one mixer, MLP, norm or rope of a layer IS. Data only; torch-free; no family is named here."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class RopeKind(Enum):
    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    FACTORS = "factors"  # per-frequency divisors stored in the checkpoint (GGUF rope_freqs)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary embedding in the half-split form: pairs are (i, i + dim/2).

    `base` is theta. `factor` divides positions (linear) or low frequencies (llama3, with the two `*_freq_factor`
    bounds and the original context length; Llama 3.1 release). FACTORS reads `rope.factors` [dim/2] from the file.
    """

    kind: RopeKind
    base: float
    dim: int
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NormSpec:
    """RMSNorm, computed in float32: x / sqrt(mean(x^2) + eps) * weight."""

    eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Grouped-query attention. `window`: a row sees itself and the `window - 1` rows before it; None = all."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec
    scale: float
    qkv_bias: bool
    output_bias: bool
    qk_norm: NormSpec | None
    window: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FFNSpec:
    """Gated MLP: down(silu(gate(x)) * up(x))."""

    width: int
    bias: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StateShape:
    """Memory that one layer keeps per request. `kv_width`: elements per token (keys and values together)."""

    kv_width: int
    window: int | None
