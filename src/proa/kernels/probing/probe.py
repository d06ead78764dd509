"""Obtains missing verdicts on this host: compiles the native library, runs each op against reference, remembers.

Never fatal: what cannot be compiled, computes wrongly or crashes (apart.py) becomes a verdict with its reason, and the
plan passes over it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch

from proa.arch.blocks import SILU, ActivationSpec, QueryScale
from proa.errors import KernelUnavailable
from proa.kernels.caps import UNTESTED, DeviceCaps
from proa.kernels.catalog import BLOCK_FORMATS, ONEDNN, has_onednn_bf16
from proa.kernels.delta_catalog import FLASHINFER, limits_of
from proa.kernels.kernel_info import NATIVE, has_native_vectors
from proa.kernels.native.abi import Form, load_library
from proa.kernels.native.build import build, library_path
from proa.kernels.native.ops import NativeAttention, NativeDense
from proa.kernels.native.sink import Direct
from proa.kernels.onednn import OnednnDense
from proa.kernels.probing.apart import judge_apart
from proa.kernels.probing.codes import fp8_results
from proa.kernels.probing.delta import delta_results
from proa.kernels.probing.experts import latent_results, moe_results, one_prompt
from proa.kernels.probing.sample import sample_results
from proa.kernels.reference.attention import ReferenceAttention
from proa.kernels.reference.misc import ReferenceDense
from proa.kernels.seam import HeadNorm, Heads, LayerKV, RopeRows
from proa.kernels.verdicts import (
    FAILED,
    PARTS,
    PASSED,
    device_backends,
    device_file,
    onednn_file,
    read_verdict,
    verdict_file,
    with_verdict,
    write_verdict,
)
from proa.units import DType

# Relative to the largest value of the expected result. bfloat16 results round once, by at most 2^-9, and the products
# that led there were rounded too.
TOLERANCES: Mapping[torch.dtype, float] = MappingProxyType({torch.float32: 1e-5, torch.bfloat16: 2e-2})

DEVICE_WORKER, DEVICE_SECONDS = "proa.kernels.probing.device", 900.0  # FlashInfer and Triton compile what they run


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """`library` is None where the native kernels cannot be compiled here."""

    caps: DeviceCaps
    library: Path | None


def probe(caps: DeviceCaps, cache: Path, note: Callable[[str], None], *, again: bool = False) -> Probed:
    """Compile and test what is untested; `again`: also what failed before. A failure is noted, never raised."""
    verdict = _verdict(onednn_file(cache, caps), lambda: self_test_onednn(caps.isa), note, again=again)
    caps = with_verdict(caps, ONEDNN, verdict)
    for backend in device_backends(caps):
        caps = with_verdict(caps, backend, _device_verdict(backend, caps, cache, note, again=again))
    if caps.compiler is None or not has_native_vectors(caps.isa):
        return Probed(caps=caps, library=None)
    try:
        library, verdicts = _native(cache, caps.compiler, caps.isa, note, again=again)
    except OSError as error:  # no directory to compile into, or what cannot be started: may change any time
        library, verdicts = None, {NATIVE: f"{FAILED}{error}"}
    for name, found in verdicts.items():
        caps = with_verdict(caps, name, found)
        if found != PASSED:
            note(f"{name} kernels are passed over: {found} (`proa doctor --build` tries again)")
    return Probed(caps=caps, library=library)


def _native(
    cache: Path, compiler: str, isa: tuple[str, ...], note: Callable[[str], None], *, again: bool
) -> tuple[Path | None, dict[str, str]]:
    """The library, where there is one, and the verdicts on it and its parts."""
    path = library_path(cache, compiler, isa)
    if again and read_verdict(path) != PASSED:
        path.unlink(missing_ok=True)
        verdict_file(path).unlink(missing_ok=True)
    known = read_verdict(path)
    if known is not None and known != PASSED:
        return None, {NATIVE: known}
    if known is None and verdict_file(path).exists():
        path.unlink(missing_ok=True)  # another library than the one that was judged: damaged, or not ours
    try:
        library = build(cache, compiler, isa, note)
    except KernelUnavailable as error:
        verdict = f"{FAILED}{str(error).splitlines()[0]}"
        write_verdict(path, verdict, note)
        return None, {NATIVE: verdict}
    return library, _native_verdicts(library, note, again=again)


def _native_verdicts(library: Path, note: Callable[[str], None], *, again: bool) -> dict[str, str]:
    """By name of PARTS: what is known; the rest is tested now, in one process of its own, and kept."""
    verdicts = {part: read_verdict(library, part) or UNTESTED for part in PARTS.values()}
    due = [part for part, verdict in verdicts.items() if verdict == UNTESTED or (again and verdict != PASSED)]
    for part, verdict in judge_apart(library, due).items():
        write_verdict(library, verdict, note, part)
        verdicts[part] = verdict
    return {name: verdicts[part] for name, part in PARTS.items()}


def _verdict(judged: Path, test: Callable[[], str], note: Callable[[str], None], *, again: bool) -> str:
    """What is known of `judged`, or what the test says now, which is kept."""
    known = read_verdict(judged)
    if known == PASSED or (known is not None and not again):
        return known
    verdict = test()
    write_verdict(judged, verdict, note)
    return verdict


def _device_verdict(backend: str, caps: DeviceCaps, cache: Path, note: Callable[[str], None], *, again: bool) -> str:
    try:
        test = partial(self_test_device, backend, caps.sm)
        verdict = _verdict(device_file(cache, caps, backend), test, note, again=again)
    except OSError as error:  # no process could be started: may change any time
        verdict = f"{FAILED}{error}"
    if verdict != PASSED:
        note(f"{backend} kernels are passed over: {verdict} (`proa doctor --build` tries again)")
    return verdict


def retest(caps: DeviceCaps, cache: Path) -> dict[str, str]:
    """Run the self-tests anew, by backend, whatever is remembered. Compiles nothing and keeps nothing."""
    verdicts = {ONEDNN: self_test_onednn(caps.isa)}
    verdicts |= {backend: self_test_device(backend, caps.sm) for backend in device_backends(caps)}
    if caps.compiler is not None:
        library = library_path(cache, caps.compiler, caps.isa)
        found = judge_apart(library, tuple(PARTS.values())) if library.is_file() else {}
        verdicts |= {name: found.get(part, UNTESTED) for name, part in PARTS.items()}
    return verdicts


def self_test(library: Path, part: str) -> str:
    """`passed`, or `failed: ` and the first op of a part (of PARTS) that differs from the reference, by how much.

    Runs the library in this process: apart.py calls it in one that may be lost.
    """
    results = {
        "": _results,
        ".moe": moe_results,
        ".latent": latent_results,
        ".delta": delta_results,
        ".fp8": fp8_results,
        ".sample": sample_results,
    }[part]
    return judge((dtype, results(library, dtype)) for dtype in TOLERANCES)


def self_test_device(backend: str, sm: str | None) -> str:
    """As `self_test`, for another package's kernels of linear attention on a GPU with that compute capability, in a
    process of its own. Raises OSError where none can be started."""
    limits = limits_of(sm) if backend == FLASHINFER else None
    state = (DType.F32 if limits is None else limits.state).value
    return judge_apart(backend, [state], DEVICE_SECONDS, DEVICE_WORKER)[state]


def self_test_onednn(isa: tuple[str, ...]) -> str:
    """As `self_test`, for the types in which oneDNN computes on such a CPU."""
    dtypes = [dtype for dtype in TOLERANCES if dtype == torch.float32 or has_onednn_bf16(isa)]
    return judge((dtype, _onednn_results(dtype)) for dtype in dtypes)


def judge(cases: Iterable[tuple[torch.dtype, Iterator[tuple[str, torch.Tensor, torch.Tensor]]]]) -> str:
    """The verdict on (type, (op, ours, expected) of each op) for each type."""
    try:
        for dtype, results in cases:
            for op, ours, expected in results:
                error = float((ours.float() - expected.float()).abs().max() / expected.float().abs().max())
                if not error <= TOLERANCES[dtype]:
                    return f"failed: {op} in {dtype} differs from the reference by {error:.2g}"
    except (KernelUnavailable, OSError, AttributeError, RuntimeError) as error:
        return f"failed: {str(error).splitlines()[0]}"
    return PASSED


def _onednn_results(dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """(op, onednn, reference): a product with ragged sizes and bias, a long one, and the gated MLP."""
    random = torch.Generator().manual_seed(0)
    onednn, reference = OnednnDense(), ReferenceDense()
    for out, size, has_bias in ((40, 48, True), (130, 1537, False)):
        weight = (torch.randn(out, size, generator=random) / size**0.5).to(dtype)
        bias = torch.randn(out, generator=random).to(dtype) if has_bias else None
        packs = onednn.pack(weight, bias), reference.pack(weight, bias)
        for rows in (1, 5, 33):
            x = torch.randn(rows, size, generator=random).to(dtype)
            yield f"matmul of {rows} rows", onednn.matmul(x, packs[0]), reference.matmul(x, packs[1])
    gate_up, down = ((torch.randn(*shape, generator=random) / 7).to(dtype) for shape in ((96, 48), (48, 48)))
    x = torch.randn(9, 48, generator=random).to(dtype)
    made = [ops.ffn(x, ops.pack(gate_up, None), ops.pack(down, None)) for ops in (onednn, reference)]
    yield "ffn", made[0], made[1]


def _results(library: Path, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """(op, native, reference) for every op, on small random values."""
    random = torch.Generator().manual_seed(0)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random)

    loaded = load_library(library)
    native, reference = NativeDense(loaded, Direct(loaded)), ReferenceDense()
    weight, bias, ids = (values(40, 48) / 7).to(dtype), values(40).to(dtype), torch.tensor([0, 39, 17])
    packs = native.pack(weight, bias), reference.pack(weight, bias)
    yield "lookup", native.lookup(packs[0], ids), reference.lookup(packs[1], ids)
    for rows in (1, 5, 13):
        x = values(rows, 48).to(dtype)
        yield f"matmul of {rows} rows", native.matmul(x, packs[0]), reference.matmul(x, packs[1])
    scale, both = 1 + values(48) / 8, [values(3, 48)] * 2
    delta = values(3, 48).to(dtype)
    made = [
        ops.add_norm(x.clone(), delta, scale, 1e-6, dtype) for ops, x in zip((native, reference), both, strict=True)
    ]
    yield "add_norm", made[0], made[1]
    gate_up, down = (values(96, 48) / 7).to(dtype), (values(48, 48) / 7).to(dtype)
    x = values(9, 48).to(dtype)
    for activation in (SILU, ActivationSpec(limit=0.5)):
        made = [ops.ffn(x, ops.pack(gate_up, None), ops.pack(down, None), activation) for ops in (native, reference)]
        yield f"ffn{activation.note}", made[0], made[1]
    gate = values(9, 64).to(dtype)[:, 8:56]
    yield "gate", native.gate(x, gate), reference.gate(x, gate)
    heads, positions = values(3, 4, 16).to(dtype), torch.tensor([0, 9, 4000])
    made = [ops.scale_queries(heads, positions, QueryScale(beta=0.1, original=8)) for ops in (native, reference)]
    yield "scale_queries", made[0], made[1]
    yield from _attention_results(library, dtype, values)
    if loaded.proa_row_bytes(Form.Q8_0, 32):  # 0 where this processor's library has no quantised products
        yield from _block_results(native, dtype, random)


def _block_results(
    native: NativeDense, dtype: torch.dtype, random: torch.Generator
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Products on random blocks. Activations are whole numbers up to 127 per group: rounding loses nothing."""
    x = torch.randint(-127, 128, (7, 256), generator=random)
    x[:, ::32] = 127
    for format in BLOCK_FORMATS:
        blocks = torch.randint(0, 256, (40, format.nbytes(256)), generator=random, dtype=torch.uint8)
        blocks &= 0x37  # whichever bytes are float16 factors are finite and below one half
        packs = [ops.pack_blocks(blocks, None, format, dtype) for ops in (native, ReferenceDense())]
        ours = native.matmul(x.to(dtype), packs[0])
        yield f"matmul on {format.value} blocks", ours, x.float() @ packs[1].weight.float().T


