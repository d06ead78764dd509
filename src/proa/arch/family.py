"""The family record, and the registry by architecture name. A family file exports exactly one FAMILY."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from proa.arch.decoder import DecoderSpec
from proa.arch.weights import WeightLayout, WeightRule
from proa.checkpoint.hf_config import HFView


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family of checkpoints.

    `parse` turns a config view into a spec; `weights` gives the rules for a spec and a layout. `implements` names the
    config keys that the family honours beyond those that `parse` reads.
    """

    name: str
    architectures: tuple[str, ...]
    parse: Callable[[HFView], DecoderSpec]
    weights: Callable[[DecoderSpec, WeightLayout], Iterable[WeightRule]]
