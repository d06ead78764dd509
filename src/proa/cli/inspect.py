"""`proa inspect`: what the checkpoint holds and where each tensor would go, from headers only. Imports no torch."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from proa.arch.blocks import AttentionSpec, FFNSpec, MLASpec, MoESpec
from proa.arch.decoder import Borrow, DecoderSpec, MixerSpec
from proa.arch.delta_blocks import DeltaSpec
from proa.cli.headers import uncollected
from proa.cli.output import Output
from proa.config.intent import EngineConfig
from proa.env import read_environment
from proa.errors import ConfigError, WeightError
from proa.loading.dry_run import account, inspect, open_ledgers
from proa.loading.ledger import LoadLedger
from proa.plan.planned import Planned, Resolved
from proa.plan.prepare import boundless, host_caps, prepare
from proa.plan.shapes import KINDS
from proa.units import format_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--weights", action="store_true", help="every group of tensors and its place")
    parser.add_argument("--layers", action="store_true", help="the model as an outline")


def run(args: argparse.Namespace, config: EngineConfig | None, out: Output) -> int:
    with uncollected():
        return _run(args, config, out)


def _run(args: argparse.Namespace, config: EngineConfig | None, out: Output) -> int:
    if config is None:
        raise ConfigError("config/command-line", "MODEL is missing.", hint="proa inspect MODEL")
    environment = read_environment()
    cache_dir = environment.cache_dir
    # Where tensors go does not depend on whether they fit here.
    caps = boundless(host_caps(config, cache_dir))
    resolved = prepare(config, cache_dir=cache_dir, online=not environment.offline, note=out.note, caps=caps)
    ledgers = open_ledgers(resolved)
    document = account(resolved, ledgers)
    if args.json:
        out.json(document)
    else:
        out.line("\n".join(_lines(resolved, document, weights=args.weights, layers=args.layers)))
    return _verdict(ledgers, out)


def report_lines(resolved: Resolved, *, weights: bool, layers: bool) -> Iterator[str]:
    """The account of every runner, then of the files."""
    return _lines(resolved, inspect(resolved), weights=weights, layers=layers)


def _lines(resolved: Resolved, document: Mapping[str, Any], *, weights: bool, layers: bool) -> Iterator[str]:
    for planned in resolved.runners:
        yield from _report(planned, document["runners"][planned.plan.role.value], weights=weights, layers=layers)
    yield from _files(document["files"])


def _verdict(ledgers: Mapping[str, LoadLedger], out: Output) -> int:
    """0, or the exit code of a load that would be refused, with its message for every runner concerned."""
    code = 0
    for ledger in ledgers.values():
        try:
            ledger.refuse_findings()
        except WeightError as error:
            out.note(str(error))
            code = error.exit_code
    return code


def _report(planned: Planned, account: Mapping[str, Any], *, weights: bool, layers: bool) -> Iterator[str]:
    plan, config = planned.plan, account["config"]
    count = f"{plan.num_layers} layer{'s' * (plan.num_layers > 1)}"
    yield f"{plan.role.value}  {plan.family}, {count}, {plan.checkpoint}"
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
    yield f"  embedding {spec.vocab} x {spec.hidden}{_whose(spec, Borrow.EMBED)}"
    if spec.entry is not None:
        yield f"  entry {2 * spec.hidden} -> {spec.hidden}: the token's embedding and the hidden row before it"
    start = 0
    for index, layer in enumerate(spec.layers):
        following = spec.layers[index + 1] if index + 1 < len(spec.layers) else None
        if following is not None and (following.mixer, following.ffn) == (layer.mixer, layer.ffn):
            continue
        first = spec.layers[start].index
        yield f"  layers {first}..{layer.index}" if first < layer.index else f"  layer {first}"
        yield from (f"    {line}" for line in (*_mixer_lines(layer.mixer), *_ffn_lines(layer.ffn)))
        start = index + 1
    tied = "tied to the embedding by the config" if spec.tied_head else "of its own by the config"
    yield f"  head {_whose(spec, Borrow.HEAD).removeprefix(', ') or tied}"


def _whose(spec: DecoderSpec, module: Borrow) -> str:
    return ", the target's" if module in spec.borrows else ""


def _mixer_lines(mixer: MixerSpec) -> Iterator[str]:
    match mixer:
        case AttentionSpec():
            window = f", window {mixer.window}" if mixer.window else ""
            norms = ", q and k normalised" if mixer.qk_norm else ""
            gate = ", gated" if mixer.is_gated else ""
            heads = f"{mixer.num_heads} heads, {mixer.num_kv_heads} kv heads, size {mixer.head_dim}"
            yield f"attention {heads}{norms}{gate}{window}"
        case MLASpec():
            ranks = f"latent {mixer.kv_rank}" + (f", queries through {mixer.q_rank}" if mixer.q_rank else "")
            rotated = "rotated" if mixer.rope is not None else "shared by all, no positions"
            sizes = f"{mixer.nope_dim} + {mixer.rope_dim} {rotated}, values {mixer.value_dim}"
            yield f"latent attention {mixer.num_heads} heads, {sizes}, {ranks}"
            if (indexer := mixer.indexer) is not None:
                own = f"{indexer.num_heads} heads, size {indexer.head_dim}"
                whose = own if indexer.is_full else "of a layer before"
                yield f"  of {indexer.top_k} rows selected by an index, {whose}"
        case DeltaSpec():
            heads = (
                f"{mixer.key_heads} key heads of {mixer.key_dim}, {mixer.value_heads} value heads of {mixer.value_dim}"
            )
            yield f"linear attention ({KINDS[mixer.decay]}) {heads}, convolution over {mixer.taps} rows"
            return
    if mixer.rope is not None:
        pairs = ", neighbouring pairs" if mixer.rope.is_interleaved else ""
        part = f", {mixer.rope.dim} elements" if _is_part(mixer, mixer.rope.dim) else ""
        yield f"  rope {mixer.rope.kind.value}, base {mixer.rope.base:g}{part}{pairs}"


def _is_part(mixer: AttentionSpec | MLASpec, rotated: int) -> bool:
    return isinstance(mixer, AttentionSpec) and rotated < mixer.head_dim


def _ffn_lines(ffn: FFNSpec | MoESpec) -> Iterator[str]:
    if isinstance(ffn, FFNSpec):
        yield f"gated MLP {ffn.width}{ffn.activation.note}"
        return
    router = ffn.router
    listed = ", listed by token" if router.table is not None else ""
    yield f"{ffn.num_experts} experts {ffn.width}, {ffn.top_k} per token{listed}{ffn.activation.note}"
    groups = f", {router.top_groups} of {router.num_groups} groups" if router.num_groups > 1 else ""
    bias = ", correction bias" if router.has_bias else ""
    scale = f", scale {router.scale:g}" if router.scale != 1 else ""
    yield f"  router {router.score.value}{bias}{groups}{', renormalised' if router.renormalise else ''}{scale}"
    if (shared := ffn.shared) is not None:
        gated = ", gated per token" if shared.is_gated else ""
        yield f"  {shared.count} shared {shared.width}{gated}{shared.activation.note}"
