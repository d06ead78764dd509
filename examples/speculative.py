"""The same answer with and without speculation, and what the drafter was worth.

python examples/speculative.py [MODEL [DRAFT]]     without DRAFT the proposals come from the text itself (n-gram)
"""

from __future__ import annotations

import sys

from proa import LLM, SamplingParams

PROMPT = "Repeat after me: one two three four five. One two three four five. One two three"


def main(model: str, draft: str | None = None) -> None:
    with LLM(model, draft=draft, speculative="standalone" if draft else "ngram", num_draft_tokens=4) as llm:
        plain = llm.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=64, speculative=False))[0]
        drafted = llm.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=64))[0]
        print(drafted.outputs[0].text)
        speculation = drafted.metrics.speculative_decoding
        print("same tokens:", plain.outputs[0].token_ids == drafted.outputs[0].token_ids)
        print("accept length:", round(speculation["mean_acceptance_length"], 2))
        print("accepted at each position:", speculation["acceptance_rate_per_position"])


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["smollm2"]))
