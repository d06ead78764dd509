"""Models that wrap a text model: where its config lies, how its tensors are named, what is left out. A table of lenses.

Owns no family. A lens hands the nested config and the nested quantization to everyone alike, so that rules, builder and
loader cannot see different ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from proa.arch.decoder import DecoderSpec
from proa.arch.family import BundledDraft, Family, Weights
from proa.arch.layout import WeightLayout
from proa.arch.weights import WeightRule
from proa.checkpoint.hf_config import HFView
from proa.errors import ConfigError

QUANTIZATION = "quantization_config"
_INHERITED = ("tie_word_embeddings", "dtype", "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id")
"""Keys of a wrapper that speak about the text model too, used where the nested config is silent."""
_TEXT, _LANGUAGE = "text_config", "language_config"
_TOWER = "part of the vision tower: only text is read"
_PROJECTOR = "part of the projector from vision to text: only text is read"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapper:
    """One kind of wrapper.

    It is known by `architectures`, or by `model_types` where a config has no architecture. The body's config lies under
    one of `nested`, or is the wrapper's own if `may_be_flat`. `body` says which architecture that config describes, or
    why there is none. Body tensors whose names begin with a key of `moved` begin with its value instead; others have
    `prefix` before their names. Those of `left_out` are not the body's.
    `hands_quantization`: the wrapper's `quantization_config` holds for a body that has none of its own; if False, the
    body gets none at all.
    """

    architectures: tuple[str, ...]
    body: Callable[[HFView], str]
    nested: tuple[str, ...] = (_TEXT,)
    prefix: str = ""
    moved: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    left_out: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    model_types: tuple[str, ...] = ()
    may_be_flat: bool = False
    hands_quantization: bool = True

    def unwrap(self, config: HFView) -> HFView:
        """The body's config. Raises ConfigError where there is no text model, or none that Proa builds."""
        name = str(next(iter(config.list("architectures", default=())), self.architectures[0]))
        if config.flag("encoder_only", default=False):
            raise ConfigError(
                "arch/no-text-model", f"{config.where}: {name} with encoder_only = true has no text model to run"
            )
        key = self._nested_key(config, name)
        inherited = (*_INHERITED, QUANTIZATION) if self.hands_quantization else _INHERITED
        without = ("vision_config",) if self.hands_quantization else ("vision_config", QUANTIZATION)
        architecture = self.body(config.nested(key, inherited=inherited, without=without, overrides={}))
        overrides = {"architectures": [architecture]}
        body = config.nested(key, inherited=inherited, without=without, overrides=overrides)
        self.body(body)  # again, so that this view remembers which keys were asked for
        return body

    def _nested_key(self, config: HFView, name: str) -> str | None:
        found = [key for key in self.nested if config.has(key)]
        if len(found) > 1:
            raise ConfigError(
                "config/ambiguous-nesting", f"{config.where}: both {found[0]} and {found[1]} are there: which is meant?"
            )
        if not found and not self.may_be_flat:
            raise ConfigError(
                "config/missing-key", f"{config.where}: {name} keeps its text model's config in {self.nested[0]}"
            )
        return found[0] if found else None

    def note(self, config: HFView, body: HFView) -> str:
        """What a person should know: which model this is, and what is not handed to it."""
        names = config.list("architectures", default=())
        said = f"{names[0] if names else self.architectures[0]}: only its text model is read"
        if config.has(QUANTIZATION) and not body.has(QUANTIZATION):
            said += f"; its {QUANTIZATION} is not that of the text model"
        return said

    def around(self, family: Family) -> Family:
        """The body's family, with all its tensors named as the wrapper stores them."""
        drafts = {
            algorithm: BundledDraft(derive=draft.derive, weights=self._renamed(draft.weights))
            for algorithm, draft in family.drafts.items()
        }
        return replace(family, weights=self._renamed(family.weights), drafts=MappingProxyType(drafts))

    def _renamed(self, weights: Weights) -> Weights:
        def rules(spec: DecoderSpec, layout: WeightLayout) -> Iterator[WeightRule]:
            for rule in weights(spec, layout):
                yield replace(rule, source=self._stored(rule.source))

        return rules

    def _stored(self, name: str) -> str:
        for old, new in self.moved.items():
            if name.startswith(old):
                return new + name.removeprefix(old)
        return self.prefix + name


def wrapper_of(config: HFView) -> Wrapper | None:
    names = config.list("architectures", default=())
    for wrapper in WRAPPERS:
        if any(name in wrapper.architectures for name in names):
            return wrapper
    kind = config.str("model_type", default="")
    return next((wrapper for wrapper in WRAPPERS if not names and kind in wrapper.model_types), None)


def body_of(config: HFView) -> HFView:
    """The config of the text model itself: this one, or the one that a known wrapper hands on."""
    wrapper = wrapper_of(config)
    return config if wrapper is None else wrapper.unwrap(config)


def _always_v3(body: HFView) -> str:
    del body
    return "DeepseekV3ForCausalLM"


def _deepseek(body: HFView) -> str:
    """V3's body and V2's differ in the router, and `topk_method` names it."""
    is_v3 = body.str("topk_method", default="greedy") == "noaux_tc"
    return "DeepseekV3ForCausalLM" if is_v3 else "DeepseekV2ForCausalLM"


def _deepseek_or_dense(body: HFView) -> str:
    if body.flag("use_mla", default=True):
        return _deepseek(body)
    raise _not_built(body, "a body with use_mla = false", "experts behind grouped-query attention (DeepSeek V1)")


def _deepseek_ocr(body: HFView) -> str:
    architecture = _deepseek(body)
    return architecture if architecture == "DeepseekV3ForCausalLM" else _deepseek_or_dense(body)


