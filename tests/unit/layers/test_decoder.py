"""The decoder as built from a spec: its parameters are the table's, it keeps no plan, it runs on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from proa.arch.blocks import IndexerSpec, MLASpec, RopeKind, RopeSpec
from proa.arch.decoder import Borrow, EntrySpec, LayerSpec
from proa.arch.layout import MoELayout, WeightLayout
from proa.arch.parameters import decoder_parameters
from proa.cache.kv import KVCache
from proa.dist.mesh import SINGLE, Mesh
from proa.kernels.latent_seam import LatentKV
from proa.kernels.seam import LayerKV
from proa.layers.base import BuildContext, ForwardBatch, torch_dtype
from proa.layers.decoder import Decoder
from proa.loading.build import build, construct
from proa.loading.progress import Silent
from proa.plan.decision import Decision
from proa.plan.planned import Planned
from proa.plan.runner_plan import RunnerPlan
from proa.runner.batch import RowSpan, make_batch
from proa.units import DType, Phase
from tests.factories.checkpoints import FAMILIES
from tests.factories.headers import planned


def on_meta(plan: Planned) -> Planned:
    return replace(plan, plan=replace(plan.plan, device=replace(plan.plan.device, value="meta")))


def rope_of(layer: LayerSpec) -> RopeSpec:
    assert layer.mixer.rope is not None
    return layer.mixer.rope


@pytest.mark.parametrize("family", [*FAMILIES, "qwen2_moe", "qwen3_moe", "glm4_moe", "minimax_m2"])
def test_the_parameters_of_the_modules_are_those_of_the_table(family: str, tiny: Callable[..., Path]) -> None:
    plan = planned(tiny(family), dtype="bfloat16").target
    built = {name: (tuple(p.shape), p.dtype) for name, p in construct(plan, None, None).named_parameters()}
    table = {name: (info.shape, torch_dtype(info.dtype or DType.BF16)) for name, info in plan.parameters.items()}
    assert built == table


def test_parameters_that_few_families_have_are_those_of_the_table(tiny: Callable[..., Path]) -> None:
    """Output and MLP biases, and rope factors, which the tiny checkpoints lack."""
    plan = planned(tiny("qwen3")).target
    layers = tuple(
        replace(
            layer,
            mixer=replace(
                layer.mixer, output_bias=True, qkv_bias=True, rope=replace(rope_of(layer), kind=RopeKind.FACTORS)
            ),
            ffn=replace(layer.ffn, bias=True),
        )
        for layer in plan.spec.layers
    )
    spec = replace(plan.spec, layers=layers)
    table = decoder_parameters(spec, plan.plan.layout)
    model = construct(on_meta(replace(plan, spec=spec, parameters=table)), None, None)
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
        if isinstance(value, RunnerPlan | Decision | BuildContext | WeightLayout | MoELayout)
    ]


@pytest.mark.parametrize("family", [*FAMILIES, "qwen2_moe", "glm4_moe"])
def test_no_module_keeps_a_plan(family: str, tiny: Callable[..., Path]) -> None:
    model = construct(planned(tiny(family)).target, None, None)
    model.finish()
    assert kept_plans(model) == []


def test_a_module_that_keeps_its_plan_is_found(tiny: Callable[..., Path]) -> None:
    plan = planned(tiny("llama")).target
    model = construct(plan, None, None)
    model.layers["1"].attn._spec = (plan.plan,)
    assert "layers.1.attn: RunnerPlan" in kept_plans(model)


def test_a_forward_on_the_meta_device_has_the_right_shape_and_costs_nothing(tiny: Callable[..., Path]) -> None:
    plan = on_meta(planned(tiny("qwen3")).target)
    model = construct(plan, None, None)
    model.finish()
    kv = [
        LayerKV(keys=torch.empty(32, 2, 32, device="meta"), values=torch.empty(32, 2, 32, device="meta"), page_size=16)
        for _ in plan.spec.layers
    ]
    span = RowSpan(phase=Phase.PREFILL, tokens=[1, 2, 3], start=0, pages=[1, 0], logits=[0, 2])
    batch = make_batch([span], page_size=16, windows=(None,), device="meta")
    logits, hidden = model(batch, kv)
    assert hidden is None
    assert logits.shape == (2, 512) and logits.is_meta and logits.dtype is torch.float32


def test_a_packed_copy_takes_the_place_of_the_parameter(tiny: Callable[..., Path]) -> None:
    """A backend that rearranges weights must not leave two of each in memory; a tied embedding stays, for lookup."""
    plan = planned(tiny("llama")).target
    model = construct(plan, None, None)
    stored = sum(parameter.nbytes for parameter in model.parameters())
    reference = model.kernels.pack
    model.kernels.pack = lambda weight, bias: reference(weight.clone(), bias)  # type: ignore[method-assign]  # a fake backend
    model.finish()
    assert model.layers["0"].ffn.down.weight.is_meta and not model.embed.weight.is_meta
    assert model.weights_bytes() == stored
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == {
        name: info.shape for name, info in plan.parameters.items()
    }


def test_layers_with_different_ropes_turn_differently(tiny: Callable[..., Path]) -> None:
    """A model whose first layer has another base than the rest gives other logits than with one base."""
    plan = planned(tiny("llama")).target
    first, *rest = plan.spec.layers
    other = replace(first, mixer=replace(first.mixer, rope=replace(rope_of(first), base=10.0)))
    changed = replace(plan, spec=replace(plan.spec, layers=(other, *rest)))
    logits = []
    for one in (plan, changed):
        model = build(one, Silent(), None, None).model
        logits.append(model(*one_request(one, [5, 6, 7]))[0])
    assert (logits[0][0] - logits[1][0]).abs().max() < 1e-5  # position 0 turns nothing
    assert (logits[0][1:] - logits[1][1:]).abs().amax(dim=1).min() > 1e-3


def one_request(
    plan: Planned, tokens: list[int], **fields: object
) -> tuple[ForwardBatch, Sequence[LayerKV | LatentKV]]:
    """A prompt in one batch, and an empty cache for it."""
    mixers = [layer.mixer for layer in plan.spec.layers]
    kv = KVCache(mixers, num_pages=2, page_size=16, dtype=torch.float32, device="cpu")
    span = RowSpan(phase=Phase.PREFILL, tokens=tokens, start=0, pages=[1, 0], logits=range(len(tokens)))
    return replace(make_batch([span], page_size=16, windows=(None,), device="cpu"), **fields), kv.layers


def test_normed_rows_are_those_that_the_logits_are_made_of(tiny: Callable[..., Path]) -> None:
    plan = planned(tiny("llama")).target
    model = build(plan, Silent(), None, None).model
    plain, none = model(*one_request(plan, [5, 6, 7, 8]))
    wanted = torch.tensor([3, 1])
    logits, normed = model(*one_request(plan, [5, 6, 7, 8], wants_hidden=True, logits_rows=wanted))
    assert none is None and normed.shape == (4, plan.spec.hidden)
    torch.testing.assert_close(logits, plain[wanted])
    torch.testing.assert_close(model.output_head(normed), plain)


def draft_of(target: Planned) -> Planned:
    """A draft of one layer, number 7 in the checkpoint's names, that begins as NextN does and borrows both ends."""
    layer = replace(target.spec.layers[0], index=7)
    spec = replace(target.spec, layers=(layer,), entry=EntrySpec(norm=target.spec.final_norm), borrows=tuple(Borrow))
    layout = replace(target.plan.layout, tied_head=False)
    plan = replace(target.plan, layout=layout)
    return replace(target, spec=spec, plan=plan, parameters=decoder_parameters(spec, layout))


