"""Three sampled answers to one prompt. A seed makes them repeatable, whatever else is in the batch.

python examples/sampling.py [MODEL]
"""

from __future__ import annotations

import sys

from proa import LLM, SamplingParams


def main(model: str) -> None:
    params = SamplingParams(n=3, temperature=0.8, top_p=0.95, seed=7, max_tokens=24, logprobs=2)
    with LLM(model) as llm:
        (output,) = llm.generate("Once upon a time", params)
        for choice in output.outputs:
            print(f"{choice.index}: {choice.text!r}  log probability {choice.cumulative_logprob:.2f}")


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["smollm2"]))
