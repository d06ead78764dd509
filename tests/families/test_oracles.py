"""Logits and greedy tokens of reference checkpoints equal those of transformers, however requests are batched and cut.

The checkpoints and their reference.npz are written by another program; PROA_ORACLES names their directory.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from proa.runner.runner import Runner
from proa.units import Phase
from tests.factories.native import native_runner, probed, why_not
from tests.factories.oracles import (
    TOLERANCE,
    Reference,
    assert_close,
    assert_greedy,
    chunk_of,
    greedy,
    read_reference,
)
from tests.factories.runners import Rows, runner_of

pytestmark = pytest.mark.oracle

DENSE = ("llama", "llama_sharded", "qwen2", "qwen3", "mistral", "mistral_swa")
HEADS = ("qwen2_moe", "qwen3_moe", "glm4_moe", "minimax_m2")
LATENT = (
    "deepseek_v2_lite", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe_lite", "mistral4",
    "kimi_k2", "kimi_k25",
)  # fmt: skip
HYBRID = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text", "kimi_linear")
NAMES = (*DENSE, *HEADS, *LATENT, *HYBRID, "mistral3_vl")
KINDS = ("reference-16", "reference-4", "onednn-16", "native-16")
FOUND = probed()
WHY_NOT = why_not(FOUND)


@pytest.fixture(scope="module", params=NAMES)
def path(request: pytest.FixtureRequest, oracle_dir: Path) -> Path:
    return oracle(oracle_dir, request.param)


def oracle(oracle_dir: Path, name: str) -> Path:
    """The dense ones lie in the directory itself, those of the matrix of forms under `plain`."""
    for folder in (oracle_dir / name, oracle_dir / "plain" / name):
        if folder.is_dir():
            return folder
    pytest.skip(f"PROA_ORACLES has no {name}")


@pytest.fixture(scope="module")
def reference(path: Path) -> Reference:
    return read_reference(path)


@pytest.fixture(scope="module")
def runners(path: Path) -> Callable[[str], Runner]:
    """`runners("native-16")`: backend and page size; loaded once each."""
    built: dict[str, Runner] = {}

    def runner(kind: str) -> Runner:
        backend, _, size = kind.partition("-")
        if backend != "reference" and WHY_NOT is not None:
            pytest.skip(WHY_NOT)
        if kind not in built:
            asks = {"dtype": "float32", "page_size": int(size)}
            if backend == "reference":
                built[kind] = runner_of(path, **asks)
            else:
                built[kind] = native_runner(path, FOUND, num_pages=256, matmul_kernel=backend, **asks)
            assert built[kind].describe()["matmul_kernel"] == backend
        return built[kind]

    return runner


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [7, 1000])
def test_one_request(reference: Reference, runners: Callable[[str], Runner], kind: str, chunk: int) -> None:
    rows = Rows(runners(kind), 1, 128)
    prompt, step = reference.prompt, chunk_of(rows.runner, chunk)
    logits = torch.cat([rows.prefill(0, prompt[at : at + step]) for at in range(0, len(prompt), step)])
    assert_close(logits, reference.logits)
    assert_greedy(greedy(rows, logits[-1:], 32)[0], reference)


@pytest.mark.parametrize("kind", KINDS)
def test_eight_requests_of_different_lengths_in_one_batch(
    reference: Reference, runners: Callable[[str], Runner], kind: str
) -> None:
    """Prefilled together, then each fed the rest of the reference's own text: every row must match it."""
    text = reference.prompt + reference.greedy[:-1]
    lengths = [76, 1, 5, 33, 64, 17, 70, 48]
    rows = Rows(runners(kind), 8, 128)
    spans = [rows.span(i, Phase.PREFILL, text[:length]) for i, length in enumerate(lengths)]
    parts = rows.runner.forward(spans).logits.split(lengths)
    for part, length in zip(parts, lengths, strict=True):
        assert_close(part, reference.logits[:length])
    last = torch.stack([part[-1] for part in parts])
    steps = [rows.decode([text[length + step] for length in lengths]) for step in range(31)]
    for step, logits in enumerate(steps):
        for row, length in enumerate(lengths):
            if length + step < len(reference.prompt):
                assert_close(logits[row], reference.logits[length + step])
    assert_greedy([int(logits[0].argmax()) for logits in (last, *steps)], reference)


@pytest.mark.parametrize("kind", KINDS)
def test_verify_rows_and_chunks_of_seven_in_one_batch(
    reference: Reference, runners: Callable[[str], Runner], kind: str
) -> None:
    """Four requests prefill in chunks of 7 while four others verify ragged rows of the same text."""
    prompt, counts = reference.prompt, [1, 4, 2, 3]
    rows = Rows(runners(kind), 8, 128)
    at, chunk = [0] * 8, chunk_of(rows.runner, 7)
    while at[0] < len(prompt):
        spans = []
        for request in range(8):
            count = chunk if request < 4 else counts[request - 4]
            phase = Phase.PREFILL if request < 4 else Phase.VERIFY
            if part := prompt[at[request] : at[request] + count]:
                spans.append((request, rows.span(request, phase, part)))
        logits = rows.runner.forward([span for _, span in spans]).logits.split([len(span.tokens) for _, span in spans])
        for (request, span), part in zip(spans, logits, strict=True):
            assert_close(part, reference.logits[span.start : span.end])
            at[request] = span.end


def test_a_wrong_weight_is_noticed(reference: Reference, path: Path) -> None:
    """The reverse: one norm weight off by 1 % moves the logits past the tolerance."""
    runner = runner_of(path, dtype="float32")
    runner._model.layers["0"].ffn_norm.scale.mul_(1.01)
    logits = Rows(runner, 1, 128).prefill(0, reference.prompt)
    assert (logits - reference.logits).abs().max().item() > TOLERANCE