def filled_draft(target: Planned, lender: Decoder) -> tuple[Planned, Decoder]:
    draft = draft_of(target)
    model, generator = construct(draft, None, lender), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    model.finish()
    return draft, model


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_borrowed_module_belongs_to_its_owner(family: str, tiny: Callable[..., Path]) -> None:
    """qwen2's head is tied: the draft borrows it all the same."""
    plan = planned(tiny(family)).target
    target = build(plan, Silent(), None, None).model
    draft, model = filled_draft(plan, target)
    names = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert names == {name: info.shape for name, info in draft.parameters.items()}
    assert {name.split(".")[0] for name in names} == {"entry", "layers", "norm"} and "layers.7.attn.o.weight" in names
    assert model.embedding is target.embedding and model.output_head is target.output_head
    assert model.weights_bytes() == sum(p.nbytes for p in model.parameters())


def test_rows_of_a_draft_begin_with_a_token_and_a_hidden_row(tiny: Callable[..., Path]) -> None:
    """proj([norm(E[t]) ; norm(h)]), embedding first (DeepSeek V3, section 2.2), in float64."""
    plan = planned(tiny("llama")).target
    target = build(plan, Silent(), None, None).model
    _, model = filled_draft(plan, target)
    hidden = torch.randn(3, plan.spec.hidden, generator=torch.Generator().manual_seed(1))
    batch, _ = one_request(plan, [5, 6, 7], hidden=hidden)
    weights = {name: p.detach().double() for name, p in model.named_parameters()}
    eps = plan.spec.final_norm.eps
    halves = (target.embedding.weight.detach().double()[[5, 6, 7]], hidden.double())
    normed = [
        half / (half.pow(2).mean(dim=1, keepdim=True) + eps).sqrt() * weights[f"entry.{name}.weight"]
        for name, half in zip(("embed_norm", "hidden_norm"), halves, strict=True)
    ]
    expected = torch.cat(normed, dim=1) @ weights["entry.proj.weight"].T
    torch.testing.assert_close(model._begin(batch).double(), expected, atol=1e-4, rtol=1e-4)


