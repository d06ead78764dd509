"""`proa doctor`: this host, the kernels that can run on it, and why the others cannot. Imports no torch."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from proa.cli.output import Output
from proa.conditions import evaluate
from proa.config.intent import EngineConfig
from proa.kernels.caps import DeviceCaps, caps_to_json, read_caps
from proa.kernels.catalog import CATALOG
from proa.plan.context import caps_facts
from proa.units import format_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No options of its own."""


def run(args: argparse.Namespace, config: EngineConfig | None, out: Output) -> int:
    del config  # the host alone is asked
    caps = read_caps()
    kernels = kernel_verdicts(caps)
    if args.json:
        out.json({"caps": caps_to_json(caps), "kernels": kernels})
    else:
        out.line("\n".join([*_host_lines(caps), *_kernel_lines(kernels)]))
    return 0


def kernel_verdicts(caps: DeviceCaps) -> list[dict[str, Any]]:
    """Every kernel of the catalogue on the best device of this host: whether it can run, and everything against it."""
    facts = {**caps_facts(caps), "plan.device": caps.device}
    table: list[dict[str, Any]] = []
    for kernel in CATALOG:
        blocked = [v.blocked.reason for v in evaluate(kernel.requires, facts) if v.blocked]
        table.append(
            {
                "op": kernel.op,
                "backend": kernel.backend,
                "can_run": not blocked,
                "reasons": blocked,
                "self_test": caps.verdict(kernel.backend),
                "exact": kernel.exact,
            }
        )
    return table


def _host_lines(caps: DeviceCaps) -> Iterator[str]:
    free = "unknown" if caps.memory_available is None else format_bytes(caps.memory_available)
    gpus = ", ".join(f"{gpu.name} ({format_bytes(gpu.memory_bytes)}, sm {gpu.sm})" for gpu in caps.gpus)
    yield f"platform   {caps.platform}"
    yield f"device     {caps.device}" + (f" ({caps.no_cuda})" if caps.no_cuda else f": {gpus}")
    yield f"cpu        {caps.cores} usable cores, {' '.join(caps.isa)}"
    yield f"memory     {format_bytes(caps.memory_bytes)}, {free} free"
    yield f"compiler   {caps.compiler or 'none found'}"
    yield f"libraries  {', '.join(f'{name} {version}' for name, version in caps.libraries.items())}"


def _kernel_lines(kernels: list[dict[str, Any]]) -> Iterator[str]:
    yield "kernels"
    for op in dict.fromkeys(kernel["op"] for kernel in kernels):
        for kernel in (kernel for kernel in kernels if kernel["op"] == op):
            said = f"can run (self-test: {kernel['self_test']})" if kernel["can_run"] else "; ".join(kernel["reasons"])
            yield f"  {op:18} {kernel['backend']:11} {said}"
