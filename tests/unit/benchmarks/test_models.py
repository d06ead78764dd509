"""The order of rows in which GGUF keeps the rotary embedding of a llama model, and the names of a benchmark model."""

from __future__ import annotations

import torch

from benchmarks.models import names, permuted, random_weights, unpermuted

SMALL = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 64,
}


def test_rows_of_a_head_are_interleaved_halves() -> None:
    # Two heads of four rows: halves (0 1)(2 3) become 0 2 1 3.
    rows = torch.arange(8.0)[:, None]
    assert permuted(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_unpermuting_undoes_it() -> None:
    rows = torch.randn(24, 5, generator=torch.Generator().manual_seed(0))
    assert torch.equal(unpermuted(permuted(rows, 3), 3), rows)


def test_a_random_model_has_every_tensor_of_its_family_and_no_other() -> None:
    config = {**SMALL, "num_hidden_layers": 2}
    llama = random_weights(config)
    qwen3 = random_weights({**config, "model_type": "qwen3"})
    assert set(qwen3) == {hub for hub, _ in names(config)}
    assert set(qwen3) - set(llama) == {
        f"model.layers.{layer}.self_attn.{norm}_norm.weight" for layer in (0, 1) for norm in "qk"
    }


def test_a_random_model_is_the_same_in_every_run() -> None:
    config = {**SMALL, "num_hidden_layers": 1}
    first, second = random_weights(config), random_weights(config)
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
