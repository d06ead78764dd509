"""`proa doctor`: this host, the kernels that can run on it, why the others cannot, and what that costs.

Reads the self-test verdicts that are known and imports no torch; `--build` compiles and tests first.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

from proa.cli.output import Output
from proa.conditions import Facts, evaluate
from proa.config.intent import EngineConfig
from proa.env import SPIN_NAME, SPINS, Environment, read_environment
from proa.errors import KernelUnavailable
from proa.kernels import host
from proa.kernels.caps import DeviceCaps, caps_to_json, read_caps
from proa.kernels.catalog import BLOCK_FORMATS, CATALOG, MATMUL, ONEDNN, OPS
from proa.kernels.delta_catalog import DELTA_OPS, ELSEWHERE, TORCH
from proa.kernels.kernel_info import NATIVE, REFERENCE
from proa.kernels.plugins import KernelPlugin, read_plugins
from proa.kernels.verdicts import PASSED, with_verdicts
from proa.plan.context import CapsFacts
from proa.plan.rules.quant import VBMI, VNNI
from proa.units import DType, format_bytes

# Decoding of one model on one host (docs/kernels.md): no promise for this one.
_COSTS: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        ("matmul", ONEDNN): "decoding was about 3 times slower where we measured it",
        ("matmul", REFERENCE): "decoding was about 4 times slower where we measured it",
        ("moe", REFERENCE): "the experts of a step run one after the other",
        **{(op, TORCH): "linear attention takes several passes over each state" for op in DELTA_OPS},
    }
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--build",
        action="store_true",
        help="compile and self-test the kernels now, also those that failed before (for images made ahead of time)",
    )


def run(args: argparse.Namespace, config: EngineConfig | None, out: Output) -> int:
    del config  # the host alone is asked
    environment = read_environment()
    caps, cache = read_caps(), environment.cache_dir
    if args.build:
        # By name: nothing else here may bring in torch.
        caps = import_module("proa.kernels.probing.probe").probe(caps, cache, out.note, again=True).caps
    caps = with_verdicts(caps, cache)
    kernels, threads = kernel_verdicts(caps, read_plugins(out.note)), thread_facts(environment)
    lost = [*losses(kernels), *lost_formats(caps, kernels)] if caps.device == "cpu" else []
    if args.json:
        out.json({"caps": caps_to_json(caps), "kernels": kernels, "threads": threads, "lost": lost})
    else:
        out.line("\n".join([*_host_lines(caps), *_thread_lines(threads), *_kernel_lines(kernels), *lost]))
    if args.build and caps.verdict(NATIVE) != PASSED:
        what = caps.verdict(NATIVE) if caps.compiler else "no C++ compiler was found"
        raise KernelUnavailable("kernels/not-built", f"the native kernels are not usable here: {what}")
    return 0


def thread_facts(environment: Environment) -> dict[str, Any]:
    """What decides how many threads run and how they wait."""
    root = Path("/")
    return {
        "usable": host.usable_cores(root),
        "affinity": host.affinity_cores(),
        "quota": host.cpu_quota(root),
        "openmp": dict(environment.openmp),
    }


def losses(kernels: list[dict[str, Any]]) -> Iterator[str]:
    """What a CPU host does without where an op cannot run on native kernels."""
    taken = {op: next((k["backend"] for k in kernels if k["op"] == op and k["can_run"]), None) for op in OPS}
    if set(taken.values()) == {NATIVE}:
        return
    yield "what is lost without native"
    for op, backend in taken.items():
        if backend not in (NATIVE, None):
            yield f"  {op:18} {backend:11} {_COSTS.get((op, backend), 'slower, above all in long contexts')}"
    yield "  numerics           fast        rounding may differ by batch (docs/kernels.md has our figures)"


def lost_formats(caps: DeviceCaps, kernels: list[dict[str, Any]]) -> Iterator[str]:
    """Stored formats that native matmuls compute on elsewhere, and not on this CPU."""
    if not any(k["can_run"] for k in kernels if (k["op"], k["backend"]) == (MATMUL, NATIVE)):
        return
    facts = Facts({}, CapsFacts(caps))
    for names, condition in ((" ".join(one.name for one in BLOCK_FORMATS), VNNI), ("block FP8", VBMI)):
        for verdict in evaluate((condition,), facts):
            if verdict.blocked:
                yield f"{names}: dequantised to the compute type, {verdict.blocked.reason}"


def kernel_verdicts(caps: DeviceCaps, plugins: Sequence[KernelPlugin]) -> list[dict[str, Any]]:
    """Every kernel of the catalogue on the best device of this host: whether it can run, and everything against it."""
    # What depends on a model is answered for one that fits: here the host alone is asked.
    fitting = {
        "spec.sizes": {"head_dim": (64,)},
        "spec.expert_sizes": {},
        "spec.latent_sizes": {},
        "spec.router_groups": 1,
        "spec.mixers": (),
        "plan.page_size": 16,
        "plan.kv_dtype": "",
        "plan.dtype": DType.BF16.value if caps.device == "cuda" else "",
        "plan.state_dtype": "float32",
        "spec.delta_kinds": (),
        "spec.delta_sizes": {"key_dim": (128,), "value_dim": (128,), "taps": (4,)},
        "schedule.prefill_chunk": 512,
        "verify.is_tree": False,
        "ask.attention": (),
        "ask.exact": False,
    }
    facts = Facts({**fitting, "plan.device": caps.device}, CapsFacts(caps))
    table: list[dict[str, Any]] = []
    for kernel in (*CATALOG, *(kernel for plugin in plugins for kernel in plugin.kernels)):
        if kernel.backend in ELSEWHERE:
            continue
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


def _thread_lines(threads: dict[str, Any]) -> Iterator[str]:
    quota = "no CPU quota" if threads["quota"] is None else f"a CPU quota of {threads['quota']:g}"
    yield f"threads    {threads['usable']} by default: {threads['affinity']} cores in the affinity mask, {quota}"
    named = [f"{name}={value}" for name, value in threads["openmp"].items()]
    ours = f" ({SPIN_NAME}={SPINS} is this command line's own default)" if f"{SPIN_NAME}={SPINS}" in named else ""
    yield f"openmp     {' '.join(named) or 'no variables set'}{ours}"


def _kernel_lines(kernels: list[dict[str, Any]]) -> Iterator[str]:
    yield "kernels"
    for op in dict.fromkeys(kernel["op"] for kernel in kernels):
        for kernel in (kernel for kernel in kernels if kernel["op"] == op):
            said = f"can run (self-test: {kernel['self_test']})" if kernel["can_run"] else "; ".join(kernel["reasons"])
            yield f"  {op:18} {kernel['backend']:11} {said}"
