"""The tamper table for models with experts, plain and block FP8, and for the drafts that their checkpoints bundle.

One tensor of each template is tampered with, in every family, as target and as bundled draft: refused from headers,
with tensor and runner named. Not asked for, a draft's tensors are still known one by one. Most trials change headers in
memory; some, in two families, the file, and plan and load anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from proa.arch.weights import as_template
from proa.checkpoint.types import TensorInfo
from proa.errors import WeightError
from proa.loading.build import build
from proa.loading.ledger import LoadLedger
from proa.loading.progress import Silent
from proa.plan.planned import Resolved
from proa.units import DType
from tests.factories.checkpoints import random_tensors, save_sharded, tiny_config, write_checkpoint
from tests.factories.fp8 import quantised, with_fp8
from tests.factories.headers import planned
from tests.factories.mla_checkpoints import MLA_FAMILIES, mla_config, mla_tensors
from tests.factories.moe_checkpoints import MOE_FAMILIES, with_copies

Tensors = dict[str, torch.Tensor]
Tampering = Callable[[Tensors, str], Iterator[str]]
FAMILIES = (*MOE_FAMILIES, *MLA_FAMILIES)
NEXTN = ("glm4_moe", "glm4_moe_lite", "deepseek_v3", "deepseek_v32", "glm_moe_dsa")
FORMS = ("plain", "fp8")
STORED = {torch.float64: DType.F64, torch.float32: DType.F32, torch.float8_e4m3fn: DType.F8_E4M3}
COPIES = ("embed_tokens.weight", "shared_head.head.weight")


def drop(tensors: Tensors, name: str) -> Iterator[str]:
    del tensors[name]
    yield name


def rename(tensors: Tensors, name: str) -> Iterator[str]:
    """What is there is named; that the right name is missing as well, unless its scale beside it says more."""
    other = name.replace("weight", "kernel").replace("bias", "offset").replace("down_proj", "down_map")
    other = other if other != name else f"{name}_kernel"
    tensors[other] = tensors.pop(name)
    yield name
    yield other


def add(tensors: Tensors, name: str) -> Iterator[str]:
    """A stray sibling, as a duplicate under another name would be."""
    tensors[f"{name}_copy"] = tensors[name].clone()
    yield f"{name}_copy"


def transpose(tensors: Tensors, name: str) -> Iterator[str]:
    """A square matrix and a vector have the same header when transposed: nothing to see."""
    if tensors[name].ndim > 1 and tensors[name].shape[-1] != tensors[name].shape[-2]:
        tensors[name] = tensors[name].transpose(-1, -2).contiguous()
        yield name


def lengthen(tensors: Tensors, name: str) -> Iterator[str]:
    tensors[name] = torch.cat([tensors[name], tensors[name][:1]])
    yield name


def retype(tensors: Tensors, name: str) -> Iterator[str]:
    """As float64, which no weight and no scale may be."""
    tensors[name] = tensors[name].to(torch.float64)
    yield name


def scale_alone(tensors: Tensors, name: str) -> Iterator[str]:
    """A scale beside a plain weight, or beside a norm."""
    if f"{name}_scale_inv" not in tensors and name.endswith("weight"):
        tensors[f"{name}_scale_inv"] = torch.ones(1, 1)
        yield f"{name}_scale_inv"


TAMPERINGS: dict[str, Tampering] = {
    "drop": drop, "rename": rename, "add": add, "transpose": transpose, "lengthen": lengthen, "retype": retype,
    "scale alone": scale_alone,
}  # fmt: skip


def checkpoint(family: str, form: str) -> tuple[dict[str, Any], Tensors]:
    """Sizes in which few matrices are square."""
    if family in MLA_FAMILIES:
        config = mla_config(family, hidden_size=48)
        tensors = mla_tensors(config, 0, torch.float32)
    else:
        config = tiny_config(family, hidden_size=48, head_dim=16)
        tensors = with_copies(config, random_tensors(config, 0, torch.float32))
    if form == "fp8":
        config, tensors = with_fp8(config), quantised(tensors)[0]
    return config, tensors


def one_per_template(tensors: Tensors, layers: range) -> list[str]:
    """Names within `layers`, the last of each template; and those without a layer if layer 0 is among them."""
    chosen: dict[str, str] = {}
    for name in tensors:
        template, indices = as_template(name)
        if not indices or indices[0] in layers:
            chosen[template] = name
    return [name for name in chosen.values() if as_template(name)[1] or 0 in layers]


def loads(resolved: Resolved) -> None:
    target = build(resolved.target, Silent(), None, None)
    if resolved.draft is not None:
        build(resolved.draft, Silent(), None, target.model)


def header(name: str, tensor: torch.Tensor) -> TensorInfo:
    """What a file that holds the tensor would say."""
    return TensorInfo(
        name=name,
        stored_name=name,
        dtype=STORED[tensor.dtype],
        shape=tuple(tensor.shape),
        nbytes=tensor.nbytes,
        file=Path("model.safetensors"),
        offset=0,
    )


def check(resolved: Resolved, stored: Tensors, tensors: Tensors) -> None:
    """The ledgers over other headers than those that were planned with (`stored`)."""
    for plan in resolved.runners:
        was = plan.checkpoint.tensors
        infos = {
            name: was[name] if tensor is stored.get(name) else header(name, tensor) for name, tensor in tensors.items()
        }
        LoadLedger(replace(plan, checkpoint=replace(plan.checkpoint, tensors=infos))).refuse_findings()


def refused(run: Callable[[], None], named: list[str], role: str) -> None:
    with pytest.raises(WeightError) as caught:
        run()
    assert caught.value.exit_code == 3 and caught.value.role == role, str(caught.value)
    assert all(name in str(caught.value) for name in named), str(caught.value)


def tampered(resolved: Resolved, stored: Tensors, names: list[str], tampering: str, role: str) -> int:
    """How many tensors were tampered with, each of them refused."""
    tried = 0
    for name in names:
        tensors = dict(stored)
        if named := list(TAMPERINGS[tampering](tensors, name)):
            tried += 1
            refused(partial(check, resolved, stored, tensors), named, role)
    return tried


def names_of(stored: Tensors, config: dict[str, Any], role: str, tampering: str) -> list[str]:
    last = config["num_hidden_layers"]
    names = one_per_template(stored, range(last) if role == "target" else range(last, last + 1))
    if role == "draft" and tampering == "drop":  # a draft borrows all the same where the file holds no copies
        names = [name for name in names if not name.endswith(COPIES)]
    return names


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_tampered_tensor_of_a_target_is_refused_by_name(family: str, form: str, tmp_path: Path) -> None:
    config, stored = checkpoint(family, form)
    resolved = planned(write_checkpoint(tmp_path, config, stored))
    loads(resolved)
    check(resolved, stored, stored)
    for tampering in TAMPERINGS:
        names = names_of(stored, config, "target", tampering)
        assert tampered(resolved, stored, names, tampering, "target") >= 6


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", NEXTN)
def test_a_tampered_tensor_of_a_bundled_draft_is_refused_as_the_drafts(family: str, form: str, tmp_path: Path) -> None:
    config, stored = checkpoint(family, form)
    resolved = planned(write_checkpoint(tmp_path, config, stored), speculative="nextn")
    loads(resolved)
    check(resolved, stored, stored)
    for tampering in TAMPERINGS:
        names = names_of(stored, config, "draft", tampering)
        assert tampered(resolved, stored, names, tampering, "draft") >= 6


@pytest.mark.parametrize("tampering", ["drop", "rename", "retype"])
@pytest.mark.parametrize(("family", "form", "role"), [("glm4_moe", "plain", "draft"), ("qwen2_moe", "fp8", "target")])
def test_a_tampered_file_is_refused_when_it_is_planned_and_loaded(
    family: str, form: str, role: str, tampering: str, tmp_path: Path
) -> None:
    config, stored = checkpoint(family, form)
    path, asks = write_checkpoint(tmp_path, config, stored), {"speculative": "nextn"} if role == "draft" else {}
    for name in names_of(stored, config, role, tampering):
        tensors = dict(stored)
        named = list(TAMPERINGS[tampering](tensors, name))
        save_sharded(path, tensors, 1)
        refused(lambda: loads(planned(path, **asks)), named, role)


@pytest.mark.parametrize("tampering", ["rename", "add", "scale alone"])
@pytest.mark.parametrize("family", NEXTN)
def test_a_stray_name_under_a_draft_that_nobody_asked_for_is_refused(
    family: str, tampering: str, tmp_path: Path
) -> None:
    config, stored = checkpoint(family, "plain")
    resolved, last = planned(write_checkpoint(tmp_path, config, stored)), config["num_hidden_layers"]
    check(resolved, stored, stored)
    for name in one_per_template(stored, range(last, last + 1)):
        tensors = dict(stored)
        named = [other for other in TAMPERINGS[tampering](tensors, name) if other not in stored]
        is_linear_scale = tampering == "scale alone" and not any(word in name for word in ("norm", *COPIES))
        if named and not is_linear_scale:  # a linear map may have a scale: known, and left out like it
            refused(partial(check, resolved, stored, tensors), named, "target")


@pytest.mark.parametrize("layout", ["fused", "separate"])
@pytest.mark.parametrize("family", NEXTN)
def test_shared_experts_that_lost_a_projection_are_refused_in_both_layouts(
    family: str, layout: str, tmp_path: Path
) -> None:
    config, stored = checkpoint(family, "plain")
    path, last = write_checkpoint(tmp_path, config, stored), config["num_hidden_layers"]
    resolved = planned(path, speculative="nextn", shared_experts=layout)
    for role, layer in (("target", last - 1), ("draft", last)):
        name = f"model.layers.{layer}.mlp.shared_experts.down_proj.weight"
        for tamper in (drop, rename):
            tensors = dict(stored)
            named = list(tamper(tensors, name))
            refused(partial(check, resolved, stored, tensors), named, role)


@pytest.mark.parametrize("name", ["model.layers.3.mlp.extra.weight", "model.layers.3.mlp.experts.8.up_proj.weight"])
def test_a_stray_tensor_in_the_drafts_layer_is_the_drafts_when_asked_and_the_targets_when_not(
    name: str, tmp_path: Path
) -> None:
    config, stored = checkpoint("glm4_moe", "plain")
    path = write_checkpoint(tmp_path, config, stored | {name: torch.ones(32, 48)})
    refused(lambda: loads(planned(path, speculative="nextn")), [name], "draft")
    refused(lambda: loads(planned(path)), [name], "target")
