"""The real model: it answers in English, and greedily it says what transformers makes of the same file."""

from __future__ import annotations

from pathlib import Path

import pytest

from proa import LLM, SamplingParams
from tests.e2e.command_line import proa

PROMPTS = (
    "Why is the sky blue?",
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a small village by the sea,",
    "List three fruits: 1.",
)
TOKENS = 64


@pytest.mark.model
@pytest.mark.slow
def test_it_answers_in_english(smollm2: Path) -> None:
    done = proa("run", smollm2, "Why is the sky blue?", "--temperature", "0", "--max-tokens", "48")
    assert done.returncode == 0, done.stderr
    assert "light" in done.stdout and "scatter" in done.stdout
    # 8-bit activations lose this one on a model of 135 M parameters, in llama.cpp as here; dequantised weights know it.
    ask = ("What is the capital of France?", "--temperature", "0", "--max-tokens", "32", "--quantization", "none")
    assert "Paris" in proa("run", smollm2, *ask).stdout


@pytest.mark.model
@pytest.mark.oracle
@pytest.mark.slow
def test_greedy_text_equals_that_of_transformers(smollm2: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    where = {"pretrained_model_name_or_path": smollm2.parent, "gguf_file": smollm2.name}
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        **where, dtype=torch.float32, quantization_config=transformers.GgufConfig(dequantize=True)
    ).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    with LLM(smollm2, dtype="float32", max_model_len=256) as llm:
        outputs = llm.generate(list(PROMPTS), SamplingParams(temperature=0.0, max_tokens=TOKENS))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        assert list(output.prompt_token_ids) == ids[0].tolist()
        with torch.inference_mode():
            answer = reference.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False
            )
        expected = answer[0, ids.shape[1] :]
        assert output.outputs[0].text == tokenizer.decode(expected, skip_special_tokens=True)
        assert list(output.outputs[0].token_ids) == expected.tolist()
