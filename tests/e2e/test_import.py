"""`import proa` is light, and its public names are the ones that it lists."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import proa
from tests.e2e.command_line import SOURCES


def test_importing_proa_brings_in_neither_torch_nor_a_tokenizer() -> None:
    code = "import proa, sys; print(sorted({'torch', 'tokenizers', 'numpy'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": str(SOURCES)}
    )
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize("name", proa.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(proa, name) is not None
    assert name in dir(proa)


def test_any_other_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'llm_engine'"):
        _ = proa.llm_engine


def test_explain_and_inspect_answer_without_torch(tiny: Callable[..., Path]) -> None:
    code = (
        "import proa, sys, json; path = sys.argv[1]; "
        "plan, ledger = proa.explain(path, draft=path), proa.inspect(path); "
        "print(json.dumps([plan['pair']['algorithm'], ledger['unclaimed'], 'torch' in sys.modules]))"
    )
    command = [sys.executable, "-c", code, str(tiny("llama"))]
    done = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": str(SOURCES), "HOME": "/tmp"})
    assert json.loads(done.stdout) == ["standalone", [], False], done.stderr


def test_explain_and_inspect_say_what_a_loaded_model_says(tiny: Callable[..., Path]) -> None:
    with proa.LLM(tiny("qwen2"), dtype="float32") as llm:
        assert proa.explain(tiny("qwen2"), dtype="float32")["runners"] == llm.explain()["runners"]
        dry, loaded = proa.inspect(tiny("qwen2"), dtype="float32"), llm.ledger()
    for part in ("tensors", "parameters", "groups"):
        assert dry["runners"]["target"][part] == loaded["runners"]["target"][part]
