"""A conversation of two turns; the second answer is streamed.

python examples/chat.py [MODEL]
"""

from __future__ import annotations

import sys

from proa import LLM, SamplingParams


def main(model: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=48)
    with LLM(model) as llm:
        messages = [{"role": "user", "content": "Name one planet."}]
        answer = llm.chat(messages, params)[0].outputs[0].text
        print(answer)
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "And another one?"}]
        for piece in llm.stream(messages, params):
            print(piece, end="", flush=True)
        print()


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["smollm2"]))
