"""What GGUF makes of a Qwen3-Next model's tensors (benchmarks/hybrid.py)."""

from __future__ import annotations

import torch

from benchmarks.hybrid import stored

CONFIG = {
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 1,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 1,
}


def test_the_grouped_projection_is_cut_in_two() -> None:
    # By key head: q, k, v v, z z. Together: q q k k v v v v, and z z z z.
    rows = torch.arange(12.0)[:, None]
    hub = "model.layers.0.linear_attn.in_proj_qkvz.weight"
    assert stored(hub, "blk.0.attn_qkv.weight", rows, CONFIG)[:, 0].tolist() == [0, 6, 1, 7, 2, 3, 8, 9]
    assert stored(hub, "blk.0.attn_gate.weight", rows, CONFIG)[:, 0].tolist() == [4, 5, 10, 11]


def test_norms_get_their_one_but_for_that_of_a_linear_head() -> None:
    half = torch.tensor([0.5])
    assert stored("model.norm.weight", "output_norm.weight", half, CONFIG).tolist() == [1.5]
    assert stored("model.layers.0.linear_attn.norm.weight", "blk.0.ssm_norm.weight", half, CONFIG).tolist() == [0.5]


def test_decay_rates_are_negative_exponentials() -> None:
    assert stored("model.layers.0.linear_attn.A_log", "blk.0.ssm_a", torch.zeros(2), CONFIG).tolist() == [-1.0, -1.0]
