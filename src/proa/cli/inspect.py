"""`proa inspect`: what the checkpoint holds and where each tensor would go, from headers only. Imports no torch."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from proa.arch.decoder import DecoderSpec
from proa.cli.output import Output
from proa.config.intent import EngineConfig
from proa.env import read_environment
from proa.errors import ConfigError, WeightError
from proa.loading.dry_run import inspect, open_ledgers
from proa.plan.planned import Planned, Resolved
from proa.plan.prepare import prepare
from proa.units import format_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--weights", action="store_true", help="every group of tensors and its place")
    parser.add_argument("--layers", action="store_true", help="the model as an outline")


def run(args: argparse.Namespace, config: EngineConfig | None, out: Output) -> int:
    if config is None:
        raise ConfigError("config/command-line", "MODEL is missing.", hint="proa inspect MODEL")
    environment = read_environment()
    resolved = prepare(config, cache_dir=environment.cache_dir, online=not environment.offline, note=out.note)
    if args.json:
        out.json(inspect(resolved))
    else:
        out.line("\n".join(report_lines(resolved, weights=args.weights, layers=args.layers)))
    return _verdict(resolved, out)


def report_lines(resolved: Resolved, *, weights: bool, layers: bool) -> Iterator[str]:
    """The account of every runner, then of the files."""
    document = inspect(resolved)
    for planned in resolved.runners:
        yield from _report(planned, document["runners"][planned.plan.role.value], weights=weights, layers=layers)
    yield from _files(document["files"])


def _verdict(resolved: Resolved, out: Output) -> int:
    """0, or the exit code of a load that would be refused, with its message for every runner concerned."""
    code = 0
    for ledger in open_ledgers(resolved).values():
        try:
            ledger.refuse_findings()
        except WeightError as error:
            out.note(str(error))
            code = error.exit_code
    return code


def _report(planned: Planned, account: Mapping[str, Any], *, weights: bool, layers: bool) -> Iterator[str]:
    plan, config = planned.plan, account["config"]
    yield f"{plan.role.value}  {plan.family}, {plan.num_layers} layers, {plan.checkpoint}"
    yield f"  tensors     {_counts(account['tensors'])}"
    yield f"  parameters  {_counts(account['parameters'])}"
    yield from (f"  left out    {one['pattern']} ({one['count']}): {one['reason']}" for one in account["left_out"])
    yield from (f"  config      nobody reads {key} = {value!r}" for key, value in config["unknown"].items())
    yield from (f"  config      {note}" for note in config["notes"])
    if layers:
        yield from _outline(planned.spec)
    if weights:
        yield from _table(account["groups"])


def _counts(counts: Mapping[str, int]) -> str:
    """`272 total, 272 placed`; states that nothing is in are left away."""
    return ", ".join(f"{count} {state}" for state, count in counts.items() if count or state in ("total", "unexpected"))


def _files(files: Mapping[str, Any]) -> Iterator[str]:
    yield f"files  {files['shards']}, {format_bytes(files['total_bytes'])}"
    yield from (f"  not in the index: {name}" for name in files["not_in_index"])
    yield from (f"  damaged: {name}" for name in files["damaged"])


def _table(groups: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    rows = [("tensors", "count", "stored", "action", "fills")]
    for group in groups:
        stored = f"{group['dtype']} {'x'.join(map(str, group['shape']))}"
        rows.append((group["template"], str(group["count"]), stored, group["action"], group["parameter"] or ""))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _outline(spec: DecoderSpec) -> Iterator[str]:
    """The decoder, equal neighbouring layers once."""
    yield f"  embedding {spec.vocab} x {spec.hidden}"
    start = 0
    for index, layer in enumerate(spec.layers):
        following = spec.layers[index + 1] if index + 1 < len(spec.layers) else None
        if following is not None and (following.mixer, following.ffn) == (layer.mixer, layer.ffn):
            continue
        mixer = layer.mixer
        window = f", window {mixer.window}" if mixer.window else ""
        norms = ", q and k normalised" if mixer.qk_norm else ""
        yield f"  layers {start}..{index}"
        heads = f"{mixer.num_heads} heads, {mixer.num_kv_heads} kv heads, size {mixer.head_dim}"
        yield f"    attention {heads}{norms}{window}"
        yield f"      rope {mixer.rope.kind.value}, base {mixer.rope.base:g}"
        yield f"    gated MLP {layer.ffn.width}"
        start = index + 1
    yield f"  head {'tied to the embedding by the config' if spec.tied_head else 'of its own by the config'}"
