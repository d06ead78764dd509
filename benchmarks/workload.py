"""What is measured, and the file that each engine reads. Data only; the sides make prompts from case and seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`batch` prompts of `prompt_tokens` random tokens each. `new_tokens` 0: the prompt's forward is what is timed."""

    batch: int
    prompt_tokens: int
    new_tokens: int


CASES: Mapping[str, Case] = MappingProxyType(
    {
        "prefill512": Case(batch=1, prompt_tokens=512, new_tokens=0),
        "b1": Case(batch=1, prompt_tokens=32, new_tokens=128),
        "b8": Case(batch=8, prompt_tokens=32, new_tokens=48),
        "b32": Case(batch=32, prompt_tokens=32, new_tokens=48),
    }
)

FORMATS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "proa": {"bf16": "hub", "q8_0": "Q8_0.gguf", "q4_0": "Q4_0.gguf"},
        "llama.cpp": {"bf16": "BF16.gguf", "q8_0": "Q8_0.gguf", "q4_0": "Q4_0.gguf"},
        "ik_llama.cpp": {"bf16": "BF16.gguf", "q8_0": "Q8_0.gguf", "q4_0": "Q4_0.gguf"},
        # It refuses a BF16 file: the same values as F16, computed in bf16.
        "openvino": {"bf16": "F16.gguf", "q8_0": "Q8_0.gguf", "q4_0": "Q4_0.gguf"},
        "vllm": {"bf16": "hub"},
        "transformers": {"bf16": "hub"},
    }
)
"""By engine, then dtype: the file or directory of the model's directory that benchmarks/models.py made."""


def model_path(models: Path, model: str, engine: str) -> Path:
    """`model` is NAME-DTYPE, as in smollm2-bf16. Raises SystemExit with the reason where there is no such file."""
    name, _, dtype = model.rpartition("-")
    file = FORMATS[engine].get(dtype)
    if file is None:
        raise SystemExit(f"{engine} reads no {dtype or model} model; it reads: {', '.join(FORMATS[engine])}")
    path = models / name / file
    if not path.exists():
        raise SystemExit(f"{path} does not exist; make it: python benchmarks/models.py --into {models}")
    return path
