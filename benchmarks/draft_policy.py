"""What n-gram speculation is worth under a cost table: real drafter, real length policy, recorded plain outputs.

    python benchmarks/draft_policy.py --prompts DIR --outputs outputs.json --model MODEL.gguf
    python benchmarks/draft_policy.py --prompts DIR --outputs outputs.json --costs 1:1,4:1.1,8:1.3,16:1.75,32:2.8

Speculative output equals plain output, so acceptance on a recorded output is exact and only time is modelled: a forward
of n rows costs what the table says, in units of one row. The plain outputs are made once, with `--model`, and kept in
`--outputs`. The five prompts are mt-bench 0 and 40, humaneval 0 and 10, gsm8k 0; `--tuning` takes others, on which the
priors of speculative/registry.py were set.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, harmonic_mean

from proa import LLM, SamplingParams
from proa.kernels.cost import CostTable
from proa.sampling.state import SamplingState
from proa.speculative.draft_length import DraftLengths, FixedLengths, MeasuredLengths, Step, StepCosts
from proa.speculative.drafters.ngram import NgramDrafter
from proa.speculative.protocol import DraftContext, DraftRequest, RequestVerdict, Verdict
from proa.speculative.registry import PRIORS
from proa.units import Algorithm

FIVE = (("mt-bench", 0), ("mt-bench", 40), ("humaneval", 0), ("humaneval", 10), ("gsm8k", 0))
TUNING = (
    *(("mt-bench", index) for index in (5, 12, 23, 33, 47, 55, 62, 71)),
    *(("humaneval", index) for index in (3, 20, 40, 60, 80, 100)),
    *(("gsm8k", index) for index in (3, 11, 25, 50)),
    *(("mbpp", index) for index in (2, 9, 30)),
    *(("math500", index) for index in (1, 7, 30)),
)
TEMPERATURES = (0.0, 0.8)
TOKENS = 128
LONGEST = 15
COSTS = "1:1,2:1.035,4:1.1,8:1.3,16:1.75,32:2.8"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One plain answer."""

    name: str
    temperature: float
    prompt: tuple[int, ...]
    output: tuple[int, ...]


def record(model: str, prompts: Path, names: Sequence[tuple[str, int]]) -> list[Record]:
    """Plain answers: chat template, seed 1234, end of text ignored."""
    records: list[Record] = []
    with LLM(model, speculative="none") as llm:
        for temperature in TEMPERATURES:
            params = SamplingParams(temperature=temperature, seed=1234, max_tokens=TOKENS, ignore_eos=True)
            for file, index in names:
                line = (prompts / f"{file}.jsonl").read_text(encoding="utf-8").splitlines()[index]
                answer = llm.chat([{"role": "user", "content": json.loads(line)["turns"][0]}], params)[0]
                records.append(
                    Record(
                        name=f"{file} {index}",
                        temperature=temperature,
                        prompt=answer.prompt_token_ids,
                        output=answer.outputs[0].token_ids,
                    )
                )
                print(f"recorded {file} {index} at temperature {temperature}", flush=True)
    return records


def load(path: Path) -> list[Record]:
    entries = json.loads(path.read_text(encoding="utf-8"))
    return [Record(**{**e, "prompt": tuple(e["prompt"]), "output": tuple(e["output"])}) for e in entries]


