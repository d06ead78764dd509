"""Speculative against plain output of one engine: equal, or the first divergence with its logit gap and margin.

Both runs use the same weights and the same engine; only `SamplingParams.speculative` differs. Owns the comparison, no
sampling and no model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from proa.engine.results import CompletionOutput, RequestOutput
from proa.llm import LLM
from proa.sampling.params import SamplingParams

TOP = 5  # best tokens kept per position, to measure a divergence


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first output position at which two runs of a prompt differ (`index` counts output tokens, from 0).

    `gap`: logit of the plain token minus logit of the speculative one, in the plain run's row (None when the latter is
    not among the best few kept). `margin`: best logit minus second best of that row. Small ones mean rounding, large
    ones a fault.
    """

    prompt: int
    choice: int
    index: int
    plain: int | None
    speculative: int | None
    gap: float | None
    margin: float | None

    def __str__(self) -> str:
        gap = "more than the best five" if self.gap is None else f"{self.gap:.3g}"
        margin = "unknown" if self.margin is None else f"{self.margin:.3g}"
        return (
            f"prompt {self.prompt}, choice {self.choice}, output token {self.index}: plain {self.plain}, "
            f"speculative {self.speculative}; logit gap {gap}, margin {margin}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LosslessReport:
    """`compared` counts output tokens. `largest_logprob_difference` is over the positions before any divergence."""

    prompts: int
    compared: int
    divergences: tuple[Divergence, ...]
    largest_logprob_difference: float
    speculation: Mapping[str, Any] | None

    @property
    def is_lossless(self) -> bool:
        return not self.divergences


def lossless(llm: LLM, prompts: Sequence[str | Sequence[int]], params: SamplingParams) -> LosslessReport:
    """Answer every prompt twice, with and without proposals, and compare.

    The seed must be fixed for sampled comparisons: a fresh one would differ between the two runs. So should the length
    of proposals be: one that is measured may be 0 here.
    """
    params = replace(params, logprobs=max(TOP, params.logprobs or 0), seed=0 if params.seed is None else params.seed)
    plain = llm.generate(list(prompts), replace(params, speculative=False))
    drafted = llm.generate(list(prompts), replace(params, speculative=True))
    return compare(plain, drafted, llm.stats()["speculative_decoding"])


def compare(
    plain: Sequence[RequestOutput], drafted: Sequence[RequestOutput], speculation: Mapping[str, Any] | None
) -> LosslessReport:
    """Compare two runs of the same prompts, choice by choice: tokens, text and finish reason."""
    divergences: list[Divergence] = []
    compared, difference = 0, 0.0
    for number, (left, right) in enumerate(zip(plain, drafted, strict=True)):
        for one, other in zip(left.outputs, right.outputs, strict=True):
            same = common_prefix(one.token_ids, other.token_ids)
            compared += len(one.token_ids)
            difference = max([difference, *_logprob_differences(one, other, same)])
            if same < max(len(one.token_ids), len(other.token_ids)) or _ends(one) != _ends(other):
                divergences.append(_divergence(number, one, other, same))
    return LosslessReport(
        prompts=len(plain),
        compared=compared,
        divergences=tuple(divergences),
        largest_logprob_difference=difference,
        speculation=speculation,
    )


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Number of leading tokens on which both agree."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))


def _ends(output: CompletionOutput) -> tuple[str, str, int | str | None]:
    return output.text, output.finish_reason, output.stop_reason


def _logprob_differences(one: CompletionOutput, other: CompletionOutput, same: int) -> list[float]:
    left, right = one.logprobs or (), other.logprobs or ()
    rows = zip(one.token_ids[:same], left, right, strict=False)
    return [abs(a[token].logprob - b[token].logprob) for token, a, b in rows]


def _divergence(prompt: int, one: CompletionOutput, other: CompletionOutput, index: int) -> Divergence:
    plain = one.token_ids[index] if index < len(one.token_ids) else None
    speculative = other.token_ids[index] if index < len(other.token_ids) else None
    # Log probabilities of one row share their normaliser, so their differences are differences of logits.
    row = one.logprobs[index] if one.logprobs and index < len(one.logprobs) else {}
    best = sorted((entry.logprob for entry in row.values()), reverse=True)
    here, there = (None if token is None else row.get(token) for token in (plain, speculative))
    gap = here.logprob - there.logprob if here and there else None
    return Divergence(
        prompt=prompt,
        choice=one.index,
        index=index,
        plain=plain,
        speculative=speculative,
        gap=gap,
        margin=best[0] - best[1] if len(best) > 1 else None,
    )
