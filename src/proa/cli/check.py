"""`proa check`: load both runners, close the ledgers, compare speculative with plain output, say healthy or not.

Owns the wording. The rules are evals/health.py's; an open ledger is an error of loading.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from proa.choice import Choice, Origin, OriginSource
from proa.cli.output import Output
from proa.config.intent import EngineConfig
from proa.errors import CheckFailed
from proa.units import Algorithm

if TYPE_CHECKING:
    from proa.evals.health import Health
    from proa.llm import LLM


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`check` has the settings of the model and no options of its own."""


def run(args: argparse.Namespace, config: EngineConfig | None, out: Output) -> int:
    from proa.cli.loading import open_llm
    from proa.evals.health import health

    with open_llm(with_proposals(config), out) as llm:
        found = health(llm)
        if args.json:
            out.json(as_json(llm, found))
        else:
            for line in lines(llm, found):
                out.line(line)
    if found.is_healthy:
        return 0
    raise CheckFailed("check/unhealthy", "this pair is not fit to serve.", facts=found.problems)


def with_proposals(config: EngineConfig | None) -> EngineConfig | None:
    """Without a draft and without an ask, n-grams propose: there has to be something to verify."""
    if config is None or not config.speculative.algorithm.is_auto or not config.draft.path.is_auto:
        return config
    ngram = Choice(value=Algorithm.NGRAM, origin=Origin(source=OriginSource.DEFAULT, where="proa check"))
    return replace(config, speculative=replace(config.speculative, algorithm=ngram))


def lines(llm: LLM, found: Health) -> Iterator[str]:
    for role, one in llm.ledger()["runners"].items():
        tensors, parameters = one["tensors"], one["parameters"]
        yield (
            f"{role}: ledger closed: {tensors['total']} tensors ({tensors['left_out']} left out), "
            f"{parameters['total']} parameters"
        )
    for name, report in found.reports.items():
        accept = (report.speculation or {}).get("mean_acceptance_length", 1.0)
        outcome = "identical" if report.is_lossless else f"{len(report.divergences)} diverge"
        yield (
            f"{name}: {report.prompts} prompts, {report.compared} tokens, {llm.algorithm} against plain: {outcome}, "
            f"accept length {accept:.2f}"
        )
    yield from (f"note: {note}" for note in found.notes)
    yield from (f"problem: {problem}" for problem in found.problems)
    yield "healthy" if found.is_healthy else "unhealthy"


def as_json(llm: LLM, found: Health) -> dict[str, Any]:
    return {
        "healthy": found.is_healthy,
        "problems": list(found.problems),
        "notes": list(found.notes),
        "lossless": {
            name: {**asdict(report), "lossless": report.is_lossless} for name, report in found.reports.items()
        },
        "ledger": llm.ledger(),
        "digest": llm.explain()["digest"],
    }
