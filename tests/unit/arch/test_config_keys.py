"""The policy of config keys that a family leaves unread: an error, a remark, or nothing."""

from __future__ import annotations

from typing import Any

import pytest

from proa.arch.config_keys import BOOKKEEPING, NEUTRAL, ConfigReport
from proa.arch.registry import read_config
from proa.checkpoint.hf_config import HFView
from proa.errors import ConfigError
from tests.factories.checkpoints import FAMILIES, tiny_config
from tests.factories.moe_checkpoints import MOE_FAMILIES

ALL = (*FAMILIES, *MOE_FAMILIES)


def report_of(family: str, **overrides: Any) -> ConfigReport:
    return read_config(HFView(tiny_config(family) | overrides, where="m/config.json")).report


CHANGING = [
    ("llama", "sliding_window", 4096),
    ("llama", "use_sliding_window", True),
    ("llama", "num_experts", 8),
    ("llama", "num_local_experts", 8),
    ("llama", "hidden_act", "gelu"),
    ("llama", "partial_rotary_factor", 0.5),
    ("llama", "pretraining_tp", 2),
    ("llama", "kv_lora_rank", 512),
    ("llama", "qk_layernorm", True),
    ("llama", "final_logit_softcapping", 30.0),
    ("llama", "residual_multiplier", 0.22),
    ("llama", "num_nextn_predict_layers", 1),
    ("qwen2", "attention_bias", True),
    ("qwen2", "mlp_bias", True),
    ("qwen3", "mlp_bias", True),
    ("qwen3", "moe_intermediate_size", 768),
    ("llama", "scoring_func", "sigmoid"),
    ("mistral", "attention_bias", True),
    ("mistral", "use_qk_norm", True),
]


@pytest.mark.parametrize(("family", "key", "value"), CHANGING)
def test_a_known_key_without_code_in_this_family_is_an_error_naming_file_key_and_value(
    family: str, key: str, value: object
) -> None:
    with pytest.raises(ConfigError) as caught:
        report_of(family, **{key: value})
    text = str(caught.value)
    assert caught.value.slug == "config/unimplemented"
    assert "m/config.json" in text and f"{key} = {value!r}" in text and family in text


@pytest.mark.parametrize("family", ALL)
def test_every_neutral_value_of_every_known_key_is_silent(family: str) -> None:
    read_by_family = {"layer_types", "tie_word_embeddings", "rope_scaling", "rope_parameters", "partial_rotary_factor"}
    neutral = {key: values[0] for key, values in NEUTRAL.items() if values and key not in read_by_family}
    config = {**neutral, **tiny_config(family)}
    assert read_config(HFView(config, where="m/config.json")).report.unknown == {}


@pytest.mark.parametrize("family", ALL)
def test_null_is_neutral_for_every_known_key(family: str) -> None:
    nulls = dict.fromkeys(NEUTRAL) | tiny_config(family)
    assert read_config(HFView(nulls, where="m/config.json")).report.unknown == {}


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su", "mrope"])
def test_a_rope_kind_without_code_is_an_error_naming_it(kind: str) -> None:
    with pytest.raises(ConfigError, match=f"rope_type = '{kind}'") as caught:
        report_of("llama", rope_scaling={"rope_type": kind, "factor": 2.0})
    assert caught.value.slug == "config/unimplemented"


@pytest.mark.parametrize("key", ["attention_factor", "beta_fast", "mscale", "partial_rotary_factor", "never_heard_of"])
def test_a_rope_parameter_that_the_kind_does_not_read_is_an_error(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} = 0.5"):
        report_of("llama", rope_scaling={"rope_type": "linear", "factor": 2.0, key: 0.5})


def test_a_missing_rope_parameter_is_an_error_naming_it() -> None:
    with pytest.raises(ConfigError, match="high_freq_factor"):
        report_of("llama", rope_scaling={"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0})


def test_an_unknown_key_is_reported_with_its_value() -> None:
    assert report_of("llama", harmless_extra=[1, 2]).unknown == {"harmless_extra": (1, 2)}


def test_bookkeeping_keys_are_neither_reported_nor_refused() -> None:
    extras = {key: "anything" for key in BOOKKEEPING if key not in ("architectures", "auto_map")}
    assert report_of("qwen3", **{k: v for k, v in extras.items() if k not in tiny_config("qwen3")}).unknown == {}


def test_the_three_tables_do_not_overlap() -> None:
    assert not BOOKKEEPING & set(NEUTRAL)


def test_code_inside_a_checkpoint_is_noted_as_never_executed() -> None:
    assert any("never executed" in note for note in report_of("llama", auto_map={"AutoModel": "x.Y"}).notes)


def test_an_absent_rope_base_is_said_aloud() -> None:
    config = {key: value for key, value in tiny_config("mistral").items() if key != "rope_theta"}
    reading = read_config(HFView(config, where="m/config.json"))
    spec, report = reading.spec, reading.report
    rope = spec.layers[0].mixer.rope
    assert rope is not None and rope.base == 10000.0
    assert any("rope_theta is absent" in note for note in report.notes)
    assert report_of("mistral").notes == ()


@pytest.mark.parametrize("quant", [None, {}, {"quant_method": "fp8", "weight_block_size": [128, 128]}])
def test_a_quantisation_is_judged_elsewhere(quant: object) -> None:
    assert report_of("llama", quantization_config=quant).unknown == {}
