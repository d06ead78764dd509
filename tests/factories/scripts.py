"""Script models: checkpoints whose greedy output is known by construction, with huge logit margins.

Vocabulary = hidden size, the embedding is the identity, every attention and MLP output is zero and the head is a
successor table: after token i comes successor[i], whatever stood before. So a draft that is the same file accepts all,
and a draft with some successors changed has an acceptance histogram that can be counted on paper.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.factories.checkpoints import tensor_shapes, tiny_config, write_checkpoint
from tests.factories.tokenizer import EOS, SIZE

PEAK = 20.0  # logit of the successor; every other logit is 0 (or the runner-up's)


def script(tokens: Sequence[int], *, then: int = EOS, size: int = SIZE) -> list[int]:
    """Successor table that says `tokens` after any prompt whose last token is not one of them, then `then`.

    ValueError if a token occurs twice: a successor table has one answer per token.
    """
    if len(set(tokens)) != len(tokens):
        raise ValueError("a script cannot repeat a token")
    table = [tokens[0]] * size
    for token, following in zip(tokens, [*tokens[1:], then], strict=True):
        table[token] = following
    return table


def write_script(
    path: Path,
    successor: Mapping[int, int] | Sequence[int],
    *,
    other: int = EOS,
    runner_up: Mapping[int, int] | None = None,
    margin: float = 1.0,
    peak: float = PEAK,
    texts: Mapping[int, bytes] | None = None,
    generation: Mapping[str, Any] | None = None,
) -> Path:
    """Write a llama whose greedy output follows `successor` and return `path`.

    `other` follows every id that a mapping leaves out. `runner_up[i]` has logit `peak - margin` after token i, so that
    penalties and biases have something to turn to. `texts` gives chosen ids chosen bytes.
    """
    table = dict(enumerate(successor)) if isinstance(successor, Sequence) else successor
    config = tiny_config(
        "llama", hidden_size=SIZE, vocab_size=SIZE, num_hidden_layers=1, intermediate_size=16, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, rope_scaling=None, rope_theta=10000.0, rms_norm_eps=1e-9,
    )  # fmt: skip
    tensors = {name: torch.zeros(shape) for name, shape in tensor_shapes(config)}
    tensors |= {name: torch.ones_like(tensor) for name, tensor in tensors.items() if "norm" in name}
    tensors["model.embed_tokens.weight"] = torch.eye(SIZE)
    # A one-hot row leaves the final norm with height sqrt(SIZE).
    unit = 1.0 / math.sqrt(SIZE)
    head = tensors["lm_head.weight"]
    for token in range(SIZE):
        if runner_up is not None and token in runner_up:
            head[runner_up[token], token] = (peak - margin) * unit
        head[table.get(token, other), token] = peak * unit
    return write_checkpoint(path, config, tensors, texts=texts or {}, generation=generation)
