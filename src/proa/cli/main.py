"""`proa VERB …`: the table of verbs, exit codes, and the only place where an error becomes text. Owns no verb.

A verb is a module `proa.cli.<verb>` with `add_arguments(parser)` (its own options) and `run(args, config, out) -> int`.
It is imported only when asked for, so that `explain` starts without what `run` needs.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

from proa import __version__
from proa.choice import Origin, OriginSource
from proa.cli.args import Parser, add_general, add_settings
from proa.cli.output import Output
from proa.config.dump import to_toml
from proa.config.fields import nearest
from proa.config.load import load_config, refuse_unknown_variables
from proa.env import read_environment, shorten_waits
from proa.errors import ConfigError, ProaError

INTERRUPTED = 130
UNEXPECTED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Verb:
    """`has_model`: takes MODEL and the settings, hence gets an EngineConfig."""

    name: str
    help: str
    has_model: bool


VERBS = (
    Verb(name="run", help="answer one prompt, or chat without one", has_model=True),
    Verb(name="explain", help="the plan of each runner with reasons, from headers only", has_model=True),
    Verb(name="inspect", help="what the checkpoint holds and where each tensor would go", has_model=True),
    Verb(name="check", help="load, compare speculative with plain output, say healthy or not", has_model=True),
    Verb(name="bench", help="throughput, latency, accept length", has_model=True),
    Verb(name="fetch", help="bring a bundled recipe into the cache directory", has_model=False),
    Verb(name="doctor", help="this host: what can run here and why the rest cannot", has_model=False),
)
LATER_VERBS = ("serve",)


def main(argv: list[str] | None = None) -> int:
    """Run one command line and return its exit code; nothing is raised."""
    if argv is None:  # the command line of a process that is ours
        shorten_waits()
    arguments = sys.argv[1:] if argv is None else argv
    out = Output.standard()
    try:
        code = _dispatch(arguments, out)
        out.flush()
    except BrokenPipeError:
        # The reader has seen enough. What is still buffered goes nowhere, also at interpreter exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        out.note("interrupted")
        return INTERRUPTED
    except Exception as error:
        return _report(error, out, arguments)
    return code


def _dispatch(arguments: Sequence[str], out: Output) -> int:
    name = arguments[0] if arguments else ""
    if name in ("-h", "--help", "help"):
        out.line(_overview())
        return 0
    if name in ("-V", "--version"):
        out.line(f"proa {__version__}")
        return 0
    try:
        return _run(_verb(name), arguments[1:], out)
    except SystemExit as stop:  # argparse, after --help
        return stop.code if isinstance(stop.code, int) else 0


def _verb(name: str) -> Verb:
    for verb in VERBS:
        if verb.name == name:
            return verb
    known = [verb.name for verb in VERBS]
    if name in LATER_VERBS:
        raise ConfigError(
            "config/verb-later",
            f"`proa {name}` is not in this version; it comes later.",
            facts=["verbs: " + ", ".join(known)],
        )
    wrong = f"unknown verb {name!r}." if name else "a verb is missing."
    hint = nearest(name, known) or "proa --help"
    raise ConfigError("config/unknown-verb", wrong, facts=["verbs: " + ", ".join(known)], hint=hint)


def _run(verb: Verb, arguments: Sequence[str], out: Output) -> int:
    environment = read_environment()
    module = import_module(f"proa.cli.{verb.name}")
    parser = Parser(f"proa {verb.name}", verb.help)
    if verb.has_model:
        parser.add_argument(
            "model",
            nargs="?" if getattr(module, "IS_MODEL_OPTIONAL", False) else None,
            default="",
            metavar="MODEL",
            help="a directory, a .gguf file, user/repo, or the name of a bundled recipe",
        )
    module.add_arguments(parser)
    add_general(parser)
    if not verb.has_model:
        args = parser.read(arguments)
        refuse_unknown_variables(environment.variables)
        return module.run(args, None, out)
    add_settings(parser)
    args = parser.read(arguments)
    config = load_config(
        args.model,
        flags=args.flags,
        file=args.config,
        environ=environment.variables,
        api={},
        model_origin=Origin(source=OriginSource.FLAG, where="MODEL"),
    )
    if args.dump_config:
        out.line(to_toml(config))
        return 0
    return module.run(args, config, out)


def _overview() -> str:
    width = max(len(verb.name) for verb in VERBS)
    verbs = [f"  {verb.name:{width}}  {verb.help}" for verb in VERBS]
    return "\n".join(["usage: proa VERB [MODEL] [options]", "", *verbs, "", "`proa VERB --help` lists the options."])


def _report(error: Exception, out: Output, arguments: Sequence[str]) -> int:
    """One message on stderr. A traceback only when asked for, be the error ours or a bug."""
    if "--debug" in arguments or _debug_by_environment():
        out.note("".join(traceback.format_exception(error)).rstrip())
    if not isinstance(error, ProaError):
        error = ProaError(
            "internal/unexpected",
            f"{type(error).__name__}: {error}",
            hint="this is a bug of Proa; run again with --debug and report it",
        )
        out.note(_shown(str(error)))
        return UNEXPECTED
    out.note(_shown(str(error)))
    return error.exit_code


def _debug_by_environment() -> bool:
    try:
        return read_environment().debug
    except ConfigError:
        return False


def _shown(text: str) -> str:
    """Names in a message come from files that anybody made: no control sequence of theirs reaches the terminal."""
    return "".join(letter if letter.isprintable() or letter == "\n" else f"\\x{ord(letter):02x}" for letter in text)
