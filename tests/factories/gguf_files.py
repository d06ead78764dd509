"""A one-layer llama GGUF whose matrices are stored in chosen formats. Written with gguf; all values are ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quants

NUMBERS = {
    "block_count": 1,
    "context_length": 256,
    "embedding_length": 64,
    "feed_forward_length": 32,
    "attention.head_count": 2,
    "attention.head_count_kv": 2,
}
MATRICES = {
    "token_embd": (2048, 64),
    "blk.0.attn_q": (64, 64),
    "blk.0.attn_k": (64, 64),
    "blk.0.attn_v": (64, 64),
    "blk.0.attn_output": (64, 64),
    "blk.0.ffn_gate": (32, 64),
    "blk.0.ffn_up": (32, 64),
    "blk.0.ffn_down": (64, 32),
}


def write_block_gguf(path: Path, formats: Mapping[str, GGMLQuantizationType]) -> Path:
    """`formats` by matrix name; the others and the norms are float32. There is no output matrix."""
    writer = GGUFWriter(path, "llama")
    for name, value in NUMBERS.items():
        writer.add_uint32(f"llama.{name}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    for name, shape in MATRICES.items():
        form = formats.get(name, GGMLQuantizationType.F32)
        writer.add_tensor(f"{name}.weight", quants.quantize(np.ones(shape, np.float32), form), raw_dtype=form)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(64, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
