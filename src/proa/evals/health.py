"""Is this pair fit to serve? Built as planned, lossless, and a draft that is of use. Owns the verdict's rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from proa.evals.lossless import Divergence, LosslessReport, lossless
from proa.llm import LLM
from proa.sampling.params import SamplingParams

PROMPTS = (
    "The capital of France is",
    "one two three four, one two three four, one two three",
    "def add(a, b):\n    return a + b\n\ndef subtract(a, b):\n",
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
)
TOKENS = 32
ENOUGH_PROPOSED = 32  # below it, "nothing was accepted" says little
# Largest logit gap that rounding explains, by compute type: verified rows share a batch, plain rows have their own.
ROUNDING: Mapping[str, float] = MappingProxyType({"float32": 1e-3, "bfloat16": 0.5})


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """`problems` make it unhealthy; `notes` do not. `reports` by name of the comparison."""

    problems: tuple[str, ...]
    notes: tuple[str, ...]
    reports: Mapping[str, LosslessReport]

    @property
    def is_healthy(self) -> bool:
        return not self.problems


def health(llm: LLM) -> Health:
    """Compare a few short answers with and without proposals, greedy and (in float32) sampled."""
    dtype = llm.explain()["runners"]["target"]["dtype"]
    compared = {"greedy": SamplingParams(temperature=0.0, max_tokens=TOKENS)}
    coupled = llm.verification == "coupled"
    if dtype == "float32" and coupled:
        compared["sampled"] = SamplingParams(temperature=0.8, seed=1, max_tokens=TOKENS)
    proposes = llm.algorithm != "none"
    reports = {name: lossless(llm, PROMPTS, params) for name, params in compared.items()} if proposes else {}
    problems, notes = [*broken_promises(llm)], [] if proposes else ["nothing proposes, so nothing was compared"]
    for name, report in reports.items():
        for divergence in report.divergences:
            rounding = is_rounding(divergence, dtype)
            (notes if rounding else problems).append(f"{name}: {divergence}{' (rounding)' if rounding else ''}")
    for name, report in reports.items():
        problems += useless(name, report, llm.algorithm)
    return Health(problems=tuple(problems), notes=tuple(notes), reports=reports)


def is_rounding(divergence: Divergence, dtype: str) -> bool:
    """The two tokens were as good as equal in the plain run's row."""
    return divergence.gap is not None and divergence.gap <= ROUNDING.get(dtype, 0.0)


def broken_promises(llm: LLM) -> Iterator[str]:
    """Where a built runner differs from what its plan says of it."""
    for role, (built, promised) in llm.descriptions().items():
        for key in promised:
            if built.get(key) != promised[key]:
                yield f"{role}: the plan says {key} = {promised[key]}, built is {built.get(key)}"


def useless(name: str, report: LosslessReport, algorithm: str) -> list[str]:
    """A draft model of which nothing is ever accepted is wrong or wrongly loaded. N-grams may just not recur."""
    speculation: Mapping[str, Any] = report.speculation or {}
    proposed, accepted = speculation.get("num_draft_tokens", 0), speculation.get("num_accepted_tokens", 0)
    if algorithm == "ngram" or accepted or proposed < ENOUGH_PROPOSED:
        return []
    return [f"{name}: the draft is of no use: none of {proposed} proposed tokens was accepted"]
