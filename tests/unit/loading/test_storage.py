"""Which stored types are accepted: consistent ones, and no odd one out."""

from __future__ import annotations

from pathlib import Path

import pytest

from proa.errors import WeightError
from proa.loading.ledger import LoadLedger
from tests.factories.checkpoints import tiny_config
from tests.factories.headers import planned, write_headers

NORMS = [
    f"model.layers.{i}.{name}.weight" for i in range(3) for name in ("input_layernorm", "post_attention_layernorm")
]


def refused(path: Path, dtype: str, dtypes: dict[str, str]) -> str:
    """The error for a checkpoint stored as `dtype` except `dtypes`; empty when it is accepted."""
    write_headers(path, tiny_config("llama"), dtype=dtype, dtypes=dtypes)
    try:
        LoadLedger(planned(path).target).refuse_findings()
    except WeightError as error:
        assert error.slug == "weights/dtype"
        return str(error)
    return ""


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
def test_one_type_throughout_is_accepted(tmp_path: Path, dtype: str) -> None:
    assert not refused(tmp_path, dtype, {})


def test_norms_kept_in_float32_among_halves_are_accepted(tmp_path: Path) -> None:
    assert not refused(tmp_path, "BF16", dict.fromkeys([*NORMS, "model.norm.weight"], "F32"))


def test_a_head_kept_in_float32_among_halves_is_accepted(tmp_path: Path) -> None:
    assert not refused(tmp_path, "BF16", {"lm_head.weight": "F32"})


@pytest.mark.parametrize(
    ("dtype", "name", "odd"),
    [
        ("F32", "model.layers.1.mlp.up_proj.weight", "F16"),
        ("F32", "model.layers.1.mlp.up_proj.weight", "BF16"),
        ("F32", "lm_head.weight", "F16"),
        ("F32", "model.norm.weight", "BF16"),
        ("BF16", "model.layers.0.self_attn.q_proj.weight", "F16"),
        ("BF16", "model.layers.0.self_attn.q_proj.weight", "F32"),
        ("BF16", "model.embed_tokens.weight", "F16"),
        ("F32", "model.embed_tokens.weight", "F64"),
    ],
)
def test_a_tensor_of_another_type_than_its_like_is_refused_by_name(
    tmp_path: Path, dtype: str, name: str, odd: str
) -> None:
    said = refused(tmp_path, dtype, {name: odd})
    assert f"dtype: {name}  {odd} " in said and "expected " + dtype in said and "quantization = " in said
