"""`proa check`: load both runners, close the ledgers, compare speculative with plain output, say healthy or not.

Owns the wording. The rules are evals/health.py's; an open ledger is an error of loading.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from proa.choice import Choice, Origin, OriginSource
from proa.cli.output import Output
from proa.config.intent import EngineConfig
from proa.env import read_environment
from proa.errors import CheckFailed
from proa.kernels.caps import read_caps
from proa.kernels.verdicts import PASSED
from proa.plan.explain import cost_lines
from proa.units import Algorithm

if TYPE_CHECKING:
    from proa.evals.health import Health
    from proa.llm import LLM


LENGTH = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`check` has the settings of the model and no options of its own."""


def run(args: argparse.Namespace, config: EngineConfig | None, out: Output) -> int:
    from proa.cli.loading import open_llm
    from proa.evals.health import health
    from proa.kernels.probing.probe import retest

    with open_llm(with_proposals(config), out, is_cold=True) as llm:
        verdicts = retest(read_caps("cpu"), read_environment().cache_dir)
        found = with_self_tests(health(llm), llm, verdicts)
        if args.json:
            out.json({**as_json(llm, found), "self_tests": verdicts})
        else:
            for line in lines(llm, found, verdicts):
                out.line(line)
    if found.is_healthy:
        return 0
    raise CheckFailed("check/unhealthy", "this pair is not fit to serve.", facts=found.problems)


def with_proposals(config: EngineConfig | None) -> EngineConfig | None:
    """Without a draft and without an ask, n-grams propose, and always so many: there has to be something to verify,
    whether or not it pays."""
    if config is None:
        return None
    asked, origin = config.speculative, Origin(source=OriginSource.DEFAULT, where="proa check")
    if asked.algorithm.is_auto and config.draft.path.is_auto:
        asked = replace(asked, algorithm=Choice(value=Algorithm.NGRAM, origin=origin))
    if asked.num_draft_tokens.is_auto and asked.algorithm.value is not Algorithm.NONE:
        asked = replace(asked, num_draft_tokens=Choice(value=LENGTH, origin=origin))
    return replace(config, speculative=asked)


def with_self_tests(found: Health, llm: LLM, verdicts: Mapping[str, str]) -> Health:
    """A kernel that is in use and computes wrongly is a problem; one that is not in use is none."""
    runners = [one for one in llm.explain()["runners"].values() if one is not None]
    used = {decision["value"] for one in runners for decision in one["decisions"].values()}
    wrong = (
        f"{backend} kernels are in use, and their self-test says: {verdict}"
        for backend, verdict in verdicts.items()
        if backend in used and verdict != PASSED
    )
    return replace(found, problems=(*found.problems, *wrong))


def lines(llm: LLM, found: Health, verdicts: Mapping[str, str]) -> Iterator[str]:
    for role, one in llm.ledger()["runners"].items():
        tensors, parameters = one["tensors"], one["parameters"]
        yield (
            f"{role}: ledger closed: {tensors['total']} tensors ({tensors['left_out']} left out), "
            f"{parameters['total']} parameters"
        )
    yield from (f"self-test of {backend} kernels: {verdict}" for backend, verdict in verdicts.items())
    yield from cost_lines(llm.costs)
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