def _attention_results(
    library: Path, dtype: torch.dtype, values: Callable[..., torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """One prompt of 70 rows in three pages out of order, whole and through a window."""
    heads, rows, page_size, pages = Heads(query=4, key_value=2, size=32), 70, 32, np.array([[3, 0, 2]], dtype=np.int32)
    norm = HeadNorm(weight=1 + values(6, 32) / 8, eps=1e-6)
    angles = torch.arange(rows)[:, None, None] * torch.logspace(0, -2, 16).repeat(2)
    rope = RopeRows(cos=angles.cos(), sin=angles.sin() * torch.tensor([-1.0, 1.0]).repeat_interleave(16))
    projected = values(rows, 8 * 32).to(dtype)
    slots = (
        torch.from_numpy(pages[0].repeat(page_size).astype(np.int64) * page_size)[:rows]
        + torch.arange(rows) % page_size
    )
    segment = one_prompt(rows, pages, slots)
    made = []
    for ops in (NativeAttention(Direct(load_library(library))), ReferenceAttention()):
        cache = [torch.zeros(4 * page_size, 2, 32, dtype=dtype) for _ in "kv"]
        kv = LayerKV(keys=cache[0], values=cache[1], page_size=page_size)
        queries = ops.write(projected, heads, norm, rope, kv, slots)
        results = [ops.attention(queries, kv, segment, window=window, scale=0.2) for window in (None, 20)]
        made.append((queries, *results))
    yield from zip(("queries", "attention", "windowed attention"), *made, strict=True)
