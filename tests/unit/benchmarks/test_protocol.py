"""What a side of a benchmark measures, on an engine whose clock we hold."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.install import PEERS
from benchmarks.sides import protocol
from benchmarks.sides.protocol import measure, peak_bytes, prompts, timed
from benchmarks.workload import CASES, FORMATS, model_path


class Clockwork:
    """An engine that needs 0.25 s for a prompt and 0.5 s for each step after the first token."""

    version = "1"

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.seen: list[Sequence[Sequence[int]]] = []
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> int:
        self.seen.append(prompts)
        self.now += 0.25 + 0.5 * (new_tokens - 1)
        return len(prompts) * new_tokens


def test_decode_rate_leaves_the_prompt_out(monkeypatch: pytest.MonkeyPatch) -> None:
    reply = measure(Clockwork(monkeypatch), batch=8, prompt_tokens=32, new_tokens=48, seed="a")
    assert reply["rate"] == pytest.approx(8 / 0.5)


def test_prefill_rate_counts_the_tokens_of_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    reply = measure(Clockwork(monkeypatch), batch=1, prompt_tokens=512, new_tokens=0, seed="a")
    assert reply["rate"] == pytest.approx(512 / 0.25)


def test_a_long_answer_that_takes_no_longer_than_a_short_one_has_no_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Clockwork(monkeypatch)
    monkeypatch.setattr(engine, "generate", lambda prompts, new_tokens: len(prompts) * new_tokens)
    assert measure(engine, batch=8, prompt_tokens=32, new_tokens=48, seed="a")["rate"] == 0


@pytest.mark.parametrize("new_tokens", [0, 16])
def test_no_prompt_comes_twice_within_a_measurement(monkeypatch: pytest.MonkeyPatch, new_tokens: int) -> None:
    engine = Clockwork(monkeypatch)
    measure(engine, batch=2, prompt_tokens=8, new_tokens=new_tokens, seed="a")
    texts = [tuple(prompt) for batch in engine.seen for prompt in batch]
    assert len(set(texts)) == len(texts)


def test_an_engine_that_stops_early_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Clockwork(monkeypatch)
    monkeypatch.setattr(engine, "generate", lambda prompts, new_tokens: new_tokens - 1)
    with pytest.raises(RuntimeError, match="3 tokens were emitted instead of 1 x 4"):
        timed(engine, [[1]], 4)


def test_prompts_of_one_seed_are_the_same_for_every_engine() -> None:
    assert prompts("b8/3", 2, 5) == prompts("b8/3", 2, 5)
    assert prompts("b8/3", 2, 5) != prompts("b8/4", 2, 5)
    assert {len(prompt) for prompt in prompts("x", 3, 7)} == {7}


def test_peak_memory_is_more_than_an_interpreter_needs_or_unknown() -> None:
    peak = peak_bytes()
    assert peak is None or peak > 4 << 20


def test_every_peer_has_its_script_and_its_formats() -> None:
    sides = Path(protocol.__file__).parent
    assert all((sides / peer.script).exists() for peer in PEERS.values())
    assert set(FORMATS) == {"proa", *PEERS}


def test_cases_are_those_of_the_protocol() -> None:
    shapes = {name: (case.batch, case.prompt_tokens) for name, case in CASES.items()}
    assert shapes == {"prefill512": (1, 512), "b1": (1, 32), "b8": (8, 32), "b32": (32, 32)}


def test_a_model_is_a_file_of_its_directory(tmp_path: Path) -> None:
    (tmp_path / "qwen3-0.6b").mkdir()
    file = tmp_path / "qwen3-0.6b" / "Q4_0.gguf"
    file.touch()
    assert model_path(tmp_path, "qwen3-0.6b-q4_0", "openvino") == file


@pytest.mark.parametrize(("model", "message"), [("smollm2-q4_0", "reads no q4_0"), ("smollm2-bf16", "does not exist")])
def test_a_model_that_an_engine_cannot_read_is_refused_with_the_reason(
    tmp_path: Path, model: str, message: str
) -> None:
    with pytest.raises(SystemExit, match=message):
        model_path(tmp_path, model, "transformers")
