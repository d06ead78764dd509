"""Script models: acceptance that is known by construction, and output that no draft can change."""

from __future__ import annotations

from pathlib import Path

import pytest

from proa import LLM, SamplingParams
from tests.factories.scripts import script, write_script
from tests.factories.tokenizer import byte_ids

SETTINGS = {"dtype": "float32", "threads": 1, "max_model_len": 128}
SCRIPT = list(range(300, 360))
K = 4


def answer(target: Path, draft: Path, max_tokens: int, **params: object):
    with LLM(str(target), draft=str(draft), num_draft_tokens=K, **SETTINGS) as llm:
        return llm.generate([byte_ids("go")], SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, **params}))[
            0
        ]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_draft_identical_to_the_target_accepts_everything(tmp_path: Path, temperature: float) -> None:
    model = write_script(tmp_path / "model", script(SCRIPT))
    # One token from the prompt's forward, then 8 steps of K + 1.
    output = answer(model, model, 1 + 8 * (K + 1), temperature=temperature, seed=1)
    assert list(output.outputs[0].token_ids) == SCRIPT[: 1 + 8 * (K + 1)]
    speculation = output.metrics.speculative_decoding
    assert speculation["num_drafts"] == 8
    assert speculation["num_accepted_tokens"] == speculation["num_draft_tokens"] == 8 * K
    assert speculation["mean_acceptance_length"] == K + 1
    assert speculation["acceptance_rate_per_position"] == [1.0] * K


def test_a_draft_wrong_after_every_third_token_has_the_histogram_counted_on_paper(tmp_path: Path) -> None:
    target = write_script(tmp_path / "target", script(SCRIPT))
    table = script(SCRIPT)
    for index in range(2, len(SCRIPT), 3):
        table[SCRIPT[index]] = 270
    draft = write_script(tmp_path / "draft", table)
    output = answer(target, draft, 1 + 5 * 3)
    assert list(output.outputs[0].token_ids) == SCRIPT[: 1 + 5 * 3]
    # Anchors stand at script indices 0, 3, 6, ...: two right tokens, then the wrong one.
    speculation = output.metrics.speculative_decoding
    assert speculation["num_drafts"] == 5
    assert speculation["num_accepted_tokens"] == 10
    assert speculation["mean_acceptance_length"] == 3.0
    assert speculation["acceptance_rate_per_position"][:3] == [1.0, 1.0, 0.0]
    assert speculation["acceptance_histogram"][:3] == [0, 0, 5]


def test_a_draft_that_is_always_wrong_is_never_accepted_and_changes_nothing(tmp_path: Path) -> None:
    target = write_script(tmp_path / "target", script(SCRIPT))
    draft = write_script(tmp_path / "draft", [270] * 512)
    output = answer(target, draft, 12)
    assert list(output.outputs[0].token_ids) == SCRIPT[:12]
    speculation = output.metrics.speculative_decoding
    assert speculation["num_accepted_tokens"] == 0
    assert speculation["mean_acceptance_length"] == 1.0


def test_an_end_of_text_inside_an_accepted_run_ends_the_answer_there(tmp_path: Path) -> None:
    model = write_script(tmp_path / "model", script(SCRIPT[:7]))
    output = answer(model, model, 40)
    choice = output.outputs[0]
    assert list(choice.token_ids[:7]) == SCRIPT[:7]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", None)
    assert output.metrics.num_output_tokens == len(choice.token_ids) <= 8


def test_a_stop_string_across_tokens_of_one_accepted_run_cuts_text_and_tokens_together(tmp_path: Path) -> None:
    texts = {300: b"Hel", 301: b"lo wor", 302: b"ld</th", 303: b"ink> never", 304: b" shown"}
    model = write_script(tmp_path / "model", script([300, 301, 302, 303, 304]), texts=texts)
    choice = answer(model, model, 20, stop=["</think>"]).outputs[0]
    assert choice.text == "Hello world"
    assert (choice.finish_reason, choice.stop_reason) == ("stop", "</think>")
    assert list(choice.token_ids) == [300, 301, 302, 303]


def test_a_character_split_over_two_tokens_is_never_shown_in_halves(tmp_path: Path) -> None:
    emoji = "😀".encode()
    texts = {300: b"a ", 301: emoji[:2], 302: emoji[2:], 303: b" b"}
    model = write_script(tmp_path / "model", script([300, 301, 302, 303]), texts=texts)
    with LLM(str(model), draft=str(model), num_draft_tokens=K, **SETTINGS) as llm:
        pieces = list(llm.stream(byte_ids("go"), SamplingParams(temperature=0.0, max_tokens=20)))
    assert "".join(pieces) == "a 😀 b"
    assert not any("�" in piece for piece in pieces)