_MISTRAL_BODIES: Mapping[str, str] = MappingProxyType(
    {
        "mistral": "MistralForCausalLM",
        "ministral3": "Ministral3ForCausalLM",
        "mistral4": "Mistral4ForCausalLM",
        "deepseek_v3": "DeepseekV3ForCausalLM",
    }
)


def _mistral(body: HFView) -> str:
    kind = body.str("model_type")
    if kind in _MISTRAL_BODIES:
        return _MISTRAL_BODIES[kind]
    raise _not_built(body, f"a body with model_type = {kind!r}", f"bodies other than {', '.join(_MISTRAL_BODIES)}")


_QWEN_BODIES: Mapping[str, str] = MappingProxyType(
    {"qwen3_5_text": "Qwen3_5ForCausalLM", "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"}
)


def _qwen(body: HFView) -> str:
    kind = body.str("model_type", default="qwen3_5_text")
    if kind in _QWEN_BODIES:
        return _QWEN_BODIES[kind]
    raise _not_built(body, f"a body with model_type = {kind!r}", f"bodies other than {', '.join(_QWEN_BODIES)}")


def _not_built(config: HFView, what: str, missing: str) -> ConfigError:
    return ConfigError(
        "arch/not-built", f"{config.where}: {what} is known, but not built", facts=(f"missing: {missing}",)
    )


def _parts(*towers: str, projectors: tuple[str, ...] = ()) -> Mapping[str, str]:
    return MappingProxyType({**dict.fromkeys(towers, _TOWER), **dict.fromkeys(projectors, _PROJECTOR)})


_INSIDE: Mapping[str, str] = MappingProxyType({"model.": "model.language_model."})
"""The text model lies beside the vision tower, inside `model`; its head and its draft do not."""

WRAPPERS: tuple[Wrapper, ...] = (
    Wrapper(
        architectures=("KimiK25ForConditionalGeneration",),
        body=_always_v3,
        prefix="language_model.",
        left_out=_parts("vision_tower.", projectors=("mm_projector.",)),
    ),
    Wrapper(
        architectures=("KimiVLForConditionalGeneration",),
        body=_deepseek,
        prefix="language_model.",
        left_out=_parts("vision_tower.", projectors=("multi_modal_projector.",)),
    ),
    Wrapper(
        architectures=("DotsVLMForCausalLM",),
        body=_deepseek,
        nested=(_LANGUAGE,),
        left_out=_parts("vision_tower."),
        may_be_flat=True,
    ),
    Wrapper(
        architectures=("DeepseekVL2ForCausalLM", "DeepseekVLV2ForCausalLM"),
        body=_deepseek_or_dense,
        nested=(_LANGUAGE,),
        prefix="language.",
        left_out=_parts("vision.", projectors=("projector.", "image_newline", "view_seperator", "tile_indicators")),
        model_types=("deepseek_vl_v2",),
        hands_quantization=False,
    ),
    Wrapper(
        architectures=("DeepseekOCRForCausalLM",),
        body=_deepseek_ocr,
        nested=(_TEXT, _LANGUAGE),
        left_out=_parts(
            "model.sam_model.",
            "model.vision_model.",
            projectors=("model.projector.", "model.image_newline", "model.view_seperator"),
        ),
    ),
    Wrapper(
        architectures=("PixtralForConditionalGeneration", "Mistral3ForConditionalGeneration"),
        body=_mistral,
        prefix="language_model.",
        left_out=_parts("vision_tower.", projectors=("multi_modal_projector.",)),
    ),
    Wrapper(
        architectures=("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"),
        body=_qwen,
        moved=_INSIDE,
        left_out=_parts("model.visual."),
    ),
    Wrapper(
        architectures=("MiniCPMV4_6ForConditionalGeneration", "MiniCPMV4_7ForConditionalGeneration"),
        body=_qwen,
        moved=_INSIDE,
        left_out=_parts("model.vision_tower.", projectors=("model.merger.",)),
    ),
)

_GLM4V = "the GLM-4V text model and its rope over three axes"
_M3 = "MiniMax-M3's block-sparse attention and clamped experts"
_BAILING = "Bailing's text model"
NOT_BUILT: Mapping[str, str] = MappingProxyType(
    {
        "BailingMoeV3ForCausalLM": _BAILING,
        "BailingMoeV3VLForConditionalGeneration": _BAILING,
        "DeepseekForCausalLM": "experts behind grouped-query attention (DeepSeek V1)",
        "DeepseekOCR2ForCausalLM": "DeepSeek-OCR 2's text model and names",
        "DeepseekV4ForCausalLM": "hyper-connections and compressed attention",
        "Glm4vForConditionalGeneration": _GLM4V,
        "Glm4vMoeForConditionalGeneration": _GLM4V,
        "Glm5NextForConditionalGeneration": "GLM-5-Next's linear attention and its pooled index",
        "GlmOcrForConditionalGeneration": _GLM4V,
        "MiniCPMV": "MiniCPM-V's text models and names",
        "MiniMaxM3SparseForCausalLM": _M3,
        "MiniMaxM3SparseForConditionalGeneration": _M3,
    }
)
"""Architectures that share parts with what Proa builds, and what they need beyond that."""


def refuse_not_built(config: HFView) -> None:
    """Raises ConfigError `arch/not-built` for an architecture that is known, with what is missing."""
    for name in map(str, config.list("architectures", default=())):
        if name in NOT_BUILT:
            raise _not_built(config, name, NOT_BUILT[name])
        if name.endswith(("NextN", "MTP")):
            raise _not_built(config, name, "a target: a draft is read from the checkpoint that bundles both")
