"""How verbs open a model: measured ones compute every prompt whole."""

from __future__ import annotations

from io import StringIO
from typing import Any

import pytest

from proa.choice import OriginSource
from proa.cli.loading import open_llm
from proa.cli.output import Output
from proa.config.intent import EngineConfig
from proa.errors import ConfigError
from proa.llm import LLM
from proa.units import Switch
from tests.factories.headers import asked


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[EngineConfig]:
    seen: list[EngineConfig] = []

    def from_config(config: EngineConfig, *rest: Any) -> None:
        seen.append(config)

    monkeypatch.setattr(LLM, "from_config", from_config)
    return seen


@pytest.mark.parametrize(
    ("settings", "is_cold", "value"),
    [
        ({}, False, None),
        ({}, True, Switch.OFF),
        ({"prefix_cache": "on"}, True, Switch.ON),
        ({"prefix_cache": "off"}, False, Switch.OFF),
    ],
)
def test_a_cold_model_reuses_nothing_unless_it_was_asked_to(
    opened: list[EngineConfig], settings: dict[str, str], is_cold: bool, value: Switch | None
) -> None:
    open_llm(asked("model", **settings), Output(StringIO(), StringIO()), is_cold=is_cold)
    [config] = opened
    assert config.cache.prefix_cache.value is value
    if is_cold and not settings:
        assert config.cache.prefix_cache.origin.source is OriginSource.DEFAULT


def test_a_verb_without_a_model_says_so() -> None:
    with pytest.raises(ConfigError, match="MODEL is missing"):
        open_llm(None, Output(StringIO(), StringIO()))
