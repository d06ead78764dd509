"""What will run and why, and what became of every tensor.

python examples/explain.py [MODEL]
"""

from __future__ import annotations

import sys

from proa import LLM


def main(model: str) -> None:
    with LLM(model, speculative="ngram") as llm:
        for knob, decision in llm.explain()["runners"]["target"]["decisions"].items():
            print(f"{knob:28} {decision['value']!s:12} {decision['source']:10} {decision['reason']}")
        print(llm.ledger()["runners"]["target"]["tensors"])


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["smollm2"]))
