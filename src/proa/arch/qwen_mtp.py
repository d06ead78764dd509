"""The draft layer that Qwen's hybrids bundle (`mtp.*`, multi-token prediction): its spec and weight rules.

It is the target's layer of full attention once more, numbered 0 under names of its own; never one of linear attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from proa.arch.blocks import AttentionSpec
from proa.arch.common import layer_rules
from proa.arch.decoder import DecoderSpec, DraftSpec
from proa.arch.layout import WeightLayout
from proa.arch.moe import QWEN
from proa.arch.nextn import draft_of
from proa.arch.weights import Action, Fill, WeightRule
from proa.checkpoint.hf_config import HFView
from proa.errors import ConfigError

KEY, DEDICATED = "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"


def derive(c: HFView, target: DecoderSpec) -> DraftSpec | None:
    """The draft that the config announces, or says nothing about: Qwen3-Next's releases hold one that it does not name.

    More layers, or an embedding of its own, are a ConfigError.
    """
    count = c.int(KEY, default=1)
    is_dedicated = c.flag(DEDICATED, default=False)
    full = [layer for layer in target.layers if isinstance(layer.mixer, AttentionSpec)]
    if count == 0 or not full:
        return None
    if count != 1 or is_dedicated:
        said = f"{DEDICATED} = true" if is_dedicated else f"{KEY} = {count}"
        what = "one draft layer that borrows its target's embedding is"
        raise ConfigError("config/unimplemented", f"{c.where}: {said} is not implemented: {what}")
    experts = [layer.ffn for layer in target.moe_layers]
    ffn = experts[-1] if experts else full[-1].ffn
    return draft_of(target, replace(full[-1], index=0, ffn=ffn))


def mtp_rules(spec: DecoderSpec, layout: WeightLayout) -> Iterator[WeightRule]:
    """Weight rules of a draft made by `derive`."""
    hidden = spec.hidden
    for source, parameter in (
        ("pre_fc_norm_embedding", "entry.embed_norm"),
        ("pre_fc_norm_hidden", "entry.hidden_norm"),
        ("norm", "norm"),
    ):
        yield _outer(source, parameter, (hidden,))
    yield _outer("fc", "entry.proj", (hidden, 2 * hidden), is_linear=True)
    for rule in layer_rules(spec, layout, QWEN):
        yield replace(rule, source="mtp." + rule.source.removeprefix("model."))


def _outer(source: str, parameter: str, shape: tuple[int, ...], *, is_linear: bool = False) -> WeightRule:
    return WeightRule(
        source=f"mtp.{source}.weight",
        action=Action.LOAD,
        shape=shape,
        fills=(Fill(parameter=f"{parameter}.weight"),),
        is_linear=is_linear,
    )
