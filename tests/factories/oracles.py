"""Reference checkpoints: what another program, over transformers' models, computed from them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from proa.arch.delta_blocks import BLOCK
from proa.runner.runner import Runner
from tests.factories.runners import Rows

TOLERANCE = 2e-4
CLEAR = 1e-3  # greedy tokens must agree where the reference's best logit leads by more


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """`logits` [prompt rows, V]; `margins[i]`: how far `greedy[i]` led."""

    prompt: list[int]
    logits: torch.Tensor
    greedy: list[int]
    margins: list[float]


def read_reference(path: Path) -> Reference:
    assert json.loads((path / "reference.json").read_text())["dtype"] == "float32"
    with np.load(path / "reference.npz") as arrays:
        return Reference(
            prompt=arrays["prompt"].tolist(),
            logits=torch.from_numpy(arrays["logits"]),
            greedy=arrays["greedy"].tolist(),
            margins=arrays["margins"].tolist(),
        )


def assert_close(logits: torch.Tensor, expected: torch.Tensor) -> None:
    assert (logits - expected).abs().max().item() < TOLERANCE


def assert_greedy(tokens: list[int], reference: Reference) -> None:
    """Equal up to the first unclear step; after that the sequences may part."""
    for token, expected, margin in zip(tokens, reference.greedy, reference.margins, strict=True):
        if token != expected:
            assert margin <= CLEAR
            return


def chunk_of(runner: Runner, asked: int) -> int:
    """Where there is linear attention, prompts are cut at whole blocks."""
    return asked if runner.states is None else max(asked, BLOCK)


def greedy(rows: Rows, first: torch.Tensor, count: int) -> list[list[int]]:
    """`count` tokens of every request, decoded in one batch; `first` [B, V] are the logits after the prompts."""
    tokens = [first.argmax(dim=-1).tolist()]
    for _ in range(count - 1):
        tokens.append(rows.decode(tokens[-1]).argmax(dim=-1).tolist())
    return [list(request) for request in zip(*tokens, strict=True)]
