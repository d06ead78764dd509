"""Two prompts in one batch: a text and a list of token ids.

python examples/generate.py [MODEL]
"""

from __future__ import annotations

import sys

from proa import LLM, SamplingParams


def main(model: str) -> None:
    with LLM(model) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=32)
        for output in llm.generate(["The capital of France is", [72, 101, 108]], params):
            choice = output.outputs[0]
            print(f"{len(output.prompt_token_ids)} prompt tokens -> {choice.text!r} ({choice.finish_reason})")


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["smollm2"]))