def test_a_draft_takes_hidden_rows_and_gives_its_own(tiny: Callable[..., Path]) -> None:
    plan = planned(tiny("llama")).target
    target = build(plan, Silent(), None, None).model
    draft, model = filled_draft(plan, target)
    hidden = torch.randn(3, plan.spec.hidden, generator=torch.Generator().manual_seed(1))
    logits, normed = model(*one_request(draft, [5, 6, 7], hidden=hidden, wants_hidden=True))
    torch.testing.assert_close(target.output_head(normed), logits)
    other, _ = model(*one_request(draft, [5, 6, 7], hidden=hidden.roll(1, dims=0)))
    assert (logits - other).abs().amax(dim=1).min() > 1e-3
    with pytest.raises(ValueError, match="hidden rows"):
        model(*one_request(draft, [5, 6, 7]))


def test_a_borrower_without_its_target_is_refused(tiny: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match="without its target"):
        construct(draft_of(planned(tiny("llama")).target), None, None)


def test_a_selection_that_no_layer_makes_is_refused(tiny: Callable[..., Path]) -> None:
    """The first layer shares the selection of one before it."""
    plan = planned(tiny("llama")).target
    rope = rope_of(plan.spec.layers[0])
    mixer = MLASpec(
        num_heads=2, q_rank=8, kv_rank=8, nope_dim=8, rope_dim=rope.dim, value_dim=8, rope=rope, scale=1.0,
        norm=plan.spec.final_norm,
        indexer=IndexerSpec(num_heads=2, head_dim=32, top_k=4, rope=rope, norm_eps=1e-6, is_full=False),
    )  # fmt: skip
    spec = replace(plan.spec, layers=(replace(plan.spec.layers[0], mixer=mixer),))
    table = decoder_parameters(spec, plan.plan.layout)
    with pytest.raises(ValueError, match="no earlier one selects"):
        construct(replace(plan, spec=spec, parameters=table), None, None)


def test_a_mesh_has_one_rank_until_there_are_collectives() -> None:
    assert SINGLE.split(6) == range(6)
    with pytest.raises(ValueError, match="2 ranks"):
        Mesh(size=2, rank=0)


def test_a_stored_block_format_is_no_compute_type() -> None:
    with pytest.raises(ValueError, match="q4_0"):
        torch_dtype(DType.Q4_0)
