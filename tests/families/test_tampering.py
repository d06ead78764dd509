"""Every tensor of every dense family, dropped, added, renamed, transposed or retyped, as target and as draft: refused
before any data is read, with the tensor named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from proa.errors import WeightError
from proa.loading.build import build
from proa.loading.progress import Silent
from proa.units import Role
from tests.factories.checkpoints import FAMILIES, random_tensors, save_sharded, tiny_config, write_checkpoint
from tests.factories.headers import planned

Tensors = dict[str, torch.Tensor]
Tampering = Callable[[Tensors, str], Iterator[str]]


def drop(tensors: Tensors, name: str) -> Iterator[str]:
    del tensors[name]
    yield name


def add(tensors: Tensors, name: str) -> Iterator[str]:
    """A sibling of the tensor, under the name of a scale that no rule of a dense family knows."""
    tensors[f"{name}_scale_inv"] = torch.ones(1)
    yield f"{name}_scale_inv"


def rename(tensors: Tensors, name: str) -> Iterator[str]:
    """Both sides must be named: what is there, and what was expected."""
    other = name.replace("weight", "kernel").replace("bias", "offset")
    tensors[other] = tensors.pop(name)
    yield name
    yield other


def transpose(tensors: Tensors, name: str) -> Iterator[str]:
    """A square matrix and a vector have the same header when transposed: nothing to see."""
    rows, *columns = tensors[name].shape
    if columns and columns != [rows]:
        tensors[name] = tensors[name].T.contiguous()
        yield name


def retype_as(dtype: torch.dtype) -> Tampering:
    def retype(tensors: Tensors, name: str) -> Iterator[str]:
        tensors[name] = tensors[name].to(dtype)
        yield name

    return retype


TAMPERINGS: dict[str, Tampering] = {
    "drop": drop,
    "add": add,
    "rename": rename,
    "transpose": transpose,
    "retype to float16": retype_as(torch.float16),
    "retype to bfloat16": retype_as(torch.bfloat16),
    "retype to float64": retype_as(torch.float64),
    "retype to int32": retype_as(torch.int32),
}
# Two layers, so that a tensor has a like; and fewer square matrices, whose transpose cannot be seen in a header.
SIZES = {
    "llama": {"hidden_size": 48, "head_dim": 16, "num_hidden_layers": 2},
    "qwen2": {"num_hidden_layers": 2},
    "qwen3": {"num_hidden_layers": 2},
    "mistral": {"num_hidden_layers": 2},
}


def load(path: Path, role: Role) -> None:
    """Plan and load the checkpoint in one role. A draft stands beside an untampered copy as target."""
    if role is Role.TARGET:
        build(planned(path).target, Silent(), None, None)
    else:
        draft = planned(path.parent / "intact", draft=path).draft
        assert draft is not None
        build(draft, Silent(), None, None)


@pytest.mark.parametrize("role", Role, ids=lambda role: role.value)
@pytest.mark.parametrize("tampering", TAMPERINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_tampered_tensor_is_refused_by_name(family: str, tampering: str, role: Role, tmp_path: Path) -> None:
    config = tiny_config(family, vocab_size=512, **SIZES[family])
    stored = random_tensors(config, 0, torch.float32)
    write_checkpoint(tmp_path / "intact", config, stored)
    path = write_checkpoint(tmp_path / "tampered", config, stored)
    load(path, role)
    tried = 0
    for name in stored:
        tensors = dict(stored)
        named = list(TAMPERINGS[tampering](tensors, name))
        if not named:
            continue
        tried += 1
        save_sharded(path, tensors, 1)
        with pytest.raises(WeightError) as caught:
            load(path, role)
        assert caught.value.exit_code == 3 and caught.value.role == role.value
        assert all(expected in str(caught.value) for expected in named), str(caught.value)
    assert tried >= (6 if tampering == "transpose" else len(stored))
