"""A model as data: layers, embedding, head. One generic builder reads it (layers/decoder.py)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from proa.arch.blocks import AttentionSpec, FFNSpec, MLASpec, MoESpec, NormSpec, StateShape
from proa.arch.delta_blocks import DeltaSpec
from proa.units import Algorithm

MixerSpec = AttentionSpec | MLASpec | DeltaSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """x += mixer(norm(x)); x += ffn(norm(x)). `index` is the layer's number in the checkpoint's names."""

    index: int
    mixer: MixerSpec
    ffn: FFNSpec | MoESpec
    norm: NormSpec

    @property
    def state(self) -> StateShape:
        return self.mixer.state


@dataclass(frozen=True, slots=True, kw_only=True)
class EntrySpec:
    """How a row of a draft begins: proj([norm(embedding of the token) ; norm(hidden row of the position before)])."""

    norm: NormSpec


class Borrow(Enum):
    """A module that a draft takes whole from its target, weights, format and kernels."""

    EMBED = "embed"
    HEAD = "head"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """`vocab` counts embedding rows (padding included). `max_positions` is the trained context length.

    `entry` None: rows begin as embeddings. What is in `borrows` has no parameters here.
    """

    family: str
    vocab: int
    hidden: int
    layers: tuple[LayerSpec, ...]
    final_norm: NormSpec
    tied_head: bool
    max_positions: int
    entry: EntrySpec | None = None
    borrows: tuple[Borrow, ...] = ()

    @property
    def moe_layers(self) -> tuple[LayerSpec, ...]:
        return tuple(layer for layer in self.layers if isinstance(layer.ffn, MoESpec))

    @property
    def delta_layers(self) -> tuple[LayerSpec, ...]:
        """The layers of linear attention."""
        return tuple(layer for layer in self.layers if isinstance(layer.mixer, DeltaSpec))


class TapPoint(Enum):
    """Where a target's hidden rows are taken."""

    NORMED = "after the final norm"


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenTap:
    """Hidden rows [T, width] that a target gives to its drafter."""

    point: TapPoint
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSpec:
    """A draft model: an algorithm, a decoder, and what both need of the target."""

    algorithm: Algorithm
    decoder: DecoderSpec
    taps: tuple[HiddenTap, ...]
