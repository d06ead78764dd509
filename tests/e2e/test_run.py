"""`proa run` on models whose answer is known: stdout is the answer alone, stderr ends with the closing line."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.command_line import SOURCES, proa
from tests.factories.scripts import script, write_script

SETTINGS = ("--dtype", "float32", "--threads", "1", "--max-model-len", "128")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Says "one two three" whatever it is asked."""
    texts = {300: b"one", 301: b" two", 302: b" three"}
    return write_script(tmp_path_factory.mktemp("model"), script([300, 301, 302]), texts=texts)


def test_stdout_carries_only_the_answer_and_stderr_ends_with_one_line_about_it(model: Path) -> None:
    done = proa("run", model, "Count!", *SETTINGS)
    assert (done.returncode, done.stdout) == (0, "one two three\n"), done.stderr
    last = done.stderr.rstrip().splitlines()[-1]
    assert re.fullmatch(r"4 tokens, \d+\.\d tok/s, ledger closed \(12 tensors\), plan [0-9a-f]{8}", last), last


def test_with_a_draft_the_closing_line_tells_the_accept_length_per_position(model: Path) -> None:
    done = proa("run", model, "Count!", "--draft", model, "--num-draft-tokens", "2", *SETTINGS)
    assert (done.returncode, done.stdout) == (0, "one two three\n"), done.stderr
    assert "accept length 3.00 (100% 100%)" in done.stderr.rstrip().splitlines()[-1]
    assert "(12 + 12 tensors)" in done.stderr


def test_json_has_the_whole_answer(model: Path) -> None:
    done = proa("run", model, "Count!", "--json", *SETTINGS)
    answer = json.loads(done.stdout)
    assert answer["outputs"][0]["text"] == "one two three"
    assert answer["outputs"][0]["finish_reason"] == "stop"
    assert answer["metrics"]["num_output_tokens"] == 4


def test_sampling_flags_reach_the_sampler(model: Path) -> None:
    assert proa("run", model, "x", "--stop", " th", *SETTINGS).stdout == "one two\n"
    assert proa("run", model, "x", "--max-tokens", "1", *SETTINGS).stdout == "one\n"
    assert proa("run", model, "x", "--stop-token-id", "301", "--stop-token-id", "302", *SETTINGS).stdout == "one\n"


def test_the_chat_template_is_used_unless_raw_and_takes_a_system_text(model: Path) -> None:
    def prompt(*flags: str) -> str:
        return json.loads(proa("run", model, "hi", "--json", *flags, *SETTINGS).stdout)["prompt"]

    assert prompt() == "<bos><|user|>hi\n<|assistant|>"
    assert prompt("--system", "Be brief.") == "<bos><|system|>Be brief.\n<|user|>hi\n<|assistant|>"
    assert prompt("--raw") == "hi"


def test_without_a_prompt_it_chats_over_several_turns_until_quit(model: Path) -> None:
    done = proa("run", model, *SETTINGS, stdin="first\n\nsecond\n/quit\nnever\n")
    assert (done.returncode, done.stdout) == (0, "one two three\none two three\n"), done.stderr
    assert proa("run", model, *SETTINGS, stdin="").stdout == ""


@pytest.mark.parametrize(
    ("arguments", "code", "slug"),
    [
        (("run", "no-such-model", "x"), 3, "checkpoint/not-found"),
        (("run", "{model}", "x", "--temperature", "-1"), 2, "request/sampling-params"),
        (("run", "{model}", "x", "--temprature", "1"), 2, "config/unknown-flag"),
        (("run", "{model}", "x", "--dtype", "float8"), 2, "config/bad-value"),
        (("run", "{model}", "x", "--attention", "flashinfer"), 4, "plan/kernel-unavailable"),
        (("run", "{model}", "x", "--attention", "no-such-kernel"), 2, "plan/unknown-value"),
        (("run", "{model}", "word " * 300, "--max-model-len", "64"), 2, "request/too-long"),
    ],
)
def test_errors_are_one_message_on_stderr_with_their_exit_code(model: Path, arguments, code: int, slug: str) -> None:
    done = proa(*(str(model) if argument == "{model}" else argument for argument in arguments))
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert slug in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_tensor_ends_with_exit_code_3_and_its_name(tiny: Callable[..., Path], tmp_path: Path) -> None:
    import shutil

    from safetensors.torch import load_file, save_file

    path = shutil.copytree(tiny("qwen3"), tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path / "model.safetensors")
    done = proa("run", path, "x", *SETTINGS)
    assert (done.returncode, done.stdout) == (3, "")
    assert "model.layers.1.mlp.up_proj.weight" in done.stderr


def test_ctrl_c_ends_an_answer_with_exit_code_130(tiny: Callable[..., Path]) -> None:
    arguments = ["run", str(tiny("llama")), "x", "--ignore-eos", "--max-tokens", "none", "--dtype", "float32"]
    process = subprocess.Popen(
        [sys.executable, "-m", "proa", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={"PYTHONPATH": str(SOURCES), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    assert process.stdout.read(1)  # it is answering
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors.decode()
    assert b"Traceback" not in errors
