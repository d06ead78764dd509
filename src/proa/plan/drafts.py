"""Drafts that a checkpoint bundles beside its model: whether one is there, and what becomes of it when nobody asks.

Owns no rule of a decision: rules/speculative.py judges the facts that are made here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from proa.arch.decoder import DecoderSpec, DraftSpec
from proa.arch.family import Weights
from proa.arch.registry import Reading
from proa.arch.weights import Action, WeightRule
from proa.plan.stored import Found, StoredNames, find, plain_layout
from proa.units import Algorithm

DSPARK = "dspark_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """A draft that the config announces. `found` are its stored tensors, none where they were stripped."""

    spec: DraftSpec
    weights: Weights
    found: Found

    @property
    def is_stored(self) -> bool:
        return bool(self.found.groups)

    def left_out(self, why: str) -> Iterator[WeightRule]:
        count = len(self.spec.decoder.layers)
        reason = f"{self.spec.algorithm.value} draft, {count} layer{'s' * (count > 1)}, {why}"
        return left_out(self.spec.decoder, self.weights, self.found, reason)


def left_out(spec: DecoderSpec, weights: Weights, found: Found, reason: str) -> Iterator[WeightRule]:
    """A model's rules again, as those of tensors that are known and not loaded. A name that they do not know stays
    unknown."""
    for rule in weights(spec, plain_layout(spec, found.files)):
        known = rule.action is Action.LEFT_OUT
        yield rule if known else replace(rule, action=Action.LEFT_OUT, fills=(), shape=None, reason=reason)


def bundles(reading: Reading, stored: StoredNames) -> dict[Algorithm, Bundle]:
    """The drafts that this checkpoint announces, by algorithm."""
    found: dict[Algorithm, Bundle] = {}
    for algorithm, spec in reading.drafts.items():
        weights = reading.family.drafts[algorithm].weights
        found[algorithm] = Bundle(spec=spec, weights=weights, found=find(spec.decoder, weights, stored))
    return found


def dspark_keys(reading: Reading) -> list[str]:
    """Keys that announce DSpark stages where other checkpoints of the family have a NextN layer."""
    return sorted(key for key in reading.body.keys() if key.startswith(DSPARK))  # noqa: SIM118  (HFView is no mapping)


def bundle_facts(reading: Reading, found: dict[Algorithm, Bundle]) -> dict[str, Any]:
    """What the choice of an algorithm may know of the checkpoint that would give the draft."""
    return {
        "bundle.family": reading.family.name,
        "bundle.known": [algorithm.value for algorithm in reading.family.drafts],
        "bundle.announced": [algorithm.value for algorithm in found],
        "bundle.stored": [algorithm.value for algorithm, bundle in found.items() if bundle.is_stored],
        "bundle.dspark_keys": dspark_keys(reading),
    }
