"""The family record. A family file exports exactly one FAMILY; arch/registry.py lists them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from proa.arch.decoder import DecoderSpec, DraftSpec
from proa.arch.delta_blocks import Decay
from proa.arch.layout import WeightLayout
from proa.arch.weights import WeightRule
from proa.checkpoint.hf_config import HFView
from proa.conditions import Condition
from proa.units import Algorithm

Weights = Callable[[DecoderSpec, WeightLayout], Iterable[WeightRule]]
"""The weight rules of a decoder in a layout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BundledDraft:
    """A draft whose tensors lie in its target's checkpoint.

    `derive` makes it from the target's spec (and config): its layers are the target's own, so whatever is decided for
    those is asked for it as well. None: the config announces no such draft.
    """

    derive: Callable[[HFView, DecoderSpec], DraftSpec | None]
    weights: Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family of checkpoints.

    `parse` turns a config view into a spec; `weights` gives the rules for a spec and a layout. `drafts` are those that
    its checkpoints may bundle. `fusion` are conditions on fusing its shared experts beside the general ones
    (plan/rules/moe.py); a bundled draft is judged by the same. `linear` is the linear attention that its models may
    have.
    """

    name: str
    architectures: tuple[str, ...]
    parse: Callable[[HFView], DecoderSpec]
    weights: Weights
    drafts: Mapping[Algorithm, BundledDraft] = field(default_factory=lambda: MappingProxyType({}))
    fusion: tuple[Condition, ...] = ()
    linear: Decay | None = None
