"""What bench makes of measured seconds: rates, ratios within a round, rounds that noise swallowed."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from proa.bench import offline
from proa.bench.offline import Figure, Workload, measure, rate, roofline
from proa.errors import ConfigError

DECODE = Workload(name="decode b2", batch=2, prompt_tokens=4, new_tokens=10)


def side(later: float) -> offline.Seconds:
    """One second for an answer of one token, `later` for a longer one."""
    return lambda prompts, count: 1.0 if count <= 2 else later


def test_decoding_is_timed_without_the_prompt() -> None:
    assert rate(side(3.0), DECODE, []) == 2 * 10 / 2.0
    assert rate(side(3.0), Workload(name="prefill", batch=1, prompt_tokens=64, new_tokens=0), []) == 64.0


def test_a_round_in_which_noise_hides_the_answer_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([0.0, 1.0, 0.5, 1.0, 3.0])  # warm-up, then (one token, all tokens) of two rounds

    def timed(llm: Any, prompts: Sequence[Sequence[int]], count: int) -> float:
        return next(seconds)

    monkeypatch.setattr(offline, "generate_seconds", timed)
    [figure] = measure(SimpleNamespace(vocab_size=99), None, [DECODE], rounds=2, probe=lambda: 30.0)
    assert figure.proa == 10.0 and figure.ratio is None


def test_when_noise_hides_all_rounds_the_message_names_the_workload(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline, "generate_seconds", lambda llm, prompts, count: 1.0)
    with pytest.raises(ConfigError, match="decode b2") as caught:
        measure(SimpleNamespace(vocab_size=99), None, [DECODE], rounds=2, probe=lambda: 30.0)
    assert caught.value.slug == "bench/too-short"


def test_roofline_is_of_plain_steps_of_one_row() -> None:
    """100 tokens/s of 200 MB of weights are 20 GB/s, half of 40."""
    for batch, new_tokens, wanted in ((1, 10, (20.0, 0.5)), (8, 10, None), (1, 0, None)):
        work = Workload(name="any", batch=batch, prompt_tokens=32, new_tokens=new_tokens)
        figure = Figure(workload=work, proa=100.0, peer=None, ratio=None, bandwidth=40.0)
        assert roofline(figure, 200_000_000) == wanted
