"""A model as data: layers, embedding, head. One generic builder reads it (layers/decoder.py)."""

from __future__ import annotations

from dataclasses import dataclass

from proa.arch.blocks import AttentionSpec, FFNSpec, NormSpec, StateShape


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """x += mixer(norm(x)); x += ffn(norm(x))."""

    index: int
    mixer: AttentionSpec
    ffn: FFNSpec
    norm: NormSpec

    @property
    def state(self) -> StateShape:
        return StateShape(kv_width=2 * self.mixer.num_kv_heads * self.mixer.head_dim, window=self.mixer.window)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """`vocab` counts embedding rows (padding included). `max_positions` is the trained context length."""

    family: str
    vocab: int
    hidden: int
    layers: tuple[LayerSpec, ...]
    final_norm: NormSpec
    tied_head: bool
    max_positions: int
