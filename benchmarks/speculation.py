"""N-gram speculation against plain decoding in one engine: `python benchmarks/speculation.py --prompts DIR`.

Five prompts. DIR holds mt-bench.jsonl, humaneval.jsonl and gsm8k.jsonl, lines of {"turns": [text, ...]}. Greedy and
sampled with a seed; alone, for speed and text; eight at once, for text. EOS is ignored.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import harmonic_mean
from typing import Any

from pairing import Pair, as_json, collect, measure_pair
from record import RESULTS, save
from workload import model_path

from proa import LLM, RequestOutput, SamplingParams
from proa.bench.probe import Probe

PROMPTS = (("mt-bench", 0), ("mt-bench", 40), ("humaneval", 0), ("humaneval", 10), ("gsm8k", 0))
AT_ONCE = 8
TEMPERATURES = (0.0, 0.8)
SEED = 1234


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True, help="directory of the prompt files")
    parser.add_argument("--model", default="smollm2-bf16")
    parser.add_argument("--models", type=Path, default=Path("build/benchmarks/models"))
    parser.add_argument("--num-draft-tokens", default="auto")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    path = model_path(args.models, args.model, "proa")
    length = args.num_draft_tokens if args.num_draft_tokens == "auto" else int(args.num_draft_tokens)
    settings = {"threads": args.threads, "max_model_len": 2048, "prefix_cache": "off"}
    with LLM(path, speculative="ngram", num_draft_tokens=length, **settings) as llm:
        texts = [chat_prompt(llm, args.prompts, name, line) for name, line in PROMPTS]
        document = {str(temperature): measure(llm, texts, temperature, args) for temperature in TEMPERATURES}
        facts = {"model": args.model, "threads": args.threads, "draft_length": llm.stats().get("draft_length")}
    print("raw values:", save(f"speculation-{args.model}", {**facts, "by_temperature": document}, args.results))
    return 0


def chat_prompt(llm: LLM, folder: Path, name: str, line: int) -> str:
    lines = (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return llm.render([{"role": "user", "content": json.loads(lines[line])["turns"][0]}])


def measure(llm: LLM, texts: Sequence[str], temperature: float, args: argparse.Namespace) -> dict[str, Any]:
    print(f"temperature {temperature}")
    print(f"{'prompt':>16}{'ngram':>9}{'plain':>9}{'ratio':>7}{'kept':>6}{'accepted':>12}  text")
    rows = {}
    with Probe(args.threads) as probe:
        for (name, line), text in zip(PROMPTS, texts, strict=True):
            rows[f"{name} {line}"] = alone(llm, text, temperature, args, probe)
            print(row_text(f"{name} {line}", rows[f"{name} {line}"]), flush=True)
    done = [row for row in rows.values() if row["ratio"] is not None]
    overall = None
    if done:
        overall = harmonic_mean([row["left"] for row in done]) / harmonic_mean([row["right"] for row in done])
        print(f"harmonic means over {len(done)} prompts: ngram / plain {overall:.2f}")
    together = at_once(llm, texts, temperature, args.new_tokens)
    print(f"{AT_ONCE} at once equal alone: plain {together['plain']}/{AT_ONCE}, ngram {together['ngram']}/{AT_ONCE}")
    return {"alone": rows, "overall": overall, "equal_at_once": together}


def answer(llm: LLM, texts: Sequence[str], temperature: float, new_tokens: int, drafts: bool) -> list[RequestOutput]:
    params = SamplingParams(
        temperature=temperature, seed=SEED, max_tokens=new_tokens, ignore_eos=True, speculative=drafts
    )
    return llm.generate(list(texts), params)


def alone(llm: LLM, text: str, temperature: float, args: argparse.Namespace, probe: Probe) -> dict[str, Any]:
    """Rates of the tokens after the first. One warm-up of each kind, so that lengths have settled on this host."""
    seen: dict[bool, RequestOutput] = {}

    def rate(drafts: bool) -> float:
        (seen[drafts],) = answer(llm, [text], temperature, args.new_tokens, drafts)
        return seen[drafts].metrics.tokens_per_second

    def pair(_: int) -> Pair:
        return measure_pair(lambda: rate(True), lambda: rate(False), probe)

    rate(True), rate(False)
    figures = as_json(collect(pair, args.rounds, 2 * args.rounds))
    speculation = dict(seen[True].metrics.speculative_decoding or {})
    equal = seen[True].outputs[0].token_ids == seen[False].outputs[0].token_ids
    return {**figures, "speculation": speculation, "equal": equal, "text": seen[True].outputs[0].text}


def at_once(llm: LLM, texts: Sequence[str], temperature: float, new_tokens: int) -> dict[str, int]:
    """How many of eight concurrent answers are, token for token, the plain answer of that prompt alone."""
    many = [texts[index % len(texts)] for index in range(AT_ONCE)]
    expected = [answer(llm, [text], temperature, new_tokens, False)[0].outputs[0].token_ids for text in texts]

    def equal(drafts: bool) -> int:
        answers = answer(llm, many, temperature, new_tokens, drafts)
        return sum(one.outputs[0].token_ids == expected[index % len(texts)] for index, one in enumerate(answers))

    return {"plain": equal(False), "ngram": equal(True)}


def row_text(name: str, row: dict[str, Any]) -> str:
    kept = f"{row['kept']}/{row['kept'] + row['dropped']}"
    values = f"{'every pair was dropped':>25}"
    if row["ratio"] is not None:
        values = f"{row['left']:9.1f}{row['right']:9.1f}{row['ratio']:7.2f}"
    counts = row["speculation"]
    accepted = f"{counts.get('num_accepted_tokens', 0)}/{counts.get('num_draft_tokens', 0)}"
    return f"{name:>16}{values}{kept:>6}{accepted:>12}  {'equal' if row['equal'] else 'DIFFERS'}"


if __name__ == "__main__":
    sys.exit(main())
