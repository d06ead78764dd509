"""Block specs: what one mixer, MLP, norm or rope of a layer IS. Data only; torch-free; no family is named here."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import prod

from proa.units import DType


class RopeKind(Enum):
    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"
    FACTORS = "factors"  # per-frequency divisors stored in the checkpoint (GGUF rope_freqs)


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnSpec:
    """YaRN (Peng et al. 2023): pairs that turn more than `beta_fast` times over the original context keep their
    frequency, those that turn less than `beta_slow` times are slowed by the rope's factor, the rest is mixed.

    `magnitude` multiplies cos and sin. `truncate`: the bounds of the mixed range are whole pairs.
    """

    beta_fast: float
    beta_slow: float
    magnitude: float
    truncate: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary embedding of the first `dim` elements of a head.

    Pairs are (i, i + dim/2), or neighbours (2i, 2i + 1) where `is_interleaved`. `base` is theta. `factor` divides
    positions (linear) or low frequencies (llama3, with the two `*_freq_factor` bounds and the original context length;
    Llama 3.1 release; and yarn). FACTORS reads `rope.factors` [dim/2] from the file.
    """

    kind: RopeKind
    base: float
    dim: int
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position: int = 0
    yarn: YarnSpec | None = None
    is_interleaved: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NormSpec:
    """RMSNorm, computed in float32: x / sqrt(mean(x^2) + eps) * (offset + the stored weight)."""

    eps: float
    offset: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class QKNormSpec:
    """RMSNorm of queries and keys before rotation: each head by a weight [head_dim], or, if `is_whole`, all heads of a
    row as one vector by a weight of that width. `offset` is added to the stored weight, as in NormSpec."""

    eps: float
    is_whole: bool
    offset: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryScale:
    """Queries grow with their position p: x (1 + beta ln(1 + floor(p / original))) (Llama 4, Ministral 3)."""

    beta: float
    original: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Grouped-query attention. `window`: a row sees itself and the `window - 1` rows before it; None = all.

    `is_gated`: a head's result is multiplied, element by element, by the sigmoid of a gate of its own width, which is
    projected from the row beside queries, keys and values.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec
    scale: float
    qkv_bias: bool
    output_bias: bool
    qk_norm: QKNormSpec | None
    window: int | None
    query_scale: QueryScale | None = None
    is_gated: bool = False

    @property
    def state(self) -> StateShape:
        return StateShape(kv_width=2 * self.num_kv_heads * self.head_dim, window=self.window)


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerSpec:
    """Selects the `top_k` earlier rows that a query attends to (DeepSeek V3.2 sparse attention).

    Row s scores sum_h w_h relu(q_h . k_s) for a query with `num_heads` index queries q_h and weights w_h (the projected
    ones times (num_heads * head_dim)^-1/2); one index key k_s per row, layer-normed with `norm_eps`. The first
    `rope.dim` elements of queries and key are rotated. A layer that is not `is_full` has no tensors and takes the
    selection of the last full one before it.
    """

    num_heads: int
    head_dim: int
    top_k: int
    rope: RopeSpec
    norm_eps: float
    is_full: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MLASpec:
    """Multi-head latent attention (DeepSeek V2): keys and values are linear maps of one latent row per token.

    Queries have `nope_dim` plain and `rope_dim` rotated elements per head; `q_rank` None: projected directly, else
    through a normed row of that width. The cache holds `kv_rank` normed latent elements and one rotated key of
    `rope_dim` that all heads share. `rope` None: nothing is rotated (the `rope_dim` elements are plain too).
    `has_split_kv`: the up-projections of keys and values are stored as two tensors (GGUF).
    """

    num_heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    rope: RopeSpec | None
    scale: float
    norm: NormSpec
    query_scale: QueryScale | None = None
    indexer: IndexerSpec | None = None
    has_split_kv: bool = False

    @property
    def query_dim(self) -> int:
        return self.nope_dim + self.rope_dim

    @property
    def window(self) -> None:
        return None

    @property
    def state(self) -> StateShape:
        index = self.indexer.head_dim if self.indexer is not None and self.indexer.is_full else 0
        return StateShape(kv_width=self.kv_rank + self.rope_dim + index, window=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationSpec:
    """What a gated MLP makes of its two projections: silu(gate) * up.

    `limit`: before that, gate is cut to at most `limit` and up to -limit..limit (`swiglu_limit`, DeepSeek V4). None:
    neither is.
    """

    limit: float | None = None

    @property
    def words(self) -> str:
        return "silu" if self.limit is None else f"silu with a limit of {self.limit:g}"

    @property
    def note(self) -> str:
        """To be put behind a description; nothing where there is no limit."""
        return "" if self.limit is None else f", limited to {self.limit:g}"


SILU = ActivationSpec()


@dataclass(frozen=True, slots=True, kw_only=True)
class FFNSpec:
    """Gated MLP: down(activation(gate(x), up(x)))."""

    width: int
    bias: bool
    activation: ActivationSpec = SILU


class Score(Enum):
    """How router logits become scores."""

    SOFTMAX = "softmax"  # over all experts
    SIGMOID = "sigmoid"
    SQRT_SOFTPLUS = "sqrt_softplus"


class GroupScore(Enum):
    """What a group of experts is worth: nothing (there are no groups), its best score, or the sum of its two best."""

    NONE = "none"
    MAX = "max"
    TOP2_SUM = "top2_sum"


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSpec:
    """Which experts a token takes, and with what weights.

    Choice: scores, plus the correction bias if `has_bias`; only the `top_groups` best of `num_groups` groups stay;
    then the best experts, equal ones by index. Weights: the chosen experts' scores without bias, divided by their sum
    if `renormalise`, times `scale`.

    `table`: there is no choice. For each of that many token ids the checkpoint lists the experts (hash routing, the
    first layers of DeepSeek V4), and scores only give their weights. None: by choice.
    """

    score: Score
    has_bias: bool
    num_groups: int
    top_groups: int
    group_score: GroupScore
    renormalise: bool
    scale: float
    table: int | None = None

    def __post_init__(self) -> None:
        if self.table is not None and (self.has_bias or self.group_score is not GroupScore.NONE):
            raise ValueError("a router that reads its experts from a table has no choice to correct or to group")


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedSpec:
    """Experts that every token takes: `count` of `width` each, stored as one MLP of count * width.

    `is_gated`: times sigmoid of a learned row product per token; else with weight 1, never with the router's scale.
    """

    count: int
    width: int
    is_gated: bool
    activation: ActivationSpec = SILU


@dataclass(frozen=True, slots=True, kw_only=True)
class MoESpec:
    """Each token's `top_k` of `num_experts` gated MLPs of `width`, weighted and summed, plus the shared experts.
    `activation` is that of the routed ones."""

    num_experts: int
    top_k: int
    width: int
    router: RouterSpec
    shared: SharedSpec | None
    activation: ActivationSpec = SILU


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTensor:
    """A tensor that a layer rewrites with every token, one per request. `dtype` None is the runner's compute dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: DType | None

    def nbytes(self, compute: DType) -> int:
        return (self.dtype or compute).nbytes(prod(self.shape))


@dataclass(frozen=True, slots=True, kw_only=True)
class StateShape:
    """Memory that one layer keeps per request. `kv_width`: elements per token (keys and values together).
    `recurrent`: what does not grow with tokens, and has no positions to cut."""

    kv_width: int
    window: int | None
    recurrent: tuple[StateTensor, ...] = ()
