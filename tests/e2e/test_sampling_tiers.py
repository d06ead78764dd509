"""Native and reference sampling give an engine the same tokens, whatever is asked of them and proposed to it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from proa import LLM, SamplingParams
from tests.factories.native import probed, why_not

WHY_NOT = why_not(probed())
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

PROMPTS = [[10, 11, 12, 10, 11], [20, 21], [30, 31, 32, 33, 30, 31], [5]]
PARAMS = [
    SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=1.3, top_k=20, top_p=0.95, min_p=0.02, seed=2, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.8, repetition_penalty=1.2, top_k=7, seed=3, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
]


def answers(model: Path, kernel: str, speculative: str) -> list[tuple[int, ...]]:
    settings = {"dtype": "float32", "threads": 2, "max_model_len": 64, "speculative": speculative}
    with LLM(model, sampling_kernel=kernel, **settings) as llm:
        assert [said["sampling_kernel"] for said in llm.descriptions()["target"]] == [kernel, kernel]
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize("speculative", ["none", "ngram"])
def test_both_tiers_give_the_same_tokens(tiny: Callable[..., Path], speculative: str) -> None:
    native = answers(tiny("llama"), "native", speculative)
    assert native == answers(tiny("llama"), "reference", speculative)
    assert native == answers(tiny("llama"), "native", "none")
