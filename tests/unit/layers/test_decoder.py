"""The decoder as built from a spec: its parameters are the table's, it keeps no plan, it runs on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from proa.arch.blocks import RopeKind
from proa.arch.parameters import decoder_parameters
from proa.dist.mesh import SINGLE, Mesh
from proa.kernels.bind import bind
from proa.kernels.seam import LayerKV
from proa.layers.base import BuildContext, kernel_names, torch_dtype
from proa.layers.decoder import Decoder
from proa.loading.build import construct
from proa.plan.decision import Decision
from proa.plan.planned import Planned
from proa.plan.runner_plan import RunnerPlan
from proa.runner.batch import RowSpan, make_batch
from proa.units import DType, Phase
from tests.factories.checkpoints import FAMILIES
from tests.factories.headers import planned


def on_meta(plan: Planned) -> Planned:
    return replace(plan, plan=replace(plan.plan, device=replace(plan.plan.device, value="meta")))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_parameters_of_the_modules_are_those_of_the_table(family: str, tiny: Callable[..., Path]) -> None:
    plan = planned(tiny(family), dtype="bfloat16").target
    built = {name: (tuple(p.shape), p.dtype) for name, p in construct(plan, None).named_parameters()}
    table = {name: (info.shape, torch_dtype(info.dtype or DType.BF16)) for name, info in plan.parameters.items()}
    assert built == table


def test_parameters_that_few_families_have_are_those_of_the_table(tiny: Callable[..., Path]) -> None:
    """Output and MLP biases, and rope factors, which the tiny checkpoints lack."""
    plan = planned(tiny("qwen3")).target
    layers = tuple(
        replace(
            layer,
            mixer=replace(
                layer.mixer, output_bias=True, qkv_bias=True, rope=replace(layer.mixer.rope, kind=RopeKind.FACTORS)
            ),
            ffn=replace(layer.ffn, bias=True),
        )
        for layer in plan.spec.layers
    )
    spec = replace(plan.spec, layers=layers)
    table = decoder_parameters(spec, plan.plan.layout)
    model = construct(on_meta(replace(plan, spec=spec, parameters=table)), None)
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == {
        name: info.shape for name, info in table.items()
    }


def held(value: object, depth: int = 4) -> Iterator[object]:
    """The value and what it holds, in containers and attributes."""
    yield value
    if depth == 0 or isinstance(value, str | bytes | int | float | torch.Tensor | type):
        return
    if isinstance(value, dict):
        inner = list(value.values())
    elif isinstance(value, list | tuple | set | frozenset):
        inner = list(value)
    else:
        slots = [getattr(value, name, None) for name in getattr(type(value), "__slots__", ())]
        inner = [*getattr(value, "__dict__", {}).values(), *slots]
    for part in inner:
        yield from held(part, depth - 1)


def kept_plans(model: nn.Module) -> list[str]:
    return [
        f"{name}: {type(value).__name__}"
        for name, module in model.named_modules()
        for value in held({key: part for key, part in vars(module).items() if key != "_modules"})
        if isinstance(value, RunnerPlan | Decision | BuildContext)
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_no_module_keeps_a_plan(family: str, tiny: Callable[..., Path]) -> None:
    model = construct(planned(tiny(family)).target, None)
    model.finish()
    assert kept_plans(model) == []


def test_a_module_that_keeps_its_plan_is_found(tiny: Callable[..., Path]) -> None:
    plan = planned(tiny("llama")).target
    model = construct(plan, None)
    model.layers[1].attn._spec = (plan.plan,)
    assert "layers.1.attn: RunnerPlan" in kept_plans(model)


def test_a_forward_on_the_meta_device_has_the_right_shape_and_costs_nothing(tiny: Callable[..., Path]) -> None:
    plan = on_meta(planned(tiny("qwen3")).target)
    model = construct(plan, None)
    model.finish()
    kv = [
        LayerKV(keys=torch.empty(32, 2, 32, device="meta"), values=torch.empty(32, 2, 32, device="meta"), page_size=16)
        for _ in plan.spec.layers
    ]
    span = RowSpan(phase=Phase.PREFILL, tokens=[1, 2, 3], start=0, pages=[1, 0], logits=[0, 2])
    batch = make_batch([span], page_size=16, windows=(None,), device="meta")
    logits = model(batch, kv)
    assert logits.shape == (2, 512) and logits.is_meta and logits.dtype is torch.float32


def test_a_packed_copy_takes_the_place_of_the_parameter(tiny: Callable[..., Path]) -> None:
    """A backend that rearranges weights must not leave two of each in memory; a tied embedding stays, for lookup."""
    plan = planned(tiny("llama")).target
    model = construct(plan, None)
    stored = sum(parameter.nbytes for parameter in model.parameters())
    reference = model.kernels.pack
    model.kernels.pack = lambda weight, bias: reference(weight.clone(), bias)  # type: ignore[method-assign]  # a fake backend
    model.finish()
    assert model.layers[0].ffn.down.weight.is_meta and not model.embed.weight.is_meta
    assert model.weights_bytes() == stored
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == {
        name: info.shape for name, info in plan.parameters.items()
    }


def test_layers_with_different_ropes_are_refused(tiny: Callable[..., Path]) -> None:
    plan = planned(tiny("llama")).target
    first, *rest = plan.spec.layers
    other = replace(first, mixer=replace(first.mixer, rope=replace(first.mixer.rope, base=1.0)))
    context = BuildContext(
        plan=plan.plan, table=plan.parameters, mesh=SINGLE, kernels=bind(kernel_names(plan.plan), None), prefix=""
    )
    with pytest.raises(ValueError, match="2 different ropes"):
        Decoder(context, replace(plan.spec, layers=(other, *rest)))


def test_a_mesh_has_one_rank_until_there_are_collectives() -> None:
    assert SINGLE.split(6) == range(6)
    with pytest.raises(ValueError, match="2 ranks"):
        Mesh(size=2, rank=0)


def test_a_stored_block_format_is_no_compute_type() -> None:
    with pytest.raises(ValueError, match="q4_0"):
        torch_dtype(DType.Q4_0)
