"""What a checkpoint says about sampling and about the end of text. Owns the reading of generation_config.json only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SAMPLED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def default_sampling(generation: Mapping[str, Any]) -> dict[str, Any]:
    """SamplingParams fields that generation_config.json sets: its figures, or greedy where `do_sample` is false."""
    given = {name: generation[name] for name in SAMPLED if generation.get(name) is not None}
    if generation.get("do_sample") is not False:
        return given
    return {"temperature": 0.0, **{name: value for name, value in given.items() if name == "repetition_penalty"}}


def ids_of(entry: object) -> frozenset[int]:
    """`eos_token_id` and its like: one id, a list of ids, or nothing."""
    entries = entry if isinstance(entry, list | tuple) else [entry]
    return frozenset(one for one in entries if isinstance(one, int) and not isinstance(one, bool))