def save(path: Path, records: Sequence[Record]) -> None:
    entries = [
        {"name": one.name, "temperature": one.temperature, "prompt": one.prompt, "output": one.output}
        for one in records
    ]
    path.write_text(json.dumps(entries), encoding="utf-8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Modelled seconds of decoding all records, from each one's second token on."""

    seconds: float
    proposed: int
    accepted: int


def simulate(
    records: Sequence[Record], drafter: NgramDrafter | None, lengths: DraftLengths, table: CostTable, at_once: int = 1
) -> Outcome:
    """`records` in order, `at_once` of them in a batch: the next one starts where one has finished."""
    state = SamplingState(params=SamplingParams(), seed=0, choice=0, prompt=(), stop_ids=frozenset())
    done = dict.fromkeys(range(len(records)), 1)
    seconds, proposed, accepted = 0.0, 0, 0
    while live := [key for key, count in done.items() if count < len(records[key].output)][:at_once]:
        step = Step(decoding=len(live), prefill=0)
        limits = lengths.limits({key: len(records[key].output) - done[key] - 1 for key in live}, step)
        requests = tuple(
            DraftRequest(
                request_id=key,
                tokens=records[key].prompt + records[key].output[: done[key]],
                sampling=state,
                limit=limits[key],
            )
            for key in live
        )
        tokens: Sequence[tuple[int, ...]] = [()] * len(live)
        if drafter is not None:
            context = DraftContext(requests=requests)
            tokens = lengths.cut(context, drafter.propose(context), step).tokens
        verdicts = tuple(judge(records[key], key, done[key], guess) for key, guess in zip(live, tokens, strict=True))
        lengths.record(Verdict(requests=verdicts))
        seconds += table.of(len(live) + sum(map(len, tokens)))
        for entry in verdicts:
            done[entry.request_id] += len(entry.emitted)
            proposed, accepted = proposed + entry.proposed, accepted + entry.accepted
    return Outcome(seconds=seconds, proposed=proposed, accepted=accepted)


def judge(one: Record, key: int, start: int, guess: Sequence[int]) -> RequestVerdict:
    """The verdict over a guess at output position `start`."""
    right = next((i for i, token in enumerate(guess) if token != one.output[start + i]), len(guess))
    emitted = one.output[start : start + right + 1]
    return RequestVerdict(
        request_id=key,
        proposed=len(guess),
        accepted=right,
        emitted=emitted,
        keep=len(emitted),
        finished=start + len(emitted) >= len(one.output),
        logprobs=(),
    )


def measured(table: CostTable) -> MeasuredLengths:
    costs = StepCosts(target=table, draft=None)
    return MeasuredLengths(longest=LONGEST, costs=costs, prior=PRIORS[Algorithm.NGRAM], note=print)


def ngram(longest: int, min_match: int) -> NgramDrafter:
    return NgramDrafter(max_tokens=longest, min_match=min_match, max_match=16)


def compare(records: Sequence[Record], table: CostTable) -> None:
    """Each record alone under each policy, then a queue of all of them, several at once."""
    names = [f"{one.name} T{one.temperature:g}" for one in records]
    plain = [simulate([one], None, FixedLengths(0), table).seconds for one in records]
    for label, make in (
        *((f"fixed {k}", lambda k=k: (ngram(k, 2), FixedLengths(k))) for k in (2, 3, 4, 6, 8)),
        ("auto", lambda: (ngram(LONGEST, 1), measured(table))),
    ):
        outcomes = [simulate([one], *make(), table) for one in records]
        gains = [base / outcome.seconds for base, outcome in zip(plain, outcomes, strict=True)]
        print(
            f"{label:8} mean {fmean(gains):.3f}  harmonic {harmonic_mean(gains):.3f}  worst {min(gains):.3f} "
            f"({names[gains.index(min(gains))]})  accepted {sum(one.accepted for one in outcomes)}"
            f"/{sum(one.proposed for one in outcomes)}"
        )
    print("auto: " + ", ".join(f"{name} {gain:.2f}" for name, gain in zip(names, gains, strict=True)))
    queue = list(records) * 4
    for at_once in (2, 4, 8, 16):
        base = simulate(queue, None, FixedLengths(0), table, at_once).seconds
        fixed = simulate(queue, ngram(4, 2), FixedLengths(4), table, at_once).seconds
        auto = simulate(queue, ngram(LONGEST, 1), measured(table), table, at_once).seconds
        print(f"{at_once} at once: fixed 4 {base / fixed:.3f}, auto {base / auto:.3f}")


def costs_of(text: str) -> CostTable:
    """`1:1,4:1.1,8:1.3`: rows and their cost."""
    pairs = sorted((int(rows), float(cost)) for rows, _, cost in (entry.partition(":") for entry in text.split(",")))
    return CostTable.measured(pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True, help="folder of mt-bench.jsonl, humaneval.jsonl, ...")
    parser.add_argument("--outputs", type=Path, required=True, help="file of recorded outputs; made with --model")
    parser.add_argument("--model", help="record the plain outputs of this model")
    parser.add_argument("--tuning", action="store_true", help="other prompts than the five")
    parser.add_argument("--costs", type=costs_of, default=costs_of(COSTS), help=f"rows:cost,... (default {COSTS})")
    args = parser.parse_args()
    if args.model:
        save(args.outputs, record(args.model, args.prompts, TUNING if args.tuning else FIVE))
    compare(load(args.outputs), args.costs)


if __name__ == "__main__":
    main()
