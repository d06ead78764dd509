"""The next-token draft layer that a checkpoint bundles (NextN, multi-token prediction): its spec and weight rules.

One layer behind the target's last, derived from it, so that whatever is decided for a layer is asked for the draft's.
Which families have one, and how their blocks are spelled, is not known here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from proa.arch.blocks import MLASpec, MoESpec
from proa.arch.common import layer_rules
from proa.arch.decoder import (
    Borrow,
    DecoderSpec,
    DraftSpec,
    EntrySpec,
    HiddenTap,
    LayerSpec,
    TapPoint,
)
from proa.arch.layout import WeightLayout
from proa.arch.moe import HUB, MoENames
from proa.arch.weights import Action, Fill, WeightRule
from proa.checkpoint.hf_config import HFView
from proa.errors import ConfigError
from proa.units import Algorithm

KEY = "num_nextn_predict_layers"


def derive(c: HFView, target: DecoderSpec) -> DraftSpec | None:
    """The draft that the config announces. More than one such layer is a ConfigError."""
    count = c.int(KEY, default=0)
    if count == 0:
        return None
    last = target.layers[-1]
    if count != 1 or not isinstance(last.ffn, MoESpec):
        what = "the last layer has no experts" if count == 1 else "one draft layer is"
        raise ConfigError("config/unimplemented", f"{c.where}: {KEY} = {count} is not implemented: {what}")
    return draft_of(target, _behind(last, len(target.layers)))


def draft_of(target: DecoderSpec, layer: LayerSpec) -> DraftSpec:
    """A draft of one layer that reads the target's normed rows, and borrows its embedding and head."""
    return DraftSpec(
        algorithm=Algorithm.NEXTN,
        decoder=replace(
            target,
            layers=(layer,),
            entry=EntrySpec(norm=target.final_norm),
            borrows=(Borrow.EMBED, Borrow.HEAD),
        ),
        taps=(HiddenTap(point=TapPoint.NORMED, width=target.hidden),),
    )


def _behind(last: LayerSpec, index: int) -> LayerSpec:
    """The target's last layer, once more. It selects its own rows: no layer before it can lend a selection."""
    mixer = last.mixer
    if isinstance(mixer, MLASpec) and mixer.indexer is not None:
        mixer = replace(mixer, indexer=replace(mixer.indexer, is_full=True))
    return replace(last, index=index, mixer=mixer)


def nextn_rules(spec: DecoderSpec, layout: WeightLayout, names: MoENames = HUB) -> Iterator[WeightRule]:
    """Weight rules of a draft made by `derive`. Stored copies of what it borrows are compared with the target's."""
    layers, hidden = tuple(layer.index for layer in spec.layers), spec.hidden
    for source, parameter in (
        ("enorm", "entry.embed_norm"),
        ("hnorm", "entry.hidden_norm"),
        ("shared_head.norm", "norm"),
    ):
        yield _outer(source, Action.LOAD, (hidden,), parameter, layers)
    yield _outer("eh_proj", Action.LOAD, (hidden, 2 * hidden), "entry.proj", layers, is_linear=True)
    for source, parameter in (("embed_tokens", "embed"), ("shared_head.head", "head")):
        yield _outer(source, Action.BORROW, (spec.vocab, hidden), parameter, layers)
    yield from layer_rules(spec, layout, names)


def _outer(
    source: str,
    action: Action,
    shape: tuple[int, ...],
    parameter: str,
    layers: tuple[int, ...],
    *,
    is_linear: bool = False,
) -> WeightRule:
    """A tensor that the checkpoint names after the draft's layer, and the decoder has once."""
    return WeightRule(
        source=f"model.layers.#.{source}.weight",
        action=action,
        shape=shape,
        fills=(Fill(parameter=f"{parameter}.weight"),),
        indices=(layers,),
        is_linear=is_linear,
    )
