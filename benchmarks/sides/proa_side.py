"""Proa through its public API: scheduler, paging, sampling and text included."""

from __future__ import annotations

import platform
from collections.abc import Sequence

import torch
from protocol import serve

import proa
from proa import LLM, SamplingParams


class Proa:
    def __init__(self, model: str, threads: int) -> None:
        self._llm = LLM(
            model, speculative="none", threads=threads, max_model_len=1024, max_num_seqs=32, prefix_cache="off"
        )
        digest = self._llm.explain()["digest"]
        self.version = (
            f"{proa.__version__}, plan {digest}, torch {torch.__version__}, Python {platform.python_version()}"
        )

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> int:
        params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
        answers = self._llm.generate([list(prompt) for prompt in prompts], params)
        return sum(len(answer.outputs[0].token_ids) for answer in answers)


if __name__ == "__main__":
    serve(Proa)
