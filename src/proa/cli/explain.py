"""`proa explain`: the plan of each runner with reasons, from headers and config only. Imports no torch."""

from __future__ import annotations

import argparse
from pathlib import Path

from proa.arch.registry import FAMILIES
from proa.cli.headers import uncollected
from proa.cli.output import Output
from proa.config.intent import EngineConfig
from proa.env import read_environment
from proa.errors import ConfigError
from proa.kernels.caps import read_caps_file
from proa.loading.dry_run import tensor_counts
from proa.plan.costs import known_costs
from proa.plan.explain import cost_lines, explain_diff, explain_json, explain_table, explain_why, why_json
from proa.plan.families import families_json, families_table
from proa.plan.prepare import prepare

IS_MODEL_OPTIONAL = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--why", metavar="KNOB", help="every condition of one decision, with the facts that it read")
    parser.add_argument("--diff", action="store_true", help="only the decisions in which target and draft differ")
    parser.add_argument("--caps", type=Path, metavar="FILE", help="plan for the host that FILE describes")
    parser.add_argument("--families", action="store_true", help="every target family with its drafts; needs no MODEL")


def run(args: argparse.Namespace, config: EngineConfig | None, out: Output) -> int:
    with uncollected():
        return _run(args, config, out)


def _run(args: argparse.Namespace, config: EngineConfig | None, out: Output) -> int:
    if args.families:
        out.json(families_json(FAMILIES)) if args.json else out.line(families_table(FAMILIES))
        return 0
    if config is None or not config.model:
        raise ConfigError("config/command-line", "MODEL is missing.", hint="proa explain MODEL")
    environment = read_environment()
    resolved = prepare(
        config,
        cache_dir=environment.cache_dir,
        online=not environment.offline,
        note=out.note,
        caps=None if args.caps is None else read_caps_file(args.caps),
    )
    for warning in resolved.warnings:
        out.note(warning)
    # Another host's costs are not known here.
    costs = known_costs(resolved.plans, environment.cache_dir, out.note) if args.caps is None else {}
    if args.why is not None:
        out.json(why_json(resolved.plans, args.why)) if args.json else out.line(explain_why(resolved.plans, args.why))
    elif args.json:
        out.json(explain_json(resolved.plans, costs))
    elif args.diff:
        out.line(explain_diff(resolved.plans))
    else:
        out.line("\n".join([explain_table(resolved.plans, tensor_counts(resolved)), *cost_lines(costs)]))
    return 0
