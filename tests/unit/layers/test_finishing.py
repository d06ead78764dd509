"""Layers become ready while a model is loaded: each once, when the last parameter that it reads is filled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from proa.kernels.kernel_set import KernelSet
from proa.layers.base import Layer
from proa.layers.decoder import Decoder
from proa.layers.finishing import Finishing
from proa.loading.build import build, construct
from proa.loading.progress import Silent
from tests.factories.checkpoints import FAMILIES
from tests.factories.headers import planned


@pytest.fixture
def finished(monkeypatch: pytest.MonkeyPatch) -> list[Layer]:
    """Every layer that was made ready, in order."""
    seen: list[Layer] = []
    for kind in {type(module) for module in layers_of(Layer)}:
        monkeypatch.setattr(kind, "finish", noting(kind.finish, seen))
    return seen


def layers_of(kind: type[Layer]) -> list[Layer]:
    """An empty instance of each class that has its own `finish`."""
    found: list[Layer] = []
    for one in kind.__subclasses__():
        found += ([one.__new__(one)] if "finish" in vars(one) else []) + layers_of(one)
    return found


def noting(finish: Callable[..., None], seen: list[Layer]) -> Callable[[Layer, KernelSet], None]:
    def noted(layer: Layer, kernels: KernelSet) -> None:
        seen.append(layer)
        finish(layer, kernels)

    return noted


def model_of(path: Path) -> tuple[Decoder, Finishing]:
    plan = planned(path).target
    model = construct(plan, None, None)
    return model, Finishing(model, model.kernels, plan.parameters)


def test_a_layer_is_ready_when_its_last_parameter_is_filled(tiny: Callable[..., Path], finished: list[Layer]) -> None:
    model, finishing = model_of(tiny("qwen2"))
    attention = model.layers["1"].attn
    finishing.filled("layers.1.attn.qkv.weight")
    assert finished == []
    finishing.filled("layers.1.attn.qkv.bias")
    assert finished == [attention.qkv]
    finishing.filled("layers.1.attn.o.weight")
    assert finished == [attention.qkv, attention, attention.o]


def test_a_tied_head_is_ready_with_its_embedding(tiny: Callable[..., Path], finished: list[Layer]) -> None:
    model, finishing = model_of(tiny("qwen2"))
    finishing.filled("embed.weight")
    assert finished == [model.embed, model.head]


def test_parameters_that_are_filled_are_held_no_longer(tiny: Callable[..., Path]) -> None:
    _, finishing = model_of(tiny("llama"))
    assert "norm.weight" in finishing.parameters
    finishing.filled("norm.weight")
    assert "norm.weight" not in finishing.parameters
    finishing.rest()
    assert finishing.parameters == {}


@pytest.mark.parametrize("family", [*FAMILIES, "qwen2_moe"])
def test_loading_makes_every_layer_ready_once(family: str, tiny: Callable[..., Path], finished: list[Layer]) -> None:
    model = build(planned(tiny(family)).target, Silent(), None, None).model
    layers = [module for module in model.modules() if isinstance(module, Layer)]
    assert len(finished) == len(layers) and set(finished) == set(layers)


def test_weights_are_packed_before_the_next_layer_is_read(tiny: Callable[..., Path], finished: list[Layer]) -> None:
    """In the order of the file: nothing of a layer waits until the whole model is there."""
    model = build(planned(tiny("llama")).target, Silent(), None, None).model
    packed = [layer for layer in finished if layer in {module.ffn.down for module in model.layers.values()}]
    norms = [finished.index(model.layers[number].ffn_norm) for number in ("0", "1")]
    assert finished.index(packed[0]) < max(norms)
